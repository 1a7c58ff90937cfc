"""Files of results that are no regular files, or have no end, block no reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_command
from dashboard_results import write_state, write_trial

#: A reader that waits for a FIFO would wait forever. Each test therefore has 60 seconds.
pytestmark = pytest.mark.timeout(60)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["result.json", "params.json"])
@pytest.mark.parametrize("make", [fifo, endless_device, sparse_file])
def test_results_show_files_that_are_not_read(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")
    from polopt.dashboards.data.trials import ResultsDirectory

    folder = write_trial(tmp_path / "results", "sync_samples", 1, 3)
    make(folder / name)
    directory = ResultsDirectory(tmp_path / "results", tmp_path / "cache")
    directory.refresh()
    (trial,) = directory.trials
    assert any(f"{name} cannot be read: " in problem for problem in trial.problems)
    assert (trial.rows.num_rows == 3) == (name == "params.json")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["error.txt", "optimizer.json", "../tuner.pkl", "../experiment_state-9.json"]
)
@pytest.mark.parametrize("make", [fifo, endless_device])
def test_other_files_of_results_do_not_block(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")
    from polopt.dashboards.data.trials import ResultsDirectory

    folder = write_trial(tmp_path / "results", "sync_samples", 1, 3)
    write_state(folder.parent, {folder.name: {"status": "RUNNING"}})
    make(folder / name)
    directory = ResultsDirectory(tmp_path / "results", tmp_path / "cache")
    directory.refresh()
    (trial,) = directory.trials
    assert trial.rows.num_rows == 3
    said = [trial.error, *trial.problems]
    assert any("not a regular file" in text for text in said) == (not name.startswith(".."))


def test_report_of_a_fifo_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="the extra polopt[dashboard] is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fifo(write_trial(tmp_path / "results", "sync_samples", 1, 3) / "result.json")
    output = tmp_path / "report.html"
    done = run_command(["report", str(tmp_path / "results"), "-o", str(output)])
    assert done.exit_code == 0, done.output


def test_line_without_end_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")
    from polopt.dashboards.data.trials import ResultsDirectory

    folder = write_trial(tmp_path / "results", "sync_samples", 1, 3)
    with (folder / "result.json").open("ab") as file:
        file.truncate(file.tell() + (40 << 20))  # zeros without an end of line
    directory = ResultsDirectory(tmp_path / "results", tmp_path / "cache")
    directory.refresh()
    (trial,) = directory.trials
    assert trial.rows.num_rows == 3
    assert "line 4 is longer than 16,777,216 bytes" in trial.problems[0]
    version = trial.rows.version
    directory.refresh()
    assert trial.rows.version == version


@pytest.mark.parametrize("make", [fifo, endless_device])
def test_trace_that_is_no_regular_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "trace.json")
    done = run_command(["trace", str(tmp_path)])
    assert done.exit_code == 2
    assert "not a regular file" in done.stderr


def test_names_in_a_trace_do_not_reach_the_terminal(tmp_path: Path) -> None:
    trace = (
        '{"otherData": {"first_step": 1, "num_steps": 1, "duration_s": 1.0, "truncated": ["NAME"]},'
        ' "traceEvents": []}'
    )
    escaped = "\\u001b[2J"
    (tmp_path / "trace.json").write_text(trace.replace("NAME", escaped))
    shown = run_command(["trace", str(tmp_path / "trace.json")])
    assert shown.exit_code == 0, shown.output
    assert r"note        \x1b[2J has too many events" in shown.stdout
