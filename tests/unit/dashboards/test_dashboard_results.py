"""Result files are read incrementally, even if they are damaged, replaced or incomplete."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_results import row, write_state, write_trial

import polopt

pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")


from polopt.dashboards.data import cache as cache_module
from polopt.dashboards.data import trial_rows
from polopt.dashboards.data.rows import (
    CONFIG_CHANGES,
    LineParser,
    RowColumns,
    rows_in_effect,
)
from polopt.dashboards.data.trials import RETURN, STEPS, ResultsDirectory, Trial
from polopt.dashboards.data.tune_state import TuneStates, scan_pickle


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
    # The resumed run continued after iteration 4, so the older rows 5 to 8 are not shown.
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
    assert done < total / 2  # the five old rows are not read again
    version = trial.rows.version
    directory.refresh()
    assert trial.rows.version == version


def test_half_written_line_is_read_when_complete(root: Path, cache: Path) -> None:
    folder = write_trial(root, "sync_samples", 1, 3, finished=False)
    file = folder / "result.json"
    text = file.read_text()
    file.write_text(text[:-40])
    directory = opened(root, cache)
    (trial,) = directory.trials
    assert values(trial, "training_iteration") == [1, 2]
    assert trial.state == "running"
    assert trial.problems == []  # a running trial will complete the line
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
    assert "incomplete" in trial.problems[0]


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
        rows.append({"optimizer": values}, 100)
    rows.append({}, 2)
    rows.append({"optimizer": {"a": 9, "b": None, "c": 10**400}}, 100)
    nan = np.nan
    np.testing.assert_equal(rows.column("optimizer/a"), [1, 3, 5, nan, 7, nan, 9])
    np.testing.assert_equal(rows.column("optimizer/c"), [nan] * 6 + [np.inf])
    assert rows.column("optimizer/b").tolist()[2] == "x"


def test_paths_with_the_same_joined_name_are_one_column() -> None:
    rows = RowColumns()
    for number in range(3):
        rows.append({"optimizer": {"x": {"y": number}, "x/y": 9}, "learners": {"x/y": number}}, 100)
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


def stage(tmp_path: Path, directory: Path, trial: str, session: str) -> Path:
    """Writes the state of a run. Returns the path at which Tune stages the trial's result file.

    Args:
        tmp_path: directory of the test.
        directory: the results directory of the experiment.
        trial: name of the trial.
        session: time at which the run began.
    """
    place = tmp_path / "ray" / f"session_{session}" / "artifacts" / session / directory.name
    staged = place / "driver_artifacts"
    (staged / trial).mkdir(parents=True)
    write_state(staged, {trial: {"status": "RUNNING"}}, session, directory=directory)
    return staged / trial / "result.json"


FIRST, SECOND = "2026-01-01_00-00-00", "2026-01-02_00-00-00"


def test_running_trial_is_read_where_tune_writes(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = write_trial(root / "exp", "sync_samples", 1, 3, finished=False)
    file = stage(tmp_path, root / "exp", folder.name, FIRST)
    text = (folder / "result.json").read_text()
    write_trial(root / "exp", "sync_samples", 1, 2, first=4, finished=False)
    (folder / "result.json").replace(file)
    (trial,) = opened(root, cache).trials  # before Tune copies the file
    assert (values(trial, "training_iteration"), trial.state) == ([1, 2, 3, 4, 5], "running")
    (folder / "result.json").write_text(text)  # Tune copies late
    (trial,) = opened(root, cache).trials
    assert values(trial, "training_iteration") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number_of_rows", [2, 9])
def test_rows_of_another_run_with_the_same_names_are_not_shown(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number_of_rows: int
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = write_trial(root / "exp", "sync_samples", 1, 5)
    write_state(root / "exp", {folder.name: {"status": "TERMINATED"}}, FIRST)
    elsewhere = tmp_path / "elsewhere" / "exp"
    other = write_trial(tmp_path / "made", "async_gradients", 2, number_of_rows)
    file = stage(tmp_path, elsewhere, folder.name, SECOND)
    (other / "result.json").replace(file)
    (trial,) = opened(root, cache).trials
    assert trial.optimizer == "sync_samples"
    # An earlier run in the same directory left this file.
    session = "2025-01-01_00-00-00"
    older = stage(tmp_path, root / "exp", folder.name, session)
    file.replace(older)
    (trial,) = opened(root, cache).trials
    assert trial.optimizer == "sync_samples"
    assert trial.state == "finished"


def test_rows_of_the_last_run_of_a_directory_are_shown(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = write_trial(root / "exp", "sync_samples", 1, 9)
    write_state(root / "exp", {folder.name: {"status": "TERMINATED"}}, FIRST)
    again = write_trial(tmp_path / "made", "async_gradients", 2, 2, finished=False)
    (again / "result.json").replace(stage(tmp_path, root / "exp", folder.name, SECOND))
    (trial,) = opened(root, cache).trials
    assert (trial.optimizer, trial.state) == ("async_gradients", "running")
    assert values(trial, "training_iteration") == [1, 2]


def test_processes_of_trials_at_the_same_time_are_counted(root: Path, cache: Path) -> None:
    """Trials with 3 processes, and one with 1."""
    spans_s = {  # by seed, in seconds since the epoch
        0: (100.0, 200.0),
        1: (150.0, 400.0),
        2: (400.0, 500.0),  # directly after trial 1
        3: (100.0, 200.0),
        4: (100.0, 1e300),
    }
    for seed, (begun_s, ended_s) in spans_s.items():
        workers = 0 if seed == 3 else 2
        folder = write_trial(root / "exp", "sync_samples", seed, 2, num_workers=workers)
        first, last = map(json.loads, (folder / "result.json").read_text().splitlines())
        first |= {"timestamp": begun_s + 7.0, "time_this_iter_s": 7.0}
        last |= {"timestamp": ended_s}
        (folder / "result.json").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    write_trial(root / "other", "sync_samples", 9, 2)
    trials = {trial.config["seed"]: trial for trial in opened(root, cache).trials}
    processes = {seed: trial.num_processes for seed, trial in trials.items()}
    assert processes == {0: 3, 1: 3, 2: 3, 3: 1, 4: 3, 9: 3}
    others = {seed: trial.other_processes for seed, trial in trials.items()}
    # Trial 0: 0.5 * 3 + 1 = 2.5. Trial 1: 0.2 * (3 + 1) = 0.8. Trial 3: 3 + 0.5 * 3 = 4.5.
    assert others == {0: 2, 1: 1, 2: 0, 3: 4, 4: 0, 9: 0}


def test_findings_know_the_trials_at_the_same_time(root: Path, cache: Path) -> None:
    for seed in range(6):
        write_trial(root / "exp", "sync_samples", seed, 8)
    file = next((root / "exp").glob("*_0/result.json"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for one in rows:
        one["optimizer"]["machine"] |= {"cpu_share": 1.0, "num_cpus": 2, "load_1m": 17.0}
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    first, *_ = sorted(opened(root, cache).trials, key=lambda trial: trial.config["seed"])
    assert first.other_processes == 15
    assert "trials-share-cores" in {finding.rule for finding in first.findings}
    assert "machine-busy" not in {finding.rule for finding in first.findings}


def test_derived_values_follow_new_rows(root: Path, cache: Path) -> None:
    write_trial(root / "exp", "sync_samples", 1, 3, finished=False)
    directory = opened(root, cache)
    (trial,) = directory.trials
    assert trial.derived("rows", lambda: len(values(trial, "training_iteration"))) == 3
    assert trial.derived("rows", lambda: pytest.fail("nothing has changed")) == 3
    write_trial(root / "exp", "sync_samples", 1, 2, first=4, finished=False)
    directory.refresh()
    assert trial.derived("rows", lambda: len(values(trial, "training_iteration"))) == 5


def test_states_of_other_experiments_are_not_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    stage(tmp_path, root / "exp", "A2C_00000_00000", FIRST)
    stage(tmp_path, root / "other", "A2C_00000_00000", SECOND)
    assert list(TuneStates().staged({"exp"})) == [(root / "exp").resolve()]


@pytest.mark.parametrize("opened_folder", ["", "exp", "exp/A2C_00000_00000"])
def test_running_trial_is_found_from_each_directory_and_through_a_link(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened_folder: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    trial = root / "exp" / "A2C_00000_00000"
    trial.mkdir(parents=True)
    (trial / "params.json").write_text("{}")
    made = write_trial(tmp_path / "made", "sync_samples", 1, 4, finished=False)
    (made / "result.json").replace(stage(tmp_path, root / "exp", trial.name, FIRST))
    link = tmp_path / "link"
    link.symlink_to(root / opened_folder)
    for folder in (root / opened_folder, link):
        (found,) = opened(folder, cache).trials
        assert len(values(found, "training_iteration")) == 4


class AsyncHyperBandScheduler:
    """A class with the name and the attributes of Tune's ASHA scheduler."""

    def __init__(self, most: int) -> None:
        self._max_t = most
        self._time_attr = "training_iteration"


class PopulationBasedTraining(AsyncHyperBandScheduler):
    """A class with the name of a scheduler that never ends trials."""


def states(root: Path, cache: Path) -> dict[str, str]:
    return {trial.name: trial.state for trial in opened(root, cache).trials}


def test_trials_without_results_are_shown(root: Path, cache: Path) -> None:
    done = write_trial(root / "exp", "sync_samples", 1, 5)
    failed = root / "exp" / "A2C_00000_00001"
    failed.mkdir()
    (failed / "error.txt").write_text("Traceback (most recent call last):\n...\nValueError: boom")
    write_state(
        root / "exp",
        {
            done.name: {"status": "TERMINATED"},
            failed.name: {"status": "ERROR", "config": {"env": "CartPole-v1", "lr": 0.1}},
            "A2C_00000_00002": {"status": "RUNNING"},
            "": {"status": "PENDING", "relative_logdir": None, "trial_id": "00000_00003"},
        },
    )
    trials = {trial.name: trial for trial in opened(root, cache).trials}
    assert {name: trial.state for name, trial in trials.items()} == {
        done.name: "finished",
        failed.name: "failed",
        "A2C_00000_00002": "starting",
        "00000_00003": "pending",
    }
    assert trials[failed.name].error.endswith("ValueError: boom")
    assert trials[failed.name].config["lr"] == 0.1


def test_failed_trial_without_a_state_is_shown(root: Path, cache: Path) -> None:
    folder = root / "exp" / "A2C_00000_00001"
    folder.mkdir(parents=True)
    (folder / "error.txt").write_text("x" * 9000 + "\nValueError: boom")
    (trial,) = opened(root, cache).trials
    assert trial.state == "failed"
    assert trial.error.endswith("ValueError: boom")
    assert len(trial.error) < 5000


def test_trials_of_a_dead_run_are_not_running(root: Path, cache: Path) -> None:
    begun = write_trial(root / "exp", "sync_samples", 1, 5, finished=False)
    names = {begun.name: {"status": "RUNNING"}, "A2C_00000_00002": {"status": "PENDING"}}
    file = write_state(root / "exp", names)
    assert set(states(root, cache).values()) == {"running", "pending"}
    os.utime(begun / "result.json", (1e9, 1e9))
    assert set(states(root, cache).values()) == {"running", "pending"}, "Tune still saves its state"
    os.utime(file, (1e9, 1e9))
    assert states(root, cache) == {begun.name: "stopped", "A2C_00000_00002": "not started"}


def test_pruned_trial_is_not_finished(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = write_trial(root / "exp", "sync_samples", 1, 4)
    longest = write_trial(root / "exp", "sync_samples", 2, 8)
    stopped = write_trial(root / "exp", "sync_samples", 3, 6)
    limits = {"stopping_criterion": {"training_iteration": 20}, "status": "TERMINATED"}
    trials = {pruned.name: limits, longest.name: limits}
    trials[stopped.name] = {
        **limits,
        "stopping_criterion": {"num_env_steps_sampled_lifetime": 6000, "training_iteration": 20},
    }
    write_state(root / "exp", trials, scheduler=AsyncHyperBandScheduler(8))
    assert states(root, cache) == {
        pruned.name: "pruned by ASHA",
        longest.name: "finished",
        stopped.name: "finished",
    }
    write_state(root / "exp", trials, scheduler=PopulationBasedTraining(8))
    assert set(states(root, cache).values()) == {"finished"}
    # While Tune stages the state of a run, the file with the scheduler is in the results directory.
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    place = tmp_path / "ray" / "session_1" / "artifacts" / "1" / "exp" / "driver_artifacts"
    write_state(root / "exp", trials, scheduler=AsyncHyperBandScheduler(8))
    write_state(place, trials, directory=root / "exp")
    assert states(root, cache)[pruned.name] == "pruned by ASHA"
    # A stop condition that is a function may have ended the trial.
    write_state(root / "exp", trials, "2026-02-01_00-00-00", stopper=len)
    assert set(states(root, cache).values()) == {"finished"}


def test_classes_in_configs_have_the_names_of_other_trials(root: Path, cache: Path) -> None:
    params = {"env": "<class 'Toy'>"}
    done = write_trial(root / "exp", "sync_samples", 1, 5, params=params)
    env = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(AsyncHyperBandScheduler).hex()}
    other = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(len).hex()}
    config = {"env": env, "model": {"custom": other}}
    write_state(
        root / "exp",
        {
            done.name: {"status": "TERMINATED", "config": config},
            "A2C_00000_00002": {"status": "PENDING", "config": config},
        },
    )
    trials = {trial.name: trial for trial in opened(root, cache).trials}
    assert trials["A2C_00000_00002"].settings["env"] == "<class 'Toy'>"
    assert trials["A2C_00000_00002"].settings["model.custom"].startswith("object #")


class Attack:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("attacked"),)


def test_pickles_are_scanned_and_never_loaded(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_trial(root / "exp", "sync_samples", 1, 5)
    hostile = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(Attack()).hex()}
    state = {"status": "TERMINATED", "config": {"env": hostile}, "storage": hostile}
    write_state(root / "exp", {folder.name: state}, scheduler=Attack(), stopper=Attack())
    assert states(root, cache) == {folder.name: "finished"}
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"trial_data": [1]}', '{"trial_data": [["{}", "{}"]]}', "\xff"]
)
def test_unreadable_state_hides_no_trial(root: Path, cache: Path, text: str) -> None:
    folder = write_trial(root / "exp", "sync_samples", 1, 5)
    (root / "exp" / "experiment_state-2026-01-01_00-00-00.json").write_text(text)
    (root / "exp" / "tuner.pkl").write_bytes(b"no pickle")
    assert states(root, cache) == {folder.name: "finished"}


@pytest.mark.parametrize(
    "damage",
    [
        {"storage": {"_type": "CLOUDPICKLE_FALLBACK", "value": "no hex"}},
        {"storage": {"_type": "CLOUDPICKLE_FALLBACK", "value": 1}},
        {"storage": {"_type": "CLOUDPICKLE_FALLBACK"}},
        {"stopping_criterion": {"training_iteration": 10**400}},
    ],
)
def test_damaged_value_of_a_state_hides_no_trial(
    root: Path, cache: Path, damage: dict[str, Any]
) -> None:
    folder = write_trial(root / "exp", "sync_samples", 1, 5)
    path = write_state(root / "exp", {folder.name: {"status": "TERMINATED"}})
    content = json.loads(path.read_text())
    content["trial_data"] = [
        [json.dumps(json.loads(static) | damage), other] for static, other in content["trial_data"]
    ]
    path.write_text(json.dumps(content))
    assert states(root, cache) == {folder.name: "finished"}


def test_limit_of_a_scheduler_may_be_damaged(root: Path, cache: Path) -> None:
    folder = write_trial(root / "exp", "sync_samples", 1, 5)
    scheduler = AsyncHyperBandScheduler(10**400)
    write_state(root / "exp", {folder.name: {"status": "TERMINATED"}}, scheduler=scheduler)
    assert states(root, cache) == {folder.name: "finished"}


@pytest.mark.parametrize("size", [0, 1, 10, 40, 60, 80])
def test_half_a_pickle_is_scanned_as_far_as_it_goes(size: int) -> None:
    data = pickle.dumps({"scheduler": AsyncHyperBandScheduler(8), "after": 3})
    keys = ("scheduler", "_max_t", "after", "_time_attr")
    assert scan_pickle(data, keys) == {
        "": "AsyncHyperBandScheduler",
        "scheduler": "AsyncHyperBandScheduler",
        "_max_t": 8,
        "_time_attr": "training_iteration",
        "after": 3,
    }
    assert scan_pickle(data[:size], keys).keys() <= {"", "scheduler"}


def test_config_that_changes_is_marked_and_labelled(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_rows, "_LEAST_NEW_ROWS", 4)
    folder = write_trial(root, "sync_samples", 1, 6, params={"lr": 0.1}, finished=False)
    directory = opened(root, cache)
    for lr, first in ((0.2, 7), (0.4, 9)):
        config = json.loads((folder / "params.json").read_text()) | {"lr": lr}
        rng = random.Random(0)
        lines = [row("sync_samples", i, rng, config=config) for i in (first, first + 1)]
        with (folder / "result.json").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        (folder / "params.json").write_text(json.dumps(config))  # as population-based training
        directory.refresh()
    for trial in (directory.trials[0], opened(root, cache).trials[0]):  # the second from the cache
        assert values(trial, CONFIG_CHANGES) == [0] * 6 + [1, 1, 2, 2]
        assert trial.rows.config_changes == [{"lr": ["0.1", "0.2"]}, {"lr": ["0.2", "0.4"]}]
        assert trial.config["lr"] == 0.1
        assert trial.settings["lr"] == "0.1, then 0.4 after 2 changes"


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
    cache_module.remove_unused(cache)
    assert sorted(cache.iterdir()) == [new]


def test_memory_is_bounded_by_the_size_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a key of its own. Their columns would need rows x rows numbers."""
    monkeypatch.setattr("polopt.dashboards.data.rows._FREE_CELLS", 10_000)
    lines = b"".join(b'{"key %d": 1}\n' % number for number in range(2_000))
    rows, parser = RowColumns(), LineParser()
    parser.parse(lines, rows)
    assert rows.num_rows * len(rows.names()) <= len(lines) + 10_000
    assert any("too many keys for the size of the file" in one for one in parser.notes.problems)
    later = RowColumns(1_000, 500, 30_000)
    assert not later.append({"key": 1}, 10)


def test_row_with_many_keys_after_many_rows_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new column would have a number for each of the earlier rows."""
    monkeypatch.setattr("polopt.dashboards.data.rows._FREE_CELLS", 10_000)
    rows = RowColumns()
    for _ in range(1_000):
        assert rows.append({}, 3)
    assert not rows.append({f"key {number}": 1 for number in range(5_000)}, 60_000)
    assert rows.num_rows * len(rows.names()) <= 63_000 + 10_000


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    rows = RowColumns()
    LineParser().parse(b'{"optimizer": {"name": "\\ud800", "\\udfff": 1, "x": "\\u00e9"}}\n', rows)
    assert rows.column("optimizer/name").tolist() == ["?"]
    assert rows.column("optimizer/x").tolist() == ["\u00e9"]


@pytest.mark.parametrize("level", ["runs/a", "runs"])
def test_dashboard_shows_a_run_without_tune(level: str, tmp_path: Path) -> None:
    config = {"env": "CartPole-v1", "num_workers": 0, "rollout_fragment_length": 16}
    trainer = polopt.SyncPPO(
        {**config, "min_sample_timesteps_per_iteration": 32}, log_dir=tmp_path / "runs" / "a"
    )
    for _ in range(3):
        trainer.train()
    trainer.stop()
    results = ResultsDirectory(tmp_path / level, tmp_path / "cache")
    results.refresh()
    (trial,) = results.trials
    assert (trial.name, trial.optimizer, trial.problems) == ("a", "sync_samples", [])
    assert trial.declared is not None
    assert trial.config["rollout_fragment_length"] == 16
    values = trial.values("num_env_steps_sampled_lifetime")
    assert values is not None
    assert len(values) == 3
