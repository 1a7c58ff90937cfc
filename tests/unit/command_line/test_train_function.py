"""Tests of `polopt.train`, which does the same as the command line."""

from __future__ import annotations

import json
import os
import pwd
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polopt
from polopt.command_line.output import RESULTS_DIR
from polopt.command_line.plan import plan
from polopt.common.config import ConfigError
from polopt.common.ray_names import storage_folder
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import CheckpointError

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


def rows(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in Path(folder, "result.json").read_text().splitlines()]


def test_run_ends_at_its_limit_with_a_checkpoint(tmp_path: Path) -> None:
    result = polopt.train("SyncPPO", SMALL, stop={"training_iteration": 5}, log_dir=tmp_path)
    assert result.stop_reason == "training_iteration reached 5 (stop: 5)"
    assert [row["done"] for row in rows(tmp_path)] == [False] * 4 + [True]
    assert rows(tmp_path)[-1]["stop_reason"] == result.stop_reason
    assert Path(result.checkpoint.path).parent == tmp_path
    assert read_trainer_state(result.checkpoint.path)["training_iteration"] == 5
    assert result.best_checkpoint is None
    assert "\n" not in repr(result)
    assert result.stop_reason in repr(result)
    observation = np.zeros(4, np.float32)
    assert result.policy.predict(observation) == polopt.load(result).predict(observation)


def test_last_checkpoints_are_kept(tmp_path: Path) -> None:
    stop = {"training_iteration": 8}
    polopt.train("SyncPPO", SMALL, stop=stop, log_dir=tmp_path, checkpoint_every=2, verbose=0)
    found = sorted(tmp_path.glob("checkpoint_*"))
    assert [read_trainer_state(one)["training_iteration"] for one in found] == [4, 6, 8]


def test_evaluation_leaves_the_best_checkpoint(tmp_path: Path) -> None:
    result = polopt.train(
        polopt.SyncPPO,
        SMALL,
        evaluation_interval=1,
        evaluation_duration=1,
        stop={"training_iteration": 1},
        log_dir=tmp_path,
    )
    assert result.best_checkpoint is not None
    assert read_trainer_state(result.best_checkpoint.path)["training_iteration"] == 1


def test_restored_run_goes_on_counting(tmp_path: Path) -> None:
    first = polopt.train("SyncPPO", SMALL, stop={"training_iteration": 2}, log_dir=tmp_path / "1")
    again = polopt.train(
        "SyncPPO",
        SMALL,
        stop={"training_iteration": 3},
        log_dir=tmp_path / "2",
        restore=first.path,
    )
    assert [row["training_iteration"] for row in rows(again.path)] == [3]


def test_checkpoint_that_does_not_fit_is_refused_before_the_run(tmp_path: Path) -> None:
    first = polopt.train("SyncPPO", SMALL, stop={"training_iteration": 1}, log_dir=tmp_path / "1")
    other = {**SMALL, "model": {"fcnet_hiddens": [9]}}
    with pytest.raises(CheckpointError, match="does not fit"):
        polopt.train("SyncPPO", other, log_dir=tmp_path / "2", restore=first.path)
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("verbose", "lines"), [(0, 0), (1, 2), (2, 2)]
)  # without a terminal, the output has one line for each result
def test_verbose(
    verbose: int, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = {"training_iteration": 2}
    polopt.train("SyncPPO", SMALL, stop=stop, log_dir=tmp_path, verbose=verbose)
    out = capsys.readouterr().out
    assert out.count("return ") - out.count("the return ") == lines
    assert (f"results     {tmp_path}" in out) == bool(verbose)


class Interrupted(polopt.Callbacks):
    """Interrupts this process after the second result."""

    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        if result["training_iteration"] == 2:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """Installs Python's handler of SIGINT. An earlier test may have installed another handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_ends_the_run_with_a_checkpoint(
    tmp_path: Path, python_handles_interrupts: None
) -> None:
    before = signal.getsignal(signal.SIGINT)
    result = polopt.train("SyncPPO", SMALL, callbacks=Interrupted, log_dir=tmp_path)
    assert result.metrics["training_iteration"] in (2, 3)
    assert "Ctrl-C" in result.stop_reason
    assert read_trainer_state(result.checkpoint.path)["optimizer"]["num_updates"] > 0
    assert signal.getsignal(signal.SIGINT) is before


class TwiceInterrupted(Interrupted):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)


def test_second_interrupt_ends_the_run_at_once(
    tmp_path: Path, python_handles_interrupts: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        polopt.train("SyncPPO", SMALL, callbacks=TwiceInterrupted, log_dir=tmp_path)
    assert not list(tmp_path.glob("checkpoint_*"))


def test_other_threads_may_train(tmp_path: Path) -> None:
    results: list[polopt.TrainingResult] = []

    def run() -> None:
        stop = {"training_iteration": 1}
        results.append(polopt.train("SyncPPO", SMALL, stop=stop, log_dir=tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert len(results) == 1


class Failing(polopt.Callbacks):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        if result["training_iteration"] == 2:
            raise OSError("no licence")


def test_error_is_raised_after_the_results_are_written(tmp_path: Path) -> None:
    with pytest.raises(polopt.CallbackError, match="no licence"):
        polopt.train("SyncPPO", SMALL, callbacks=Failing, log_dir=tmp_path)
    assert len(rows(tmp_path)) == 1


def test_yaml_file_and_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("run: A2C\nconfig: {env: CartPole-v1}\nstop: {training_iteration: 1}\n")
    changes = {key: value for key, value in SMALL.items() if key not in ("env", "num_sgd_iter")}
    result = polopt.train(str(path), changes, log_dir=tmp_path / "run")
    assert result.stop_reason == "training_iteration reached 1 (stop: 1)"
    result = polopt.train(
        str(path), changes, log_dir=tmp_path / "again", stop={"training_iteration": 2}
    )
    assert len(rows(result.path)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"experiment": "SyncPP0"}, "did you mean 'SyncPPO'"),
        ({"experiment": int}, "experiment: got <class 'int'>"),
        ({"experiment": "SyncPPO", "verbose": 3}, "verbose: got 3"),
        ({"experiment": "SyncPPO", "checkpoint_every": -1}, "checkpoint_every: got -1"),
        ({"experiment": "SyncPPO", "stop": {"episode_reward_mean": 1}}, "episode_return_mean"),
        ({"experiment": "SyncPPO", "lr": "high"}, "key 'lr'"),
        ({"experiment": "SyncPPO", "config": {"lr": 1}, "lr": 2}, "key 'lr': got 1 in config"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        polopt.train(**{"env": "CartPole-v1", "log_dir": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()


def test_callbacks_of_tune_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from ray import tune\nrun = 'SyncPPO'\nconfig = {'env': 'CartPole-v1'}\n"
        "callbacks = [tune.Callback()]\n"
    )
    with pytest.raises(ConfigError, match="polopt train "):
        polopt.train(str(path))


def test_restore_alone_trains_what_the_checkpoint_has_trained(tmp_path: Path) -> None:
    run = tmp_path / "a"
    polopt.train("SyncPPO", SMALL, stop={"training_iteration": 2}, log_dir=run, verbose=0)
    planned = plan(None, ["lr=0.5", "stop.training_iteration=9"], run)
    assert planned.preset is polopt.SyncPPO
    assert planned.experiment.policy.lr == 0.5
    assert planned.experiment.policy.model.fcnet_hiddens == (8,)
    assert planned.example.stop == {"training_iteration": 9}
    result = polopt.train(
        restore=run, stop={"training_iteration": 3}, log_dir=tmp_path / "b", verbose=0
    )
    assert result.metrics["training_iteration"] == 3
    with pytest.raises(ConfigError, match="nothing to train"):
        plan(None, [])
    with pytest.raises(ConfigError, match="nothing to train"):
        polopt.train()


def test_train_continues_or_overwrites_a_run(tmp_path: Path) -> None:
    def train(end: int, **options: Any) -> list[int]:
        stop = {"training_iteration": end}
        polopt.train(**options, log_dir=tmp_path, verbose=0, stop=stop)
        lines = (tmp_path / "result.json").read_text().splitlines()
        return [json.loads(line)["training_iteration"] for line in lines]

    new: dict[str, Any] = {"experiment": "SyncPPO", "config": SMALL}
    assert train(1, **new) == [1]
    assert train(3, restore=tmp_path) == [1, 2, 3]
    with pytest.raises(ConfigError, match="overwrite=True"):
        train(1, **new)
    with pytest.raises(ConfigError, match="overwrite: got True, but log_dir"):
        train(4, restore=tmp_path, overwrite=True)
    (tmp_path / "notes.txt").write_text("mine")
    of_add_ons = [tmp_path / name for name in ("trace.json", "arrivals_000000.jsonl.gz")]
    for path in of_add_ons:
        path.write_text("of the earlier run")
    assert train(2, **new, overwrite=True) == [1, 2]
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_000000"]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert (tmp_path / "notes.txt").exists()
    assert not any(path.exists() for path in of_add_ons)


def test_tests_leave_the_home_of_their_user_alone() -> None:
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for folder in (storage_folder(), RESULTS_DIR.expanduser(), os.environ["HOME"]):
        assert home not in Path(folder).parents
