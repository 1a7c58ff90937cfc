"""Fallback to an older checkpoint when one cannot be read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from polopt.rollouts.envs.errors import EnvironmentFailedError
from polopt.rollouts.sampling.data_fault_log import NonFiniteError
from polopt.rollouts.workers.failures import WorkersFailedError
from polopt.trainers.checkpoints import CheckpointError, DamagedCheckpoint, write_checkpoint
from polopt.trainers.command_line.cli import app
from polopt.trainers.restoring import name_previous, read_or_fall_back, read_trainer_state
from polopt.trainers.trainer import PolicyOptimizerTrainer

SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 16,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}
FILES = ("tensors.pt", "state.json", "manifest.json")


def state_of(number: int) -> dict[str, Any]:
    """As much of a trainer's state as makes one."""
    params = torch.full((50,), float(number))
    return {"config": {}, "optimizer": {"policy": {"params": params}, "number": number}}


def number_of(directory: Path) -> int:
    return int(read_trainer_state(directory)["optimizer"]["number"])


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Checkpoints 0, 1 and 2, as Tune names them; the names say their order, the times do not."""
    for number in (2, 0, 1):
        write_checkpoint(tmp_path / f"checkpoint_{number:06d}", state_of(number))
    return tmp_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_damaged_newest_falls_back_to_the_one_before(
    series: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    newest, before = series / "checkpoint_000002", series / "checkpoint_000001"
    whole = (newest / name).read_bytes()
    random.seed(f"{name}{damage.__name__}")
    for _ in range(30 if damage is not Path.unlink else 1):
        (newest / name).write_bytes(whole)
        damage(newest / name)
        caplog.clear()
        try:
            found, state = read_or_fall_back(newest)
        except CheckpointError as error:  # pragma: no cover - for the message
            raise AssertionError((newest / name).read_bytes()) from error
        if found == newest:  # another space in JSON changes nothing
            assert name == "manifest.json"
            assert state["optimizer"]["number"] == 2
            continue
        assert (found, state["optimizer"]["number"]) == (before, 1)
        [line] = caplog.messages
        assert str(newest) in line
        assert f"restoring the one before, {before}" in line


def test_fallback_skips_damaged_ones(series: Path) -> None:
    (series / "checkpoint_000002" / "tensors.pt").unlink()
    (series / "checkpoint_000001" / "manifest.json").unlink()
    assert read_or_fall_back(series / "checkpoint_000002")[1]["optimizer"]["number"] == 0
    flip_a_bit(series / "checkpoint_000000" / "tensors.pt")
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint_000002 is incomplete: tensors\.pt"):
        read_or_fall_back(series / "checkpoint_000002")


def test_fallback_never_uses_a_later_checkpoint(series: Path) -> None:
    (series / "checkpoint_000000" / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint):
        read_or_fall_back(series / "checkpoint_000000")


def test_without_numbers_times_give_the_order(tmp_path: Path) -> None:
    for number, name in enumerate(["first", "second", "third"]):
        write_checkpoint(tmp_path / name, state_of(number))
        for path in (tmp_path / name, tmp_path / name / "manifest.json"):
            os.utime(path, (1000.0 + number, 1000.0 + number))
    truncate(tmp_path / "second" / "tensors.pt")
    assert read_or_fall_back(tmp_path / "second")[0] == tmp_path / "first"
    assert read_or_fall_back(tmp_path / "gone")[0] == tmp_path / "third"


# ---- trainers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one trainer."""
    folder = tmp_path_factory.mktemp("trained")
    made = PolicyOptimizerTrainer(SMALL)
    for number in range(3):
        made.train()
        made.save(str(folder / f"checkpoint_{number:06d}"))
    made.stop()
    return folder


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "trial"))


@pytest.fixture
def trainer() -> Iterator[PolicyOptimizerTrainer]:
    made = PolicyOptimizerTrainer(SMALL)
    yield made
    made.stop()


def params_in(directory: Path) -> torch.Tensor:
    params: torch.Tensor = read_trainer_state(directory)["optimizer"]["policy"]["params"]
    return params


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: truncate(d / "tensors.pt"),
        lambda d: flip_a_bit(d / "state.json"),
        lambda d: (d / "manifest.json").unlink(),
        shutil.rmtree,
    ],
)
def test_trainer_restores_the_one_before(
    saved: Path,
    trainer: PolicyOptimizerTrainer,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    newest, before = saved / "checkpoint_000002", saved / "checkpoint_000001"
    damage(newest)
    with caplog.at_level(logging.WARNING, logger="polopt"):
        trainer.restore(str(newest))
    assert torch.equal(trainer.get_policy().flat.params, params_in(before))
    assert any(str(newest) in line and str(before) in line for line in caplog.messages)
    trainer.train()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def sign(directory: Path, version: int = 1) -> None:
    """Writes a manifest that agrees with the files, for another version of the format."""
    files = ("tensors.pt", "state.json")
    sums = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in files}
    seal = hashlib.sha256(json.dumps([version, sums], sort_keys=True).encode()).hexdigest()
    manifest = {"format": version, "sha256": sums, "seal": seal}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_refusal_names_the_previous_checkpoint(
    saved: Path, tmp_path: Path, trainer: PolicyOptimizerTrainer
) -> None:
    newest, before = saved / "checkpoint_000002", saved / "checkpoint_000001"
    good = params_in(newest)
    named = f"; the one before, {before}, can be read"

    sign(newest, version=2)
    refused(trainer, newest, f"has format 2; this version of polopt reads format 1{named}")

    went_off = tmp_path / "went_off"
    (newest / "tensors.pt").write_bytes(pickle.dumps(_Bomb(went_off), protocol=2))
    sign(newest)
    refused(trainer, newest, "tensors.pt does not hold plain tensors")
    refused(trainer, newest, named)
    assert not went_off.exists()

    shutil.rmtree(newest)
    other = PolicyOptimizerTrainer({**SMALL, "model": {"fcnet_hiddens": [9]}})
    other.save(str(newest))
    other.stop()
    refused(trainer, newest, "of another network")
    refused(trainer, newest, named)
    assert not torch.equal(trainer.get_policy().flat.params, good)  # nothing was taken over


def test_state_of_other_shape_is_one_error(saved: Path, trainer: PolicyOptimizerTrainer) -> None:
    newest = saved / "checkpoint_000002"
    for damage, message in (
        (
            lambda s: s["optimizer"]["policy"].pop("adam"),
            "must be of torch_optimizer 'adam'; got none",
        ),
        (lambda s: s["optimizer"].pop("restore_count"), "does not fit: KeyError"),
        (lambda s: s["optimizer"].update(num_updates="many"), "'num_updates': got 'many'"),
        (lambda s: s["optimizer"]["policy"].update(params=[1, 2]), "policy/params': got [1, 2]"),
        (lambda s: s["optimizer"].update(policy=3), "optimizer/policy': got 3"),
        (lambda s: s["optimizer"]["policy"]["adam"].update(exp_avg=torch.zeros(3)), "not fit"),
    ):
        state = read_trainer_state(saved / "checkpoint_000001")
        damage(state)
        shutil.rmtree(newest)
        write_checkpoint(newest, state)
        refused(trainer, newest, message)


def refused(trainer: PolicyOptimizerTrainer, directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        trainer.restore(str(directory))
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [WorkersFailedError, NonFiniteError, EnvironmentFailedError])
def test_failure_during_a_restore_keeps_its_type(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(state: Any) -> None:
        raise error("not the checkpoint")

    trainer = PolicyOptimizerTrainer(SMALL)
    monkeypatch.setattr(trainer.optimizer, "set_state", fail)
    with pytest.raises(error, match="not the checkpoint"):
        trainer.restore(str(saved / "checkpoint_000002"))
    trainer.stop()


def test_command_line_names_the_previous_one(saved: Path) -> None:
    newest = saved / "checkpoint_000002"
    truncate(newest / "tensors.pt")
    result = CliRunner().invoke(app, ["evaluate", str(newest)])
    assert result.exit_code == 2
    assert "is damaged: the SHA-256 of tensors.pt" in result.output
    assert str(saved / "checkpoint_000001") in result.output
    assert "Traceback" not in result.output
    assert name_previous(saved / "checkpoint_000000") == ""
