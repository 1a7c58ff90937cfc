"""Tests of the fallback to an older checkpoint when a checkpoint cannot be read."""

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

from polopt.rollouts.envs.env_errors import EnvironmentFailedError
from polopt.rollouts.workers.errors import NonFiniteError, WorkersFailedError
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import (
    FORMAT,
    TENSORS,
    CheckpointError,
    DamagedCheckpoint,
    write_checkpoint,
)
from polopt.trainers.find_checkpoint import find_checkpoint, read_or_fall_back
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
FILES = (TENSORS, "state.json", "manifest.json")


def state_of(number: int) -> dict[str, Any]:
    """Returns the parts of a trainer's state that `read_trainer_state` requires."""
    params = torch.full((50,), float(number))
    return {"config": {}, "optimizer": {"policy": {"params": params}, "number": number}}


def number_of(directory: Path) -> int:
    return int(read_trainer_state(directory)["optimizer"]["number"])


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Writes the checkpoints 0, 1 and 2 under Tune's names. Their order follows from the names, and
    not from the times."""
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
        if found == newest:  # the bit may change only white space in JSON
            assert name == "manifest.json"
            assert state["optimizer"]["number"] == 2
            continue
        assert (found, state["optimizer"]["number"]) == (before, 1)
        [line] = caplog.messages
        assert str(newest) in line
        assert f"Restoring the previous checkpoint {before} instead" in line


def test_fallback_skips_damaged_ones(series: Path) -> None:
    (series / "checkpoint_000002" / TENSORS).unlink()
    (series / "checkpoint_000001" / "manifest.json").unlink()
    assert read_or_fall_back(series / "checkpoint_000002")[1]["optimizer"]["number"] == 0
    flip_a_bit(series / "checkpoint_000000" / TENSORS)
    with pytest.raises(DamagedCheckpoint, match=r"_000002 is incomplete: tensors\.safetensors"):
        read_or_fall_back(series / "checkpoint_000002")


def test_fallback_never_uses_a_later_checkpoint(series: Path) -> None:
    (series / "checkpoint_000000" / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint):
        read_or_fall_back(series / "checkpoint_000000")


def test_without_numbers_times_give_the_order(tmp_path: Path) -> None:
    for number, name in enumerate(["first", "second", "third"]):
        write_checkpoint(tmp_path / name, {**state_of(number), "runs": ["one"]})
        for path in (tmp_path / name, tmp_path / name / "manifest.json"):
            os.utime(path, (1000.0 + number, 1000.0 + number))
    truncate(tmp_path / "second" / TENSORS)
    assert read_or_fall_back(tmp_path / "second")[0] == tmp_path / "first"


# ---- runs -------------------------------------------------------------------------------------


def write_of_run(path: Path, number: int, *runs: str) -> Path:
    """Writes a checkpoint whose modification times say that it was written at second `number`."""
    write_checkpoint(path, {**state_of(number), "runs": list(runs)})
    for changed in (path / "manifest.json", path):
        os.utime(changed, (1000.0 + number, 1000.0 + number))
    return path


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def remove_all(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def damage_state(directory: Path) -> None:
    (directory / "state.json").write_text("{}")


DAMAGES = [lambda d: truncate(d / TENSORS), remove_manifest, damage_state, remove_all]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("names", [("seed1", "seed7"), ("first", "second")])
def test_fallback_uses_no_checkpoint_of_another_run(
    tmp_path: Path, names: tuple[str, str], damage: Callable[[Path], None]
) -> None:
    first, second = (write_of_run(tmp_path / n, i, n) for i, n in enumerate(names))
    damage(second)
    with pytest.raises(DamagedCheckpoint) as caught:
        read_or_fall_back(second)
    assert str(first) not in str(caught.value)
    if (second / "manifest.json").exists():  # a directory without a manifest is not found
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            find_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES[:2])
def test_names_of_tune_do_not_join_two_runs(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for number in (0, 1):
        write_of_run(tmp_path / f"checkpoint_{number:06d}", number, f"run {number}")
    damage(tmp_path / "checkpoint_000001")
    with pytest.raises(DamagedCheckpoint):
        read_or_fall_back(tmp_path / "checkpoint_000001")


@pytest.mark.parametrize("path", ["seed7", "no_such_model", "no_such_folder/seed1"])
def test_missing_checkpoint_is_not_another_one(tmp_path: Path, path: str) -> None:
    write_of_run(tmp_path / "seed1", 1, "one")
    for read in (read_or_fall_back, find_checkpoint):
        with pytest.raises(CheckpointError, match=rf"no such directory: .*{path}$"):
            read(tmp_path / path)


def test_fallback_goes_back_through_restores(tmp_path: Path) -> None:
    """Two runs were restored from the same checkpoint. Checkpoints 2 and 3 belong to different
    runs."""
    for number, runs in enumerate([("a",), ("a", "b"), ("a", "c"), ("a", "b", "d")]):
        write_of_run(tmp_path / f"step_{number}", number, *runs)
    truncate(tmp_path / "step_3" / TENSORS)
    assert read_or_fall_back(tmp_path / "step_3")[0] == tmp_path / "step_1"
    truncate(tmp_path / "step_1" / TENSORS)
    assert read_or_fall_back(tmp_path / "step_3")[0] == tmp_path / "step_0"
    assert find_checkpoint(tmp_path) == tmp_path / "step_0"


def test_newest_of_an_experiment_stays_in_its_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = write_of_run(tmp_path / "b" / "checkpoint_000000", 0, "b")
    other = write_of_run(tmp_path / "a" / "checkpoint_000000", 1, "a")
    newest = write_of_run(tmp_path / "b" / "checkpoint_000001", 2, "b")
    assert find_checkpoint(tmp_path) == newest
    truncate(newest / TENSORS)
    assert find_checkpoint(tmp_path) == older
    assert str(newest) in caplog.messages[0]
    shutil.rmtree(newest)
    assert find_checkpoint(tmp_path) == other


def test_manifest_of_another_program_is_no_checkpoint(tmp_path: Path) -> None:
    saved = write_of_run(tmp_path / "trial", 0, "a")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"name": "a web page"}')
    assert find_checkpoint(tmp_path) == saved


# ---- trainers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes three checkpoints of one trainer."""
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
        lambda d: truncate(d / TENSORS),
        lambda d: flip_a_bit(d / "state.json"),
        lambda d: (d / "manifest.json").unlink(),
        lambda d: [path.unlink() for path in d.iterdir()],
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


def test_runs_follow_restores_and_end_with_a_new_config(saved: Path, tmp_path: Path) -> None:
    def runs_in(directory: Path) -> list[str]:
        runs: list[str] = read_trainer_state(directory)["runs"]
        return runs

    first, second = PolicyOptimizerTrainer(SMALL), PolicyOptimizerTrainer(SMALL)
    first.restore(str(saved / "checkpoint_000000"))
    first.save(str(tmp_path / "first"))
    second.restore(str(tmp_path / "first"))
    second.save(str(tmp_path / "second"))
    second.restore(str(tmp_path / "second"))
    second.save(str(tmp_path / "again"))
    (origin,) = runs_in(saved / "checkpoint_000002")
    assert runs_in(tmp_path / "first")[:-1] == [origin]
    assert runs_in(tmp_path / "second")[:-1] == runs_in(tmp_path / "first")
    assert runs_in(tmp_path / "again") == runs_in(tmp_path / "second")
    second.reset_config(SMALL)
    second.save(str(tmp_path / "new"))
    assert len(runs_in(tmp_path / "new")) == 1
    assert runs_in(tmp_path / "new")[0] not in runs_in(tmp_path / "second")
    for made in (first, second):
        made.stop()


def test_restore_of_a_missing_path_changes_nothing(tmp_path: Path) -> None:
    """The path ends in a seed, as in the names that users give to models. The seed says nothing
    about the order."""
    trained = PolicyOptimizerTrainer(SMALL)
    trained.save(str(tmp_path / "models" / "seed1"))
    trained.stop()
    trainer = PolicyOptimizerTrainer({**SMALL, "seed": 2})
    before = trainer.get_policy().get_weights().flat.copy()
    for name in ("seed7", "no_such_model"):
        with pytest.raises(CheckpointError, match="no such directory"):
            trainer.restore(str(tmp_path / "models" / name))
    assert (trainer.get_policy().get_weights().flat == before).all()
    trainer.stop()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def sign(directory: Path, version: int = FORMAT) -> None:
    """Writes a manifest that agrees with the files, for another version of the format."""
    files = (TENSORS, "state.json")
    sums = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in files}
    seal = hashlib.sha256(json.dumps([version, sums], sort_keys=True).encode()).hexdigest()
    manifest = {"format": version, "sha256": sums, "seal": seal}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_refusal_names_the_previous_checkpoint(
    saved: Path, tmp_path: Path, trainer: PolicyOptimizerTrainer
) -> None:
    newest, before = saved / "checkpoint_000002", saved / "checkpoint_000001"
    good = params_in(newest)
    named = f". The previous checkpoint {before} can be read"

    sign(newest, version=4)
    refused(trainer, newest, "has format 4, but this version of polopt reads formats 2, 3")
    refused(trainer, newest, named)

    went_off = tmp_path / "went_off"
    (newest / TENSORS).write_bytes(pickle.dumps(_Bomb(went_off), protocol=2))
    sign(newest)
    refused(trainer, newest, "tensors.safetensors does not hold plain tensors")
    refused(trainer, newest, named)
    assert not went_off.exists()

    shutil.rmtree(newest)
    other = PolicyOptimizerTrainer({**SMALL, "model": {"fcnet_hiddens": [9]}})
    other.save(str(newest))
    other.stop()
    refused(trainer, newest, "its network is different")
    assert not torch.equal(trainer.get_policy().flat.params, good)  # the trainer is unchanged


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
        (
            lambda s: s["optimizer"]["policy"]["adam"]["network"].update(exp_avg=torch.zeros(3)),
            "not fit",
        ),
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


@pytest.mark.parametrize("kind", [str, Path])
def test_home_directory_is_expanded(
    saved: Path,
    trainer: PolicyOptimizerTrainer,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[str], Any],
) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    trainer.restore(kind("~/trial/checkpoint_000002"))
    params = trainer.get_policy().get_state()["params"]
    assert torch.equal(params, params_in(saved / "checkpoint_000002"))


def test_rows_that_do_not_fit_are_a_misfit(tmp_path: Path) -> None:
    config = {
        **{key: value for key, value in SMALL.items() if key != "num_sgd_iter"},
        "policy": "dqn",
        "optimizer": {"name": "sync_replay", "learning_starts": 16, "save_replay_buffer": True},
    }
    trainer = PolicyOptimizerTrainer(config)
    trainer.train()
    directory = tmp_path / "checkpoint"
    trainer.save(str(directory))
    next((directory / "replay").glob("rows-*")).unlink()
    sign(directory)  # the manifest no longer lists the rows
    with pytest.raises(CheckpointError, match="does not fit: RowFilesError: "):
        trainer.restore(str(directory))
    trainer.stop()


@pytest.mark.parametrize("method", ["drain", "set_state"])
@pytest.mark.parametrize(
    "error", [RuntimeError, WorkersFailedError, NonFiniteError, EnvironmentFailedError]
)
def test_failure_during_a_restore_keeps_its_type(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], method: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise error("not the checkpoint")

    trainer = PolicyOptimizerTrainer(SMALL)
    monkeypatch.setattr(trainer.optimizer, method, fail)
    with pytest.raises(error) as caught:
        trainer.restore(str(saved / "checkpoint_000002"))
    assert str(caught.value) == "not the checkpoint"
    monkeypatch.undo()
    trainer.stop()


def test_error_of_a_pending_call_is_not_a_misfit(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("of the user's environment")

    trainer = PolicyOptimizerTrainer(SMALL)
    monkeypatch.setattr(trainer.optimizer, "drain", fail)
    with pytest.raises(ValueError, match=r"^of the user's environment$"):
        trainer.restore(str(saved / "checkpoint_000002"))
    monkeypatch.undo()
    trainer.stop()
