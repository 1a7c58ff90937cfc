"""Reading of result files: what is appended, repeated, half-written, missing or unreadable."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from dashboard_results import write_trial

pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")

from polopt.dashboards.data import results as results_module
from polopt.dashboards.data import trial_rows
from polopt.dashboards.data.results import RETURN, STEPS, ResultsDirectory, Trial
from polopt.dashboards.data.rows import LineParser, RowColumns, rows_in_effect


def opened(root: Path, cache: Path) -> ResultsDirectory:
    directory = ResultsDirectory(root, cache)
    directory.refresh()
    return directory


def values(trial: Trial, name: str) -> list[float]:
    column = trial.values(name)
    assert column is not None
    return list(column)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_trial_has_config_state_and_rows(root: Path, cache: Path) -> None:
    write_trial(root / "exp", "sync_samples", 7, 5)
    (trial,) = opened(root, cache).trials
    assert (trial.experiment, trial.trainable, trial.state) == ("exp", "SyncPPO", "finished")
    assert trial.optimizer == "sync_samples"
    assert trial.config["seed"] == 7
    assert values(trial, "training_iteration") == [1, 2, 3, 4, 5]
    histogram = trial.values("optimizer/policy_lag/histogram/16")
    assert histogram is not None
    assert len(histogram) == 5


def test_one_trial_directory_opens(root: Path, cache: Path) -> None:
    folder = write_trial(root / "exp", "sync_samples", 7, 5)
    (trial,) = opened(folder, cache).trials
    assert trial.experiment == "exp"


def test_rows_written_twice_are_shown_once(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 1, 8, finished=False)
    file = folder / "result.json"
    first = [json.loads(line) for line in file.read_text().splitlines()]
    again = [{**row, "num_env_steps_sampled_lifetime": 1_000_000} for row in first[4:6]]
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in again)
    (trial,) = opened(root, cache).trials
    # Iterations 7 and 8 are not part of the history of the resumed run, either.
    assert values(trial, "training_iteration") == [1, 2, 3, 4, 5, 6]
    assert values(trial, STEPS)[4:] == [1_000_000, 1_000_000]


def test_rows_in_effect_keeps_later_rows() -> None:
    iterations = np.array([1, 2, 3, 4, 3, 4, 5, np.nan])
    assert rows_in_effect(iterations).tolist() == [True, True, *[False] * 2, *[True] * 4]
    assert rows_in_effect(np.empty(0)).tolist() == []


def test_appended_rows_are_read_from_their_offset(root: Path, cache: Path) -> None:
    write_trial(root, "sync_samples", 1, 5, finished=False)
    directory = opened(root, cache)
    sizes = []
    write_trial(root, "sync_samples", 1, 3, first=6)
    directory.refresh(lambda done, total, name: sizes.append((done, total)))
    (trial,) = directory.trials
    assert values(trial, "training_iteration") == [1, 2, 3, 4, 5, 6, 7, 8]
    done, total = sizes[0]
    assert done < total / 2  # not the five rows that were read before
    assert not directory.refresh()


def test_half_written_line_is_read_when_complete(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 1, 3, finished=False)
    file = folder / "result.json"
    text = file.read_text()
    file.write_text(text[:-40])
    directory = opened(root, cache)
    (trial,) = directory.trials
    assert values(trial, "training_iteration") == [1, 2]
    assert trial.state == "running"
    assert trial.problems == []  # a running trial completes it
    file.write_text(text)
    directory.refresh()
    assert values(trial, "training_iteration") == [1, 2, 3]


def test_half_written_line_of_a_stopped_run_is_named(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 1, 3, finished=False)
    file = folder / "result.json"
    file.write_text(file.read_text()[:-40])
    os.utime(file, (1e9, 1e9))
    (trial,) = opened(root, cache).trials
    assert trial.state == "stopped"
    assert "half-written" in trial.problems[0]


@pytest.mark.parametrize("bad", ["{broken", "[1, 2]", "null", '{"a": ' * 20_000, "\x00\xff"])
def test_unreadable_line_is_named_and_skipped(root: Path, cache: Path, bad: str) -> None:
    folder = write_trial(root, "sync_samples", 1, 4)
    lines = (folder / "result.json").read_text().splitlines()
    (folder / "result.json").write_text("\n".join([*lines[:2], bad, *lines[2:]]) + "\n")
    (trial,) = opened(root, cache).trials
    assert values(trial, "training_iteration") == [1, 2, 3, 4]
    assert trial.problems == ["result.json: line 3 skipped: not a JSON object"]


def test_unreadable_file_does_not_hide_others(root: Path, cache: Path) -> None:
    write_trial(root, "sync_samples", 1, 3)
    folder = root / "A3C_00000_00000"
    (folder / "result.json").mkdir(parents=True)
    (folder / "params.json").write_text("{")
    trials = opened(root, cache).trials
    assert [trial.state for trial in trials] == ["no results", "finished"]
    assert any("params.json is not JSON" in problem for problem in trials[0].problems)
    assert any("result.json cannot be read" in problem for problem in trials[0].problems)


def test_config_of_rows_replaces_missing_params(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 3, 3)
    (folder / "params.json").unlink()
    (trial,) = opened(root, cache).trials
    assert trial.config["seed"] == 3


def test_keys_may_come_go_and_change_type(root: Path, cache: Path) -> None:
    rows = RowColumns()
    LineParser().parse(
        b'{"a": 1, "learners": {"x": 2}}\n'
        b'{"optimizer": {"late": NaN}, "learners": {"x": "text"}}\n'
        b'{"a": 1e999, "optimizer": {"late": 5, "list": [1, {"k": 2}]}, "b": 1'
        + b"0" * 400
        + b"}\n",
        rows,
    )
    assert rows.num_rows == 3
    np.testing.assert_equal(rows.column("a"), [1, np.nan, np.inf])
    np.testing.assert_equal(rows.column("optimizer/late"), [np.nan, np.nan, 5])
    np.testing.assert_equal(rows.column("optimizer/list/1/k"), [np.nan, np.nan, 2])
    np.testing.assert_equal(rows.column("b"), [np.nan, np.nan, np.inf])


def test_dict_of_numbers_may_change_its_types() -> None:
    rows = RowColumns()
    for values in ({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5, "b": "x"}, {}, {"a": 7, "b": 8}):
        rows.append({"optimizer": values})
    rows.append({})
    rows.append({"optimizer": {"a": 9, "b": None, "c": 10**400}})
    nan = np.nan
    np.testing.assert_equal(rows.column("optimizer/a"), [1, 3, 5, nan, 7, nan, 9])
    np.testing.assert_equal(rows.column("optimizer/c"), [nan] * 6 + [np.inf])
    assert rows.column("optimizer/b").tolist()[2] == "x"


def test_paths_with_the_same_joined_name_are_one_column() -> None:
    rows = RowColumns()
    for number in range(3):
        rows.append({"optimizer": {"x": {"y": number}, "x/y": 9}, "learners": {"x/y": number}})
    np.testing.assert_equal(rows.column("optimizer/x/y"), [0, 1, 2])
    np.testing.assert_equal(rows.column("learners/x/y"), [0, 1, 2])


def test_second_process_reads_the_cache(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_rows, "_LEAST_NEW_ROWS", 10)
    write_trial(root, "sync_samples", 1, 30, finished=False)
    first = opened(root, cache).trials[0]
    write_trial(root, "sync_samples", 1, 2, first=31)
    read = []
    directory = ResultsDirectory(root, cache)
    directory.refresh(lambda done, total, name: read.append((done, total)))
    (trial,) = directory.trials
    done, total = read[0]
    assert done < total / 4  # the two new rows of 32
    assert values(trial, "training_iteration") == list(range(1, 33))
    np.testing.assert_equal(first.values(RETURN), values(trial, RETURN)[:30])
    assert trial.config == first.config
    assert list((root).rglob("*.parquet")) == []  # nothing is written beside the results


def test_replaced_file_is_read_anew(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_rows, "_LEAST_NEW_ROWS", 10)
    folder = write_trial(root, "sync_samples", 1, 30)
    directory = opened(root, cache)
    other = write_trial(root.parent / "other", "async_gradients", 2, 40)
    (other / "result.json").replace(folder / "result.json")
    directory.refresh()
    (trial,) = directory.trials
    assert trial.optimizer == "async_gradients"
    assert values(trial, "training_iteration") == list(range(1, 41))


def test_broken_cache_file_is_built_anew(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_rows, "_LEAST_NEW_ROWS", 10)
    write_trial(root, "sync_samples", 1, 30)
    opened(root, cache)
    for file in cache.glob("*.parquet"):
        file.write_bytes(b"PAR1 is not a Parquet file")
    (trial,) = opened(root, cache).trials
    assert values(trial, "training_iteration") == list(range(1, 31))


def test_cache_that_cannot_be_written_is_left_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_rows, "_LEAST_NEW_ROWS", 10)
    write_trial(root, "sync_samples", 1, 30)
    (tmp_path / "cache").write_text("a file in the place of the folder")
    (trial,) = opened(root, tmp_path / "cache").trials
    assert values(trial, "training_iteration") == list(range(1, 31))


def test_running_trial_is_read_where_tune_writes(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = write_trial(root / "exp", "sync_samples", 1, 3, finished=False)
    session = tmp_path / "ray" / "session_2026" / "artifacts" / "2026" / "exp" / "driver_artifacts"
    staged = session / folder.name
    staged.mkdir(parents=True)
    text = (folder / "result.json").read_text()
    (staged / "result.json").write_text(text)
    write_trial(root / "exp", "sync_samples", 1, 2, first=4)
    (staged / "result.json").write_text((folder / "result.json").read_text())
    (folder / "result.json").write_text(text)  # Tune copies late
    (trial,) = opened(root, cache).trials
    assert values(trial, "training_iteration") == [1, 2, 3, 4, 5]


def test_failed_trial_is_shown_as_failed(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 1, 3, finished=False)
    (folder / "error.txt").write_text("RuntimeError")
    assert opened(root, cache).trials[0].state == "failed"


def test_unused_cache_files_are_removed(cache: Path) -> None:
    cache.mkdir()
    old, new = cache / "old.parquet", cache / "new.parquet"
    for file in (old, new):
        file.write_bytes(b"")
    os.utime(old, (1e9, 1e9))
    results_module.remove_unused(cache)
    assert sorted(cache.iterdir()) == [new]
