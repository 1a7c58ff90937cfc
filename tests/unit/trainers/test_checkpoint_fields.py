"""Tests of checkpoints with fields that cannot be restored, and of checkpoints that cannot be
written."""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import FIELD, PARAMS, SMALL, resign, rewrite

from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import CheckpointError, write_checkpoint
from polopt.trainers.trainer import PolicyOptimizerTrainer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Writes a checkpoint of a trained trainer."""
    made = PolicyOptimizerTrainer(SMALL)
    made.train()
    made.save(str(tmp_path / "checkpoint"))
    made.stop()
    return tmp_path / "checkpoint"


# ---- fields -----------------------------------------------------------------------------------


def replace_params(make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors, tree: tensors.update({PARAMS: make(tensors[PARAMS])})


def replace_count(value: Any, key: str = "num_env_steps_sampled") -> Any:
    return lambda tensors, tree: tree["optimizer"].update({key: value})


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (replace_params(lambda p: p.to(torch.complex64)), FIELD, "a tensor of complex64"),
        (replace_params(lambda p: p * torch.nan), FIELD, "NaN or infinite numbers"),
        (replace_params(lambda p: p / 0.0), FIELD, "NaN or infinite numbers"),
        (replace_params(lambda p: p.long()), FIELD, "a tensor of int64"),
        (replace_params(lambda p: p.double()), FIELD, "a tensor of float64"),
        (replace_params(lambda p: p[None]), FIELD, "a tensor of float32 [1, "),
        (replace_count(10**400), "num_env_steps_sampled", "10000"),
        (replace_count(-1), "num_env_steps_sampled", "got -1"),
        (replace_count(True), "num_env_steps_sampled", "got True"),
        (
            replace_count({"returns": [10**400]}, "episodes"),
            "optimizer/episodes/returns/0",
            "got 1000",
        ),
        (
            replace_count({"__type__": "numpy.scalar", "value": ["<f4", "AADAfw=="]}, "x"),
            "optimizer/x",
            "got nan",
        ),
        (
            replace_count({"__type__": "tuple", "value": [1, math.inf]}, "x"),
            "optimizer/x/1",
            "got inf",
        ),
        (lambda tensors, tree: tree.update(time_total_s="1"), "time_total_s", "got '1'"),
        (
            lambda tensors, tree: tree["optimizer"]["policy"]["coefficients"].update(lr=math.nan),
            "optimizer/policy/coefficients/lr",
            "got nan",
        ),
        (
            lambda tensors, tree: tree["config"].update(preset="hostile:X"),
            "config/preset",
            "got 'hostile:X'. Allowed: a registered name, because a checkpoint cannot make",
        ),
        (
            lambda tensors, tree: tree["config"].update(model={"custom": "hostile:X"}),
            "config/model/custom",
            "got 'hostile:X'",
        ),
    ],
)
def test_unusable_field_is_one_error(saved: Path, change: Any, field: str, said: str) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError) as caught:
        read_trainer_state(saved)
    message = str(caught.value)
    assert str(saved) in message
    assert f"{field!r}" in message
    assert said in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(saved))


def test_environments_may_save_any_number(saved: Path) -> None:
    env = {"best": -math.inf, "state": 2**127, "seen": torch.tensor([math.nan, 1j])}
    state = read_trainer_state(saved)
    state["optimizer"]["workers"] = {"0": {"sampler": {"env": env}}}
    write_checkpoint(saved, state)
    read = read_trainer_state(saved)["optimizer"]["workers"]["0"]["sampler"]["env"]
    assert (read["best"], read["state"]) == (-math.inf, 2**127)
    torch.testing.assert_close(read["seen"], env["seen"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("depth", [3_000, 50_000])
def test_deeply_nested_checkpoint_is_one_error(saved: Path, depth: int) -> None:
    text = (saved / "state.json").read_text()
    nested = "[" * depth + "]" * depth
    (saved / "state.json").write_text(text.rstrip().removesuffix("}") + f', "x": {nested}}}')
    resign(saved)
    with pytest.raises(CheckpointError, match=r"state\.json is nested too deeply"):
        read_trainer_state(saved)


def test_integer_of_thousands_of_digits_is_one_error(saved: Path) -> None:
    text = (saved / "state.json").read_text().rstrip().removesuffix("}")
    (saved / "state.json").write_text(text + f', "x": {"1" * 5000}}}')
    resign(saved)
    with pytest.raises(CheckpointError, match=r"damaged: state\.json: "):
        read_trainer_state(saved)


# ---- writing ----------------------------------------------------------------------------------


def test_full_disk_is_one_error_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    """A limit on the size of files has the same effect as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: File too large") as caught:
            write_checkpoint(tmp_path / "c", {"tensor": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(tmp_path / "c") in str(caught.value)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("path", ["file/c", "/proc/polopt/c"])
def test_unwritable_directory_is_one_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written: N"):
        write_checkpoint(tmp_path / path, {})
