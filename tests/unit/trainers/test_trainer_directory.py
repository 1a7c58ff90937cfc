"""Tests of the directory of a trainer without Tune, and of a trainer that was stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.tune

import polopt
from polopt.common.config import ConfigError
from polopt.common.ray_names import storage_folder
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers import experiment, run
from polopt.trainers.run import Run
from polopt.trainers.tune_trial import explain_missing_file, in_directory

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
#: Up to Ray 2.54, Tune makes a directory for each trainer, and writes results to this directory.
makes_none = pytest.mark.skipif(
    not hasattr(ray.tune.Trainable, "_setup_logdir"), reason="this Ray makes a directory itself"
)


def left() -> set[str]:
    return {path.name for path in Path(storage_folder()).glob("*")}


@makes_none
def test_directory_is_made_when_something_is_written() -> None:
    before = left()
    with pytest.raises(ConfigError):
        polopt.SyncPPO(SMALL, no_such_option=1)
    trainer = polopt.SyncPPO(SMALL)
    trainer.train()
    assert left() == before
    saved = trainer.save()
    trainer.stop()
    assert left() - before == {Path(trainer.logdir).name}
    assert Path(trainer.logdir).name.startswith("SyncPPO_")
    assert Path(saved.checkpoint.path).parent == Path(trainer.logdir)


@makes_none
def test_trainers_of_the_same_second_have_directories_of_their_own() -> None:
    made = [polopt.SyncPPO(SMALL) for _ in range(2)]
    assert made[0].logdir != made[1].logdir
    for trainer in made:
        trainer.stop()


@makes_none
def test_files_of_a_run_make_the_directory() -> None:
    trainer = polopt.SyncPPO(SMALL, evaluation_interval=1, evaluation_duration=1)
    trainer.train()
    trainer.stop()
    assert {path.name for path in Path(trainer.logdir).iterdir()} == {"best_checkpoint"}


def test_result_of_save_is_one_line_and_can_be_restored(tmp_path: Path) -> None:
    trainer = polopt.SyncPPO(SMALL)
    assert "after iteration 0 in" in repr(trainer.save(str(tmp_path / "untrained")))
    trainer.train()
    first, second = trainer.save(), trainer.save()
    named = trainer.save(str(tmp_path / "mine"))
    for saved, name in ((first, "checkpoint_000000"), (second, "checkpoint_000001")):
        assert saved.checkpoint.path == str(Path(trainer.logdir, name))
    assert repr(named) == f"<checkpoint after iteration 1 in {tmp_path / 'mine'}>"
    assert named.metrics["training_iteration"] == 1
    again = polopt.SyncPPO(SMALL)
    for checkpoint in (first, second.checkpoint, named.checkpoint.path, tmp_path / "mine"):
        again.restore(checkpoint)
        assert again.iteration == 1
        assert again.train()["training_iteration"] == 2
    policy = polopt.load(first)
    assert policy.version == trainer.get_policy().version
    trainer.stop(), again.stop()


@pytest.mark.parametrize(
    "method", ["train", "save", "save_checkpoint", "restore", "evaluate", "reset_config"]
)
def test_stopped_trainer_says_so(method: str, tmp_path: Path) -> None:
    trainer = polopt.SyncPPO(SMALL)
    trainer.train()
    trainer.save(str(tmp_path))
    action = trainer.compute_single_action(np.zeros(4, np.float32))
    trainer.stop()
    trainer.stop()
    given = {"restore": str(tmp_path), "save_checkpoint": str(tmp_path), "reset_config": SMALL}
    arguments = [given[method]] if method in given else []
    with pytest.raises(RuntimeError, match=rf"SyncPPO has been stopped: {method}\(\) needs"):
        getattr(trainer, method)(*arguments)
    assert trainer.compute_single_action(np.zeros(4, np.float32)) == action


@pytest.mark.parametrize("wrap", [False, True])
def test_file_of_the_users_directory_is_named(
    wrap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, trials = tmp_path / "users", tmp_path / "trials"
    users.mkdir(), trials.mkdir()
    (users / "level.txt").touch()
    monkeypatch.chdir(trials)

    def read(path: str) -> None:
        try:
            Path(path).read_text()
        except OSError as error:
            raise RuntimeError(f"reset() failed: {error}") if wrap else error from None

    def message(path: str, directory: str | None = str(users)) -> str:
        with (
            pytest.raises(RuntimeError if wrap else OSError) as caught,
            explain_missing_file(directory),
        ):
            read(path)
        return str(caught.value)

    assert "RAY_CHDIR_TO_TRIAL_DIR=0" in (named := message("level.txt"))
    assert f"instead of {users}, because Tune" in named
    for other in ("nowhere.txt", str(tmp_path / "absolute.txt")):
        assert "RAY_CHDIR" not in message(other)
    assert "RAY_CHDIR" not in message("level.txt", None), "Tune has not changed the directory"
    with in_directory(str(users)):
        read("level.txt")
    assert Path.cwd() == trials


def test_new_config_is_built_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets the threads of the new config, and Ray is started if the new config needs
    it."""
    threads: list[int] = []
    trained = polopt.SyncPPO(SMALL, num_cpus_for_driver=1)

    def start(cpus: float, processes: int, **_: Any) -> None:
        raise RuntimeError(f"Ray was started for {processes} processes")

    monkeypatch.setattr(experiment, "attach_or_start", start)
    monkeypatch.setattr(run, "limit_threads", threads.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    trained.reset_config({**SMALL, "num_cpus_for_driver": 3})
    assert threads == [3]
    with pytest.raises(RuntimeError, match="Ray was started for 2 processes"):
        trained.reset_config({**SMALL, "num_workers": 2})
    trained.stop()


def test_trainer_that_cannot_be_rebuilt_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = polopt.SyncPPO(SMALL)
    stopped: list[Any] = []
    stop = WorkerSet.stop
    monkeypatch.setattr(WorkerSet, "stop", lambda self: (stopped.append(self), stop(self)))

    def fail(*_: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(Run, "_make_optimizer", fail)
    with pytest.raises(OSError, match="no more memory"):
        trained.reset_config(SMALL)
    assert stopped == [trained.workers]
    with pytest.raises(RuntimeError, match=r"has been stopped: train\(\) needs"):
        trained.train()
    trained.stop()
