"""A checkpoint that can not be used: always found out, and the one before it taken or named."""

from __future__ import annotations

import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from polopt.trainers.checkpoint_fallback import name_previous, read_or_fall_back
from polopt.trainers.checkpoints import (
    CheckpointError,
    DamagedCheckpoint,
    read_trainer_state,
    write_checkpoint,
)
from polopt.trainers.cli import app
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
def test_whatever_happens_to_the_newest_the_one_before_is_taken(
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
        except CheckpointError as error:  # pragma: no cover - says what to look at
            raise AssertionError((newest / name).read_bytes()) from error
        if found == newest:  # a space of JSON may become another one, and nothing is lost
            assert name == "manifest.json"
            assert state["optimizer"]["number"] == 2
            continue
        assert (found, state["optimizer"]["number"]) == (before, 1)
        [line] = caplog.messages
        assert str(newest) in line
        assert f"restoring the one before, {before}" in line


def test_the_one_before_may_be_damaged_too(series: Path) -> None:
    (series / "checkpoint_000002" / "tensors.pt").unlink()
    (series / "checkpoint_000001" / "manifest.json").unlink()
    assert read_or_fall_back(series / "checkpoint_000002")[1]["optimizer"]["number"] == 0
    flip_a_bit(series / "checkpoint_000000" / "tensors.pt")
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint_000002 is incomplete: tensors\.pt"):
        read_or_fall_back(series / "checkpoint_000002")


def test_a_later_one_is_never_taken(series: Path) -> None:
    (series / "checkpoint_000000" / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint):
        read_or_fall_back(series / "checkpoint_000000")


def test_without_numbers_times_tell(tmp_path: Path) -> None:
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


def sign(directory: Path, **manifest: Any) -> None:
    """A manifest that agrees with the files, as a forger or another version would write it."""
    from polopt.trainers import checkpoints

    sums = {name: checkpoints._sha256(directory / name) for name in ("tensors.pt", "state.json")}
    told = {"format": 1, "sha256": sums, **manifest}
    told["seal"] = checkpoints._seal(told["format"], told["sha256"])
    (directory / "manifest.json").write_text(checkpoints.json.dumps(told))


def test_bomb_foreign_version_and_wrong_network_name_the_previous_good_one(
    saved: Path, tmp_path: Path, trainer: PolicyOptimizerTrainer
) -> None:
    newest, before = saved / "checkpoint_000002", saved / "checkpoint_000001"
    good = params_in(newest)
    named = f"; the one before, {before}, can be read"

    sign(newest, format=2)
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


def test_state_that_does_not_fit_is_one_error(saved: Path, trainer: PolicyOptimizerTrainer) -> None:
    newest = saved / "checkpoint_000002"
    for spoil in (
        lambda s: s["optimizer"]["policy"].pop("adam"),
        lambda s: s["optimizer"].pop("restore_count"),
        lambda s: s["optimizer"].update(num_updates="many"),
        lambda s: s["optimizer"]["policy"].update(params=[1, 2]),
        lambda s: s["optimizer"].update(policy=3),
        lambda s: s["optimizer"]["policy"]["adam"].update(exp_avg=torch.zeros(3)),
    ):
        state = read_trainer_state(saved / "checkpoint_000001")
        spoil(state)
        shutil.rmtree(newest)
        write_checkpoint(newest, state)
        refused(trainer, newest, "does not fit")


def refused(trainer: PolicyOptimizerTrainer, directory: Path, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        trainer.restore(str(directory))
    assert said in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_command_line_names_the_previous_one(saved: Path) -> None:
    newest = saved / "checkpoint_000002"
    truncate(newest / "tensors.pt")
    result = CliRunner().invoke(app, ["evaluate", str(newest)])
    assert result.exit_code == 2
    assert "is damaged: tensors.pt" in result.output
    assert str(saved / "checkpoint_000001") in result.output
    assert "Traceback" not in result.output
    assert name_previous(saved / "checkpoint_000000") == ""


# ---- kills ------------------------------------------------------------------------------------

# Forks a process for each line it reads, which has then no torch to import, and tells its id.
_WRITERS = """
import os, shutil, sys, torch
from pathlib import Path
from polopt.trainers.checkpoints import write_checkpoint

def state_of(number):
    params = torch.full((50,), float(number))
    return {"config": {}, "optimizer": {"policy": {"params": params}, "number": number}}

for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    root = Path(line.strip())
    for number in range(10**6):
        write_checkpoint(root / f"checkpoint_{number:06d}", state_of(number))
        if number > 2:
            shutil.rmtree(root / f"checkpoint_{number - 3:06d}")
"""


def kill_while_saving(tmp_path: Path, kills: int) -> int:
    """Checks what each kill leaves; how many of them left a checkpoint that is not whole."""
    rng = random.Random(0)
    cut_off = 0
    with subprocess.Popen(
        [sys.executable, "-c", _WRITERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for kill in range(kills):
            root = tmp_path / str(kill)
            print(root, file=writers.stdin, flush=True)
            pid = int(writers.stdout.readline())
            deadline_s = time.monotonic() + 20.0
            while not (root / "checkpoint_000001").is_dir():
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            time.sleep(0.03 * rng.random())
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == "gone\n"
            newest = max(root.iterdir())
            found, state = read_or_fall_back(newest)
            number = int(newest.name[-6:])
            assert state["optimizer"]["number"] == int(found.name[-6:]) in (number, number - 1)
            assert (state["optimizer"]["policy"]["params"] == int(found.name[-6:])).all()
            cut_off += found != newest
            shutil.rmtree(root)
        writers.stdin.close()
    return cut_off


def test_newest_complete_checkpoint_is_found_after_a_kill(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=8)
