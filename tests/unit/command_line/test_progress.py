"""Tests of the output of a run: the rows, the lines, the time left, and the warnings."""

from __future__ import annotations

import io
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_helpers import result
from rich.console import Console

from polopt.command_line import progress_table
from polopt.command_line.output import say_findings
from polopt.command_line.progress_table import (
    Progress,
    cells,
    duration,
    line,
    longest_phase,
    share_done,
    time_left_s,
)


def test_line_has_units_and_fits_100_columns() -> None:
    text = line(cells(result(), {"num_env_steps_sampled_lifetime": 1_000_000}))
    assert text == (
        "return 85.0  steps 15,758  steps/s 12,346  left 1m20s  lag 0.9 updates  driver: wait 60%"
    )
    assert len(text) <= 100


def test_last_evaluation_is_shown_until_the_next() -> None:
    def evaluated(mean: float) -> dict[str, Any]:
        return result(evaluation={"env_runners": {"episode_return_mean": mean}})

    console = Console(file=io.StringIO(), width=120)
    with Progress(console, "t", {}, Path("none")) as progress:
        for mean in (math.nan, 250.0, math.nan):
            progress.on_trial_result(0, [], None, evaluated(mean))
    lines = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    shown = [text.partition("evaluation ")[2].split()[0] for text in lines]
    assert shown == ["-", "250.0", "250.0"]
    assert "evaluation" not in line(cells(result(), {}))


def test_line_names_missing_workers() -> None:
    text = line(cells(result(fault_tolerance={"num_healthy_workers": 1}), {}))
    assert "workers 1/2" in text


def test_run_without_workers_counts_none() -> None:
    alone = result(fault_tolerance={"num_healthy_workers": 0}, config={"num_workers": 0})
    assert cells(alone, {})["workers"] == "-"
    assert "workers" not in line(cells(alone, {}))


@pytest.mark.parametrize(
    ("returns", "shown"),
    [
        ({"default_policy": 85.0}, "return 85.0  "),
        ({"hunters": 95.26, "prey": -10.26}, "return 85.0 (hunters 95.3, prey -10.3)  "),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, "return 85.0 (a 1.0, b 2.0, ...)  "),
    ],
)
def test_returns_of_several_policies(returns: dict[str, float], shown: str) -> None:
    found = {"episode_return_mean": 85.0, "module_episode_returns_mean": returns}
    assert line(cells(result(env_runners=found), {})).startswith(shown)


def test_return_before_the_first_episode() -> None:
    row = cells(result(env_runners={"episode_return_mean": math.nan}), {})
    assert row["return"] == "-"


@pytest.mark.parametrize(
    ("limits", "left_s"),
    [
        ({}, math.nan),
        ({"env_runners/episode_return_mean": 450}, math.nan),
        ({"num_env_steps_sampled_lifetime": 15_758 + 123_456}, 10.0),
        ({"training_iteration": 10}, 12.0),
        ({"time_total_s": 12, "training_iteration": 10}, 3.0),
        ({"training_iteration": 4}, 0.0),
    ],
)
def test_time_left_is_that_to_the_first_limit(limits: dict[str, float], left_s: float) -> None:
    assert time_left_s(result(), limits) == pytest.approx(left_s, nan_ok=True)


def test_durations() -> None:
    assert [duration(s) for s in (45, 725, 11_220, math.nan)] == ["45s", "12m05s", "3h07m", "-"]


def test_longest_phase_has_the_largest_share() -> None:
    share = {"wait": 0.2, "report": 0.7, "other": 0.1}
    assert longest_phase({"optimizer": {"driver": {"share": share}}}) == "report 70%"


def test_table_fits_80_columns(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with Progress(console, "title", {"training_iteration": 9}, tmp_path / "log") as progress:
        big = result(
            env_runners={"episode_return_mean": -1234.56},
            num_env_steps_sampled_lifetime=12_345_678,
            num_env_steps_sampled_per_second=101_234.0,
        )
        progress.on_trial_result(1, [], None, big)
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80 + 20  # including cursor movements
    for text in ("-1234.6", "12,345,678", "101,234", "10s", "2/2", "0.9", "wait 60%"):
        assert text in shown


def test_warnings_here_and_in_the_trial_are_one_line_each(tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "log"
    with Progress(Console(file=out, width=40), "title", {}, log) as progress:
        logging.getLogger("polopt").warning("worker %d failed (death)\n and is replaced", 3)
        progress.on_step_begin(1, [])
        log.write_text("from the trial\n")
        progress.on_step_begin(2, [])
        progress.on_step_begin(3, [])
    logging.getLogger("polopt").warning("after the end")
    assert out.getvalue() == "title\nworker 3 failed (death) and is replaced\nfrom the trial\n"


def test_end_of_a_run_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"num_healthy_workers": 2, "num_env_faults": 7, "last_env_fault": "ValueError: boom"}
    with Progress(Console(file=io.StringIO()), "title", {}, tmp_path / "log") as progress:
        progress.on_trial_result(1, [], None, result(fault_tolerance=faults))
    say_findings(progress.findings())
    assert capsys.readouterr().out == (
        "diagnosis   7 environment faults: ValueError: boom\n"
        "            -> fix the environment; a fault interrupts the episode, and the statistics "
        "omit this episode\n"
    )


def test_time_is_shown_while_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("polopt.command_line.progress_table.time.monotonic", lambda: now_s[0])
    out = io.StringIO()
    with Progress(Console(file=out), "title", {}, tmp_path / "log") as progress:
        progress.say("starting workers")
        for _ in range(75):
            now_s[0] += 1.0
            progress.on_step_begin(1, [])
        progress.on_trial_start(1, [], None)
        now_s[0] += 100.0
        progress.on_step_begin(2, [])
        progress.on_trial_start(1, [], None)  # the trial is started again after a failure
    assert out.getvalue().splitlines() == [
        "title",
        "starting workers",
        "starting workers, 30s",
        "starting workers, 1m00s",
        "training (started in 1m15s); Ctrl-C stops and saves",
        "training; Ctrl-C stops and saves",
    ]


def test_terminal_shows_the_time_while_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("polopt.command_line.progress_table.time.monotonic", lambda: now_s[0])
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with Progress(console, "title", {}, tmp_path / "log") as progress:
        progress.say("starting workers")
        now_s[0] += 12.0
        console.print(progress._view())
        assert "starting workers, 12s" in out.getvalue()
        progress.on_trial_start(1, [], None)
        console.print(progress._view())
    assert "training (started in 12s); Ctrl-C stops and saves" in out.getvalue()


def learning(rise: float, steps_between: int) -> list[dict[str, Any]]:
    """Returns twenty results whose mean return increases by `rise` each time."""
    return [
        result(
            env_runners={
                "episode_return_mean": 20.0 + rise * number,
                "episode_return_min": 10.0,
                "episode_return_max": 40.0,
            },
            num_env_steps_sampled_lifetime=steps_between * (number + 1),
            training_iteration=number + 1,
        )
        for number in range(20)
    ]


def test_missing_return_is_explained(tmp_path: Path) -> None:
    """The remark is repeated when the number of steps has grown by a factor of 10."""
    console = Console(file=io.StringIO(), width=200)
    with Progress(console, "t", {}, tmp_path / "log") as progress:
        for steps in (4_000, 8_000, 40_000, 44_000, 48_000):
            mean = math.nan if steps < 44_000 else 3.0
            ended = {"episode_return_mean": mean}
            counts = {"num_env_steps_sampled_lifetime": steps}
            progress.on_trial_result(0, [], None, result(env_runners=ended, **counts))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    remarks = [text for text in lines if text.startswith("remark")]
    assert [text.partition(" steps")[0].split()[-1] for text in remarks] == ["4,000", "40,000"]
    assert "no episode has ended yet" in remarks[0]
    assert "max_frames_per_traj" in remarks[0]
    assert lines.index(remarks[0]) == 2  # after the title and the first line of the run


@pytest.mark.parametrize(
    ("rise", "steps_between", "remarks"), [(0.0, 30_000, 1), (5.0, 30_000, 0), (0.0, 5_000, 0)]
)
def test_many_steps_that_change_nothing_are_remarked_once(
    tmp_path: Path, rise: float, steps_between: int, remarks: int
) -> None:
    out = io.StringIO()
    with Progress(Console(file=out), "title", {}, tmp_path / "log") as progress:
        for one in learning(rise, steps_between):
            progress.on_trial_result(1, [], None, one)
    found = [text for text in out.getvalue().splitlines() if text.startswith("remark: ")]
    assert len(found) == remarks
    assert all(
        "No learning in " in text and "return 20 at first, 20 now -> raise or lower lr" in text
        for text in found
    )


def test_tune_can_pickle_progress(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(console, "title", {"training_iteration": 9}, tmp_path / "log") as progress:
        copy = pickle.loads(pickle.dumps(progress))
    assert copy.num_results == 0


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({}, math.nan),
        ({"env_runners/episode_return_mean": 450}, math.nan),
        ({"num_env_steps_sampled_lifetime": 31_516}, 0.5),
        ({"time_total_s": 10, "training_iteration": 10}, 0.9),
        ({"training_iteration": 2}, 1.0),
        ({"training_iteration": 0}, 1.0),
    ],
)
def test_share_done_is_the_largest(limits: dict[str, float], share: float) -> None:
    assert share_done(result(), limits) == pytest.approx(share, nan_ok=True)


def test_bar_shows_the_share_and_the_time_left(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with Progress(console, "title", {"training_iteration": 8}, tmp_path / "log") as progress:
        progress.on_trial_result(1, [], None, result())
    assert "50%, 8s left" in out.getvalue()


@pytest.mark.parametrize("installed", [True, False])
def test_notebook_shows_the_table_where_it_can(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        progress_table.importlib.util, "find_spec", lambda name: "spec" if installed else None
    )
    progress = Progress(Console(force_jupyter=True), "title", {}, Path("none"))
    assert progress._is_live() == installed
