"""Tests that a trainer with `log_dir` writes the same files as a trial of Tune."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorboardX.record_writer
from ray import tune

import polopt
from polopt.common.config import ConfigError
from polopt.trainers.result_files import ResultFiles, ResultTable

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "min_sample_timesteps_per_iteration": 32,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
    "seed": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a directory with three results, and with checkpoints after the second and the third
    result."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    trainer = polopt.SyncPPO(SMALL, log_dir=folder)
    assert json.loads((folder / "params.json").read_text())["num_sgd_iter"] == 1
    assert not (folder / "result.json").read_text()
    trainer.train()
    for _ in range(2):
        trainer.train()
        trainer.save()
    trainer.stop()
    trainer.stop()
    return folder


def test_statistics_of_a_policy_are_columns_before_its_first_update(tmp_path: Path) -> None:
    options = {**SMALL, "env": "Pendulum-v1", "learning_starts": 40, "num_workers": 0}
    del options["num_sgd_iter"]
    trainer = polopt.SAC(options, log_dir=tmp_path)
    results = [trainer.train() for _ in range(2)]
    trainer.stop()
    values = [result["learners"]["default_policy"]["alpha_value"] for result in results]
    assert math.isnan(values[0])
    assert values[1] > 0.0
    with (tmp_path / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["learners/default_policy/alpha_value"]) == pytest.approx(values[1])


def test_statistics_that_a_policy_does_not_compute_are_nan(tmp_path: Path) -> None:
    options: dict[str, Any] = {"env": "CartPole-v1", "num_workers": 0, "seed": 1}
    options |= {"model": {"fcnet_hiddens": [8]}, "min_sample_timesteps_per_iteration": 64}
    options |= {"learning_starts": 16, "buffer_size": 200, "epsilon": [[0, 1.0], [100, 0.5]]}
    for prioritized in (False, True):
        folder = tmp_path / str(prioritized)
        trainer = polopt.DQN({**options, "prioritized_replay": prioritized}, log_dir=folder)
        results = [trainer.train() for _ in range(2)]
        trainer.stop()
        learned = results[-1]["learners"]["default_policy"]
        for key in ("entropy", "mean_kl_loss", "clip_fraction", "policy_loss"):
            assert math.isnan(learned[key]), key
        assert learned["vf_loss"] > 0.0
        assert 0.5 <= learned["epsilon"] < results[0]["learners"]["default_policy"]["epsilon"] < 1.0
        for key in ("priority_mean", "priority_max", "priority_beta"):
            assert math.isnan(results[-1]["optimizer"][key]) != prioritized, key
        with (folder / "progress.csv").open() as file:
            row = list(csv.DictReader(file))[-1]
        assert float(row["learners/default_policy/epsilon"]) == pytest.approx(learned["epsilon"])
        assert math.isnan(float(row["learners/default_policy/entropy"]))


def test_files_are_those_of_a_trial(run: Path) -> None:
    names = {path.name.split(".vm")[0].split(".tfevents")[0] for path in run.iterdir()}
    assert names >= {  # add-ons write further files
        "checkpoint_000000",
        "checkpoint_000001",
        "events.out",
        "params.json",
        "params.pkl",
        "progress.csv",
        "result.json",
    }
    rows = [json.loads(text) for text in (run / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    assert rows[0]["config"]["num_sgd_iter"] == 1
    with (run / "progress.csv").open() as file:
        table = list(csv.DictReader(file))
    sampled = [int(row["env_runners/num_env_steps_sampled_lifetime"]) for row in table]
    assert sampled == [row["num_env_steps_sampled_lifetime"] for row in rows]


def test_tune_reads_results_and_checkpoints(run: Path) -> None:
    found = tune.Result.from_path(str(run))
    assert found.checkpoint is not None
    assert Path(found.checkpoint.path).name == "checkpoint_000001"
    metrics = [metrics["training_iteration"] for _, metrics in found.best_checkpoints]
    assert metrics == [2, 3]


def test_directory_with_the_results_of_another_run_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="contains the results of another run"):
        polopt.SyncPPO(SMALL, log_dir=run)


def test_wrong_option_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        polopt.SyncPPO(SMALL, log_dir=tmp_path / "runs", no_such_option=1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("folder", [3, "/dev/null/a"])
def test_directory_that_cannot_be_made_is_refused(folder: Any) -> None:
    with pytest.raises(ConfigError, match="log_dir: got"):
        polopt.SyncPPO(SMALL, log_dir=folder)


def test_option_that_cannot_be_pickled_is_written_as_text(tmp_path: Path) -> None:
    lock = threading.Lock()

    def make(config: Any) -> Any:
        import gymnasium

        with lock:
            return gymnasium.make("CartPole-v1")

    trainer = polopt.SyncPPO({**SMALL, "env": make}, log_dir=tmp_path)
    trainer.train()
    trainer.stop()
    assert "make" in json.loads((tmp_path / "params.json").read_text())["env"]


# ---- a run that continues ---------------------------------------------------------------------


def write(folder: Path, *results: dict[str, Any], continues: bool = False) -> None:
    files = ResultFiles(folder, continues=continues)
    files.begin({})
    for number, result in enumerate(results):
        files.add({"training_iteration": number + 1, **result})
    files.close()


def table(folder: Path) -> list[dict[str, str]]:
    limit = csv.field_size_limit(2**20)
    with (folder / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    csv.field_size_limit(limit)
    return [{k: v for k, v in row.items() if k != "training_iteration"} for row in rows]


def test_numbers_stay_under_their_names_when_the_keys_change(tmp_path: Path) -> None:
    text = 'a "quoted", long\nvalue ' + "x" * 200_000
    write(tmp_path, {"a": 1, "b": {"c": 2, "d": text}})
    write(tmp_path, {"b": {"d": 5, "c": 4}, "new": 6}, {"a": 7, "late": 8}, continues=True)
    assert table(tmp_path) == [
        {"a": "1", "b/c": "2", "b/d": text, "new": "", "late": ""},
        {"a": "", "b/c": "4", "b/d": "5", "new": "6", "late": ""},
        {"a": "7", "b/c": "", "b/d": "", "new": "", "late": "8"},
    ]
    assert not list(tmp_path.glob(".progress*"))
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert [json.loads(line).get("new") for line in lines] == [None, 6, None]


def test_table_replaces_the_logger_of_tune() -> None:
    """This is how Tune decides whether it adds its own logger."""
    assert issubclass(ResultTable, tune.logger.CSVLoggerCallback)


def test_results_continue_after_a_line_that_was_not_written_completely(tmp_path: Path) -> None:
    write(tmp_path, {"a": 1}, {"a": 2})
    for name in ("result.json", "progress.csv"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-4])  # the disk was full
    write(tmp_path, {"a": 3}, continues=True)
    assert [row["a"] for row in table(tmp_path)] == ["1", "3"]
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert [json.loads(line)["a"] for line in lines] == [1, 3]


def test_overwrite_without_an_earlier_run_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "polopt.log").write_text("mine")
    ResultFiles(tmp_path, overwrite=True)
    assert (tmp_path / "polopt.log").exists()


# ---- a full disk ------------------------------------------------------------------------------


class Full(io.BytesIO):
    """A file on a disk that fills after a few bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.timeout(60)
def test_full_disk_of_tensorboard_raises_one_error_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboardX.record_writer, "open_file", lambda path: Full())
    threads = threading.active_count()
    files = ResultFiles(tmp_path)
    files.begin({})
    result = {"training_iteration": 1, **{f"key {number}": 1.0 for number in range(100)}}
    with pytest.raises(OSError, match="results cannot be written: No space left") as raised:
        files.add(result)
    assert raised.value.filename == str(tmp_path)
    files.close()
    assert threading.active_count() == threads


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["result.json", "progress.csv"])
def test_full_disk_of_results_raises_one_error(tmp_path: Path, name: str) -> None:
    write(tmp_path, {})
    files = ResultFiles(tmp_path, continues=True)
    files.begin({})
    files.add({"training_iteration": 2})
    path = tmp_path / name
    path.unlink()
    path.symlink_to("/dev/full")
    if name == "result.json":  # the logger keeps this file open
        files = ResultFiles(tmp_path / "other")
        (tmp_path / "other" / name).symlink_to("/dev/full")
        files.begin({})
    with pytest.raises(OSError, match="results cannot be written: No space left"):
        files.add({"training_iteration": 3})
    files.close()  # raises nothing


def test_directory_that_cannot_be_written_is_refused_before_the_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(options["dir"]))

    monkeypatch.setattr("polopt.trainers.result_files.tempfile.TemporaryFile", refused)
    with pytest.raises(ConfigError, match=r"log_dir: got .*Read-only file system"):
        polopt.SyncPPO(SMALL, log_dir=tmp_path)
