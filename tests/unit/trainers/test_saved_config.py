"""Tests that a checkpoint saves the whole config, or names the missing values and asks for them."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from checkpoint_helpers import SMALL, rewrite

from polopt.common.plain_data import argument_for, plain
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.policy_registry import POLICIES
from polopt.policies.ppo import PPOConfig, PPOPolicy
from polopt.trainers import saved_policy
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
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


def bits(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = torch.clone(value, memory_format=torch.contiguous_format)
        value = plain.reshape(-1).view(torch.uint8).numpy()
    data: bytes = value.tobytes()
    return data


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: str(value.dtype))
def test_array_is_restored_with_its_type(value: Any, tmp_path: Path) -> None:
    restored = through_a_file(tmp_path, value)
    assert type(restored) is type(value)
    assert (restored.dtype, restored.shape) == (value.dtype, value.shape)
    assert bits(restored) == bits(value)
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
        saved_policy.load(tmp_path, Hooked)
