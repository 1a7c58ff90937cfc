"""Tests that a checkpoint is either complete or refused, and that loading a checkpoint executes no
code."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoint_helpers import SMALL, resign, trainer
from ray import tune
from safetensors.torch import load_file

from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import (
    TENSORS,
    CheckpointError,
    read_checkpoint,
    write_checkpoint,
)
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.tune_trial import RunContext


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Writes a checkpoint of a trained trainer."""
    made = trainer()
    made.train()
    made.save(str(tmp_path / "checkpoint"))
    made.stop()
    return tmp_path / "checkpoint"


def sampled(checkpoint: Path) -> int:
    """Returns the number of environment steps in a checkpoint."""
    steps = int(read_checkpoint(checkpoint)["optimizer"]["num_env_steps_sampled"])
    assert steps >= 32
    return steps


def test_state_round_trip(tmp_path: Path) -> None:
    state = {
        "tensor": torch.arange(6.0).reshape(2, 3)[:, 1:],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "array": np.array([[True, False]]),
        "number": np.float64(0.25),
        "nested": {"list": [1, 2.5, "three", None, True, {"t": torch.ones(1)}], "empty": {}},
        "huge": 2**100,  # the states of random generators have such integers
        "nan": float("nan"),
    }
    write_checkpoint(tmp_path, state)
    back = read_checkpoint(tmp_path)
    assert torch.equal(back["tensor"], state["tensor"])
    assert back["scalar"].dtype == torch.int64
    np.testing.assert_array_equal(back["array"], state["array"])
    assert back["array"].dtype == bool
    assert back["number"] == 0.25
    assert type(back["number"]) is np.float64
    assert back["nested"]["list"][:5] == [1, 2.5, "three", None, True]
    assert torch.equal(back["nested"]["list"][5]["t"], torch.ones(1))
    assert back["nested"]["empty"] == {}
    assert back["huge"] == 2**100
    assert back["nan"] != back["nan"]
    assert {path.name for path in tmp_path.iterdir()} == {
        TENSORS,
        "state.json",
        "manifest.json",
    }


def test_only_data_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got a function at 'a\[1\]', which is not plain data"):
        write_checkpoint(tmp_path, {"a": [1, lambda: None]})


def test_tensors_load_without_polopt(saved: Path) -> None:
    tensors = load_file(saved / TENSORS)
    assert tensors["optimizer.policy.params"].ndim == 1
    state = json.loads((saved / "state.json").read_text())
    assert state["config"]["env"] == "CartPole-v1"
    assert state["optimizer"]["num_env_steps_sampled"] >= 32


def test_resumed_trainer_has_the_saved_state(saved: Path) -> None:
    first, second = trainer(seed=5), trainer(seed=6)
    first.restore(str(saved))
    second.restore(str(saved))
    for made in (first, second):
        state = made.optimizer.get_state()
        assert state["num_env_steps_sampled"] == sampled(saved)
        assert torch.equal(
            state["policy"]["params"], read_checkpoint(saved)["optimizer"]["policy"]["params"]
        )
        assert int(state["policy"]["adam"]["network"]["step"]) == state["num_updates"] > 0
        assert made.train()["num_env_steps_sampled_lifetime"] >= sampled(saved) + 32
        made.stop()


def test_saved_config_has_parameters_changed_while_training(tmp_path: Path) -> None:
    made = trainer()
    made.optimizer.update_algorithm_parameter("lr", 0.125)
    made.save_checkpoint(str(tmp_path))
    made.stop()
    assert read_checkpoint(tmp_path)["config"]["policy"]["lr"] == 0.125


@pytest.mark.parametrize("policy", ["a2c", "ppo"])
def test_restore_under_another_policy(saved: Path, policy: str) -> None:
    made = trainer(policy=policy)
    made.restore(str(saved))
    assert made.train()["num_env_steps_sampled_lifetime"] >= sampled(saved) + 32
    made.stop()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickle_in_tensors_file_does_not_run(saved: Path, tmp_path: Path) -> None:
    went_off = tmp_path / "went_off"
    for write in (
        lambda file: torch.save({"x": _Bomb(went_off)}, file),
        lambda file: file.write_bytes(pickle.dumps(_Bomb(went_off), protocol=2)),
    ):
        write(saved / TENSORS)
        resign(saved)
        made = trainer()
        with pytest.raises(CheckpointError, match=r"does not hold plain tensors") as caught:
            made.restore(str(saved))
        assert "\n" not in str(caught.value)
        made.stop()
        assert not went_off.exists()
    pickle.loads(pickle.dumps(_Bomb(went_off)))  # the pickle would execute code
    assert went_off.exists()


def test_pickle_for_tune_does_not_run(saved: Path, tmp_path: Path) -> None:
    went_off = tmp_path / "went_off"
    (saved / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(_Bomb(went_off)))
    made = trainer()
    for given in (str(saved), tune.Checkpoint.from_directory(saved)):
        with pytest.raises(CheckpointError, match=r"contains the pickle _dict_checkpoint\.pkl"):
            made.restore(given)
    made.stop()
    assert not went_off.exists()


def _truncate(directory: Path) -> None:
    path = directory / TENSORS
    path.write_bytes(path.read_bytes()[:-10])


def _flip(name: str) -> Any:
    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[len(data) // 2] ^= 1
        (directory / name).write_bytes(bytes(data))

    return flip


def _manifest(text: str) -> Any:
    return lambda directory: (directory / "manifest.json").write_text(text)


def _dangling(directory: Path) -> None:
    (directory / "state.json").write_text('{"config": {"__tensor__": "/nowhere"}}')
    resign(directory)


def _foreign(directory: Path) -> None:
    write_checkpoint(directory, {"something": "else"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, "is damaged: the SHA-256 of tensors.safetensors"),
        (_flip(TENSORS), "is damaged: the SHA-256 of tensors.safetensors"),
        (_flip("state.json"), "is damaged: the SHA-256 of state.json"),
        (lambda d: (d / TENSORS).unlink(), "is incomplete: tensors.safetensors is missing"),
        (lambda d: (d / "state.json").unlink(), "is incomplete: state.json is missing"),
        (lambda d: (d / "manifest.json").unlink(), "is incomplete: manifest.json is missing"),
        (lambda d: (d / "manifest.json").write_text(""), "is incomplete: manifest.json is empty"),
        (shutil.rmtree, "is incomplete: manifest.json is missing"),
        (_manifest('{"format": 4}'), "has format 4, but .* reads formats 2, 3"),
        (_manifest("{"), "is damaged: manifest.json"),
        (_manifest("\x00\xff"), "is damaged: manifest.json"),
        (_manifest("[]"), "is damaged: manifest.json is not a mapping"),
        (_manifest('{"format": 2}'), "is damaged: manifest.json has no SHA-256 of the files"),
        (_dangling, "field 'config' cannot be decoded as type '__tensor__': KeyError: '/nowhere'"),
        (_foreign, "was not written by a polopt trainer"),
    ],
)
def test_damage_is_one_error(saved: Path, damage: Any, said: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_trainer_state(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"model": {"fcnet_hiddens": [9]}}, {"env": "Acrobot-v1"}])
def test_other_network_is_refused(saved: Path, change: dict[str, Any]) -> None:
    made = trainer(**change)
    before = made.optimizer.get_state()["policy"]["params"]
    with pytest.raises(CheckpointError, match=r"does not fit: its network is different"):
        made.restore(str(saved))
    assert torch.equal(made.optimizer.get_state()["policy"]["params"], before)
    made.stop()


# ---- counts and versions ----------------------------------------------------------------------


def test_restore_continues_the_counters(saved: Path, tmp_path: Path) -> None:
    made = trainer()
    made.restore(str(saved))
    before = read_trainer_state(saved)
    assert made.iteration == before["training_iteration"] == 1
    result = made.train()
    assert result["training_iteration"] == made.training_iteration == 2
    assert result["time_total_s"] > before["time_total_s"] > 0
    assert result["timesteps_total"] == result["num_env_steps_sampled_lifetime"]
    kept = made.save(str(tmp_path / "again"))
    made.restore(kept)  # restores with Tune's method, which has its own counters
    assert made.train()["training_iteration"] == 3
    # Ray 2.52 closes the logger, so a new one is needed. Later versions have no logger.
    needs_logger = "logger_creator" in inspect.signature(tune.Trainable.reset).parameters
    loggers = {"logger_creator": lambda _: Mock(logdir=str(tmp_path))} if needs_logger else {}
    made.reset({**SMALL}, **loggers)
    assert made.train()["training_iteration"] == 1
    made.stop()


def test_arguments_of_earlier_tunes_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {}

    def of_ray_2_52(
        self: Any, config: Any = None, logger_creator: Any = None, storage: Any = None
    ) -> None:
        passed.update(config=config, logger_creator=logger_creator, storage=storage)

    monkeypatch.setattr(tune.Trainable, "__init__", of_ray_2_52)
    monkeypatch.setattr(tune.Trainable, "reset", of_ray_2_52)
    made = PolicyOptimizerTrainer({"lr": 1}, logger_creator="creator", storage="storage")
    assert passed == {"config": {"lr": 1}, "logger_creator": "creator", "storage": "storage"}
    made.reset({"lr": 2}, logger_creator="creator", storage="storage")
    assert passed == {"config": {"lr": 2}, "logger_creator": "creator", "storage": "storage"}
    made.reset({"lr": 2}, storage="storage")
    assert passed == {"config": {"lr": 2}, "logger_creator": None, "storage": "storage"}


# ---- stop file --------------------------------------------------------------------------------


def test_stop_file_ends_the_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Stoppable(PolicyOptimizerTrainer):
        def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
            super().setup(config, RunContext(tmp_path, tmp_path))

    made = Stoppable({**SMALL, "min_sample_timesteps_per_iteration": 10**9})
    (tmp_path / "stop").touch()
    assert made.train()["num_env_steps_sampled_lifetime"] > 0
    made.stop()
