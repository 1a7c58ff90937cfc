"""Tests that a checkpoint saves the whole config, or names the missing values and asks for them."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import logging
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_checkpoint_fields import rewrite
from test_checkpoints import resign
from test_command_line import SMALL, error_of, polopt

from polopt.command_line.tune_run import _next_step
from polopt.common.plain_data import argument_for, plain
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.policy_registry import POLICIES
from polopt.policies.ppo import PPOConfig, PPOPolicy
from polopt.trainers import restoring
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from polopt.trainers.experiment import Experiment
from polopt.trainers.restoring import read_trainer_state
from polopt.trainers.trainer import PolicyOptimizerTrainer


class Level(enum.IntEnum):
    HARD = 7


class Mode(enum.Enum):
    FAST = 1


class Text(str, enum.Enum):
    RED = "red"


Size = collections.namedtuple("Size", "width height")

ARRAYS = [
    np.arange(6.0).reshape(2, 3)[:, ::-1],
    np.arange(3, dtype=">i4"),
    np.array(["a", "bcd"]),
    np.array(["2020-01-01"], "M8[D]"),
    np.ones(2, np.uint16),
    np.zeros((0, 3)),
    np.array(5.0),
    np.array([True, False]),
    np.array(True),
    np.ones(2, complex),
    np.ones(2, np.complex64),
    np.ones(2, np.float16),
    np.array([(1, (2.5, 3.5), b"x")], [("n", np.int8), ("pair", ">f4", (2,)), ("s", "S1")]),
    np.zeros((0, 2), [("n", [("m", np.int8)])]),
    torch.arange(4.0)[::2],
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.float16),
    torch.tensor(1.5, dtype=torch.float64),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag,
    torch.zeros(0, 2, dtype=torch.complex128),
    torch.tensor(1 + 2j, dtype=torch.complex128),
    torch.ones(2, dtype=torch.uint16),
    torch.ones(2, dtype=torch.float8_e4m3fn),
]
VALUES = [
    np.int64(7),
    np.float32(0.1),
    np.bool_(True),
    np.str_("hi"),
    np.datetime64("2020-01-01"),
    np.array([(1, 2.5)], [("n", np.int8), ("x", np.float64)])[0],
    Path("data/levels"),
    PureWindowsPath("c:\\x"),
    (1, (2, [3])),
    {(0, 1): 2, 1: "a", "1": "b", None: 3, np.int64(3): 1},
    {"__type__": "tuple", "__tensor__": 1, "__array__": 2, "value": 3},
    b"\0\xff",
    bytearray(b"x"),
    {1, (2, 3)},
    frozenset({1}),
    1 + 2j,
    range(1, 9, 2),
    slice(1, None),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.date(2020, 1, 1),
    datetime.time(1, 2),
    datetime.timedelta(1, 2, 3),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    np.float32,
    np.dtype(">f4"),
    torch.float32,
    int,
    -(10**6000),
    float("inf"),
    "\udcff",
    None,
]
EQUAL = [Level.HARD, Text.RED, collections.OrderedDict(a=1), Size(1, 2)]


def through_a_file(folder: Path, value: Any) -> Any:
    write_checkpoint(folder, {"config": {"env_config": {"x": value}}})
    return read_checkpoint(folder)["config"]["env_config"]["x"]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_is_restored_with_its_type(value: Any, tmp_path: Path) -> None:
    restored = through_a_file(tmp_path, value)
    assert restored == value
    assert type(restored) is type(value)
    if isinstance(value, Mapping):
        assert [*map(type, restored)] == [*map(type, value)]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: str(value.dtype))
def test_array_is_restored_with_its_type(value: Any, tmp_path: Path) -> None:
    restored = through_a_file(tmp_path, value)
    assert type(restored) is type(value)
    assert (restored.dtype, restored.shape) == (value.dtype, value.shape)
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj().resolve_neg()
        same = torch.equal(*(one.ravel().contiguous().view(torch.uint8) for one in (restored, value)))
    else:
        same = restored.tobytes() == value.tobytes()
    assert same
    restored[...] = value  # environments may change the array


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: type(value).__name__)
def test_value_of_a_subclass_becomes_an_equal_one(value: Any, tmp_path: Path) -> None:
    assert through_a_file(tmp_path, value) == value


class Loader:
    """A value that checkpoints cannot contain."""


def test_value_that_cannot_be_saved_is_named_by_its_path() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    options = {
        "loader": Loader(),
        "mode": Mode.FAST,
        "lock": threading.Lock(),
        "make": lambda: None,
        "masked": np.ma.array([1, 2], mask=[0, 1]),
        "objects": np.array([None]),
        "fields": np.zeros(1, [("n", np.int8), ("o", object)]),
        "padded": np.zeros(1, np.dtype([("n", np.int8), ("x", np.float64)], align=True)),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "generator": np.random.default_rng(0),
        "nested": {"list": [1, {"y": Loader(), "z": 2}], "a.b": Loader(), (0, 1): Loader()},
        "cycle": cycle,
        "kept": 5,
    }
    unsaved: dict[str, str] = {}
    config = plain({"env_config": options}, unsaved)
    assert unsaved == {
        "env_config.loader": f"{__name__}.Loader",
        "env_config.mode": f"{__name__}.Mode",
        "env_config.lock": "_thread.lock",
        "env_config.make": "function",
        "env_config.masked": "numpy.ma.MaskedArray",
        "env_config.objects": "numpy.ndarray",
        "env_config.fields": "numpy.ndarray",
        "env_config.padded": "numpy.ndarray",
        "env_config.sparse": "torch.Tensor",
        "env_config.meta": "torch.Tensor",
        "env_config.generator": "numpy.random._generator.Generator",
        "env_config.nested.list[1].y": f"{__name__}.Loader",
        "env_config.nested['a.b']": f"{__name__}.Loader",
        "env_config.nested[(0, 1)]": f"{__name__}.Loader",
        "env_config.cycle[1]": "list",
    }
    assert config == {
        "env_config": {"nested": {"list": [1, {"z": 2}]}, "cycle": [1, None], "kept": 5}
    }
    arguments = [argument_for(path) for path in unsaved]
    assert arguments[0] == "env_config.loader"
    assert arguments[-4:] == [
        "env_config.nested.list",
        "env_config.nested",
        "env_config.nested",
        "env_config.cycle",
    ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("os.system", "touch went_off"),
        ("Path", 3),
        ("tuple", 3),
        ("set", [[1]]),
        ("dict", [[[1], 2]]),
        ("dict", [1]),
        ("int", "ten"),
        ("bytes", "%"),
        ("class", "eval"),
        ("numpy.class", "O"),
        ("numpy.scalar", ["O", "AAAAAAAAAAA="]),
        ("numpy.scalar", ["<i4", "AAAAAAAAAAA="]),
        ("numpy.array", ["<f8", [3], [1, 2, 3]]),
        ("numpy.array", ["<f8", [10**12], {"__tensor__": "t"}]),
        ("torch.dtype", "load"),
        ("torch.dtype", "nothing"),
        ("torch.tensor", ["complex128", [1], {"__tensor__": "t"}]),
        ("torch.tensor", ["bits8", [8], {"__tensor__": "bytes"}]),
        ("numpy.array", [[["a", "O", []]], [1], {"__tensor__": "bytes"}]),
        ("numpy.array", [[["a", "<f8", [10**12]]], [1], {"__tensor__": "bytes"}]),
        ("timedelta", [10**30]),
        ("Fraction", [1, 0]),
        ([], 1),
        (None, 1),
    ],
)
def test_changed_value_is_one_error(kind: Any, value: Any, tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer(SMALL)
    trainer.save(str(tmp_path))
    trainer.stop()

    def change(tensors: dict[str, torch.Tensor], tree: dict[str, Any]) -> None:
        tensors |= {"t": torch.zeros(8), "bytes": torch.zeros(8, dtype=torch.uint8)}
        tree["config"]["env_config"] = {"x": {"__type__": kind, "value": value}}

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match="field 'config/env_config/x' cannot be decoded"):
        read_trainer_state(tmp_path)


# ---- environments -----------------------------------------------------------------------------


class Maze(gymnasium.Env[Any, Any]):
    """An environment with 5 steps in each episode. The rewards depend on the options."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.cost = config.get("difficulty", 1) * (2 if config.get("loader") else 1)
        cells = config.get("cells", {})
        self.cost += cells.get((0, 1), 0) + float(np.sum(config.get("weights", 0)))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), -float(self.cost), self.steps >= 5, False, {}


def saved(folder: Path, env_config: Any, **options: Any) -> Path:
    trainer = PolicyOptimizerTrainer(
        {**SMALL, "env": Maze, "env_config": env_config, "min_sample_timesteps_per_iteration": 0}
        | options
    )
    trainer.train()
    trainer.save(str(folder / "c"))
    trainer.save(str(folder / "c"))
    trainer.stop()
    return folder / "c"


def mean_of(*arguments: Any) -> float:
    played = polopt("evaluate", *arguments, "--episodes", 2, "--env", "test_saved_config:Maze")
    assert played.exit_code == 0, played.output
    [line] = [line for line in played.stdout.splitlines() if line.startswith("return")]
    return float(line.split()[2])


def test_evaluate_plays_the_environment_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        "difficulty": np.int64(7),
        "cells": {(0, 1): 2},
        "weights": np.ones(3),
        "data": Path("data"),
    }
    checkpoint = saved(tmp_path, options)
    assert mean_of(checkpoint) == -5 * (7 + 2 + 3)
    assert not caplog.records


def test_missing_option_of_the_environment_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved(tmp_path, {"difficulty": 7, "loader": Loader(), "more": [1, Loader()]})
    [warning] = caplog.records  # only the first of the two saves warns
    assert f"env_config.loader ({__name__}.Loader), env_config.more[1]" in warning.message
    assert warning.levelno == logging.WARNING
    state = read_trainer_state(checkpoint)
    assert set(state["unsaved"]) == {"env", "env_config.loader", "env_config.more[1]"}
    assert state["config"]["env_config"] == {"difficulty": 7, "more": [1, None]}

    named = ["--env", "test_saved_config:Maze"]
    said = error_of(polopt("evaluate", checkpoint, *named))
    assert f"does not contain env_config.loader ({__name__}.Loader), env_config.more[1]" in said
    assert "evaluate ... env_config.loader=VALUE env_config.more=VALUE" in said
    said = error_of(polopt("evaluate", checkpoint, "env_config.more=[]", *named))
    assert f"does not contain env_config.loader ({__name__}.Loader), because" in said
    assert mean_of(checkpoint, "env_config.loader=x", "env_config.more=[]") == -5 * 14
    assert mean_of(checkpoint, "env_config.loader=null", "env_config={more: 3}") == -5 * 7
    assert "'lr=1' has no effect" in error_of(polopt("evaluate", checkpoint, "lr=1", *named))

    again = PolicyOptimizerTrainer({**SMALL, "env": Maze})  # this trainer's config is complete
    again.restore(str(checkpoint))
    again.stop()
    assert restoring.load(checkpoint).action_space == Maze.action_space


def test_next_command_names_what_it_needs(tmp_path: Path) -> None:
    options = {
        "env": "CartPole-v1",
        "env_config": {"loader": Loader(), "size": np.int64(3)},
        "evaluation_config": {"env": "mygame:Game-v0"},
    }
    command = _next_step(tmp_path, Experiment.parse(options, {}))
    assert command.endswith(f"evaluate {tmp_path} --env mygame:Game-v0 env_config.loader=VALUE")


def test_checkpoint_that_left_out_all_options_is_refused(tmp_path: Path) -> None:
    """The checkpoint is as an earlier version wrote it."""
    checkpoint = saved(tmp_path, {"difficulty": 7})
    tree = json.loads((checkpoint / "state.json").read_text())
    del tree["config"]["env_config"], tree["unsaved"]
    tree["config"]["policy"]["model"]["fcnet_hiddens"] = [8]
    (checkpoint / "state.json").write_text(json.dumps(tree))
    resign(checkpoint)
    said = error_of(polopt("evaluate", checkpoint, "--env", "test_saved_config:Maze"))
    assert "does not contain env_config (" in said
    assert "env_config={KEY: VALUE}" in said
    assert mean_of(checkpoint, "env_config={}") == -5
    assert mean_of(checkpoint, "env_config.difficulty=3") == -15


@pytest.mark.parametrize("specified", [gymnasium.spec("CartPole-v1"), "CartPole-v1"])
def test_registered_environment_is_saved_by_its_id(specified: Any, tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer({**SMALL, "env": specified})
    trainer.save(str(tmp_path))
    trainer.stop()
    assert read_trainer_state(tmp_path)["config"]["env"] == "CartPole-v1"


# ---- policies ---------------------------------------------------------------------------------


class HookedConfig(PPOConfig):
    hook: Any = None


class Hooked(PPOPolicy):
    config_class: type[PolicyConfig] = HookedConfig


def test_missing_option_of_the_policy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(POLICIES, "_known", dict(POLICIES._known))  # drops the class afterwards
    trainer = PolicyOptimizerTrainer({**SMALL, "policy": Hooked, "hook": Loader()})
    trainer.save(str(tmp_path))
    trainer.stop()
    said = r"does not contain policy\.hook \(.*Loader\).*Restore the checkpoint in a trainer"
    with pytest.raises(CheckpointError, match=said):
        restoring.load(tmp_path, Hooked)
    assert "does not contain policy.hook" in error_of(polopt("evaluate", tmp_path))
