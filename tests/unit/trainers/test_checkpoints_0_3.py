"""Tests of checkpoints that polopt 0.3 wrote: `checkpoints_0_3/ppo` and `checkpoints_0_3/sac`. Both
runs had two iterations with `OPTIONS`, two environments of the class `Reach`, and `ENV_CONFIG`.
`expected.json` has the actions of the policy for the observations of `seen`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from checkpoint_helpers import refusal
from gymnasium import spaces

import polopt
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import FORMAT, TENSORS, read_checkpoint
from polopt.trainers.saved_policy import load

FOLDER = Path(__file__).parent / "checkpoints_0_3"
ENV_CONFIG = {
    "size": (3, 4),
    "weights": np.array([0.5, 0.25]),
    "folder": Path("levels"),
    "cells": {(0, 1): 2},
    "kinds": {"a"},
    "scale": np.float32(0.5),
    "mask": torch.tensor([True, False]),
}
SMALL = {
    "env_config": ENV_CONFIG,
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "seed": 5,
    "model": {"fcnet_hiddens": [8]},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {**SMALL, "num_sgd_iter": 1, "normalize_observations": True, "normalize_rewards": True},
    "sac": {
        **SMALL,
        "train_batch_size": 16,
        "learning_starts": 16,
        "prioritized_replay": True,
        "save_replay_buffer": True,
        "n_step": 2,
        "buffer_size": 64,
    },
}
PRESETS = {"ppo": polopt.SyncPPO, "sac": polopt.SAC}


class Reach(gymnasium.Env[Any, Any]):
    """Moves a point on a line. The observations are dicts, and the state can be saved."""

    def __init__(self, config: Any) -> None:
        at = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {"at": at, "side": spaces.Discrete(3), "seen": spaces.MultiBinary(2)}
        )
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        assert config["size"] == (3, 4)
        self.at = np.zeros(2, np.float32)
        self.steps = 0

    def _observe(self) -> Any:
        seen = np.array([self.steps % 2, 1], np.int8)
        return {"at": self.at.copy(), "side": self.steps % 3, "seen": seen}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.at[0] += 0.1 * float(action[0])
        self.steps += 1
        return self._observe(), -abs(float(self.at[0])), self.steps >= 5, False, {}

    def get_checkpoint_state(self) -> Any:
        rng = self.np_random.bit_generator.state
        return {"at": self.at, "steps": self.steps, "rng": rng, "pair": (1, 2.5)}

    def set_checkpoint_state(self, state: Any) -> None:
        self.at = state["at"].copy()
        self.steps = state["steps"]
        self.np_random.bit_generator.state = state["rng"]


@pytest.fixture(params=["ppo", "sac"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / request.param, tmp_path / request.param))


def needs_add_ons() -> None:
    """Skips the test without the add-ons whose options the old configs have."""
    for folder in ("dashboards", "recording"):
        pytest.importorskip(f"polopt.{folder}")


def test_policy_acts_as_before(old: Path) -> None:
    expected = json.loads((old / "expected.json").read_text())
    policy = load(old)
    space = Reach(ENV_CONFIG).observation_space
    space.seed(3)
    actions = [policy.predict(space.sample())[0] for _ in range(4)]
    np.testing.assert_allclose(actions, expected["actions"], rtol=1e-4)
    assert expected["env_steps"] == 64


def weights_after(checkpoint: Path, continues: bool = True) -> torch.Tensor:
    """Returns the weights after one more iteration."""
    name = "ppo" if "ppo" in str(checkpoint) else "sac"
    trainer = PRESETS[name]({**OPTIONS[name], "env": Reach})
    trainer.restore(str(checkpoint))
    steps = trainer.optimizer.get_state()["workers"]["0"]["sampler"]["env"]["envs"]
    assert [one["steps"] for one in steps] == ([2, 2] if continues else [0, 0])
    result = trainer.train()
    assert result["training_iteration"] == 3
    assert result["num_env_steps_sampled_lifetime"] == 96
    params: torch.Tensor = trainer.get_policy().get_state()["params"].clone()
    trainer.stop()
    return params


def test_run_continues_as_from_the_current_format(old: Path, tmp_path: Path) -> None:
    """The current format has the same weights, environments, rows and random states."""
    needs_add_ons()
    name = old.name
    trainer = PRESETS[name].from_checkpoint(old, env=Reach)
    restored = trainer.experiment.to_dict()["env_config"]
    for key, value in ENV_CONFIG.items():
        assert type(restored[key]) is type(value)
        assert np.all(np.asarray(restored[key] == value))
    trainer.save(str(tmp_path / f"new_{name}"))
    trainer.stop()
    new = tmp_path / f"new_{name}"
    assert json.loads((new / "manifest.json").read_text())["format"] == FORMAT
    assert torch.equal(weights_after(old), weights_after(new))


def test_save_replaces_an_old_checkpoint(old: Path) -> None:
    needs_add_ons()
    trainer = PRESETS[old.name].from_checkpoint(old, env=Reach)
    trainer.save(str(old))
    trainer.stop()
    assert (old / TENSORS).exists()
    assert not (old / "tensors.pt").exists()
    assert read_trainer_state(old)["training_iteration"] == 2


def test_rows_of_dicts_are_converted(old: Path) -> None:
    optimizer = read_checkpoint(old)["optimizer"]
    obs = optimizer["workers"]["0"]["sampler"]["obs"]
    assert (obs.shape, obs.dtype.names) == ((2,), ("at", "seen", "side"))
    assert (obs["side"] == 2).all()
    if old.name == "sac":
        [*tails] = optimizer["files"]["rows"]["tails"]
        assert all(tail["next_obs"].dtype == obs.dtype for tail in tails)


# ---- hostile files ----------------------------------------------------------------------------


PARAMS = "/optimizer/policy/params"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / "ppo", tmp_path / "c"))


def resign(path: Path) -> None:
    """Writes a manifest that agrees with the changed files."""
    sums = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in ("tensors.pt", "state.json")
    }
    (path / "manifest.json").write_text(json.dumps({"format": 2, "sha256": sums}))


def rewrite(path: Path, change: Callable[[dict[Any, Any]], Any]) -> None:
    tensors = torch.load(path / "tensors.pt", weights_only=True)
    change(tensors)
    torch.save(tensors, path / "tensors.pt")
    resign(path)


def replace(make: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    """Returns a function that replaces the parameters in a checkpoint by another value."""
    return lambda path: rewrite(path, lambda t: t.update({PARAMS: make(t[PARAMS])}))


def compressed(path: Path) -> None:
    """Adds 4 MB of zeros to the file of tensors, compressed to a few KB."""
    tensors = torch.load(path / "tensors.pt", weights_only=True)
    packed = io.BytesIO()
    torch.save(tensors | {"/zeros": torch.zeros(10**6)}, packed)
    rezip(path, packed, lambda name, content: content, zipfile.ZIP_DEFLATED)


def rezip(
    path: Path,
    packed: io.BytesIO,
    change: Callable[[str, bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    with (
        zipfile.ZipFile(packed) as source,
        zipfile.ZipFile(path / "tensors.pt", "w", compression) as target,
    ):
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    resign(path)


class _Array:
    """An object that is pickled as the call `bytearray(size)`, which `weights_only` allows."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 20,)


def constructor(path: Path) -> None:
    """Writes a pickle that allocates a `bytearray` of a size that the pickle names."""

    def change(name: str, content: bytes) -> bytes:
        made = pickle.dumps({"x": _Array()}, protocol=2)
        return made.replace(b"__builtin__", b"builtins") if name.endswith("data.pkl") else content

    rezip(path, io.BytesIO((path / "tensors.pt").read_bytes()), change)


def long_pickle(path: Path) -> None:
    def change(name: str, content: bytes) -> bytes:
        return content + b"\x00" * (17 << 20) if name.endswith("data.pkl") else content

    rezip(path, io.BytesIO((path / "tensors.pt").read_bytes()), change)


def upper_case(path: Path) -> None:
    """Writes the name of the pickle in upper case. torch's reader ignores case."""
    source = io.BytesIO((path / "tensors.pt").read_bytes())
    with (
        zipfile.ZipFile(source) as archive,
        zipfile.ZipFile(path / "tensors.pt", "w") as target,
    ):
        for name in archive.namelist():
            target.writestr(name.replace("data.pkl", "DATA.pkl"), archive.read(name))
    resign(path)


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this version of torch has no quantized tensors")
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace(lambda p: p[:1].expand(1 << 20)), "of shape [1048576] with strides [0]"),
        (
            replace(lambda p: p.to("meta")),
            "its pickle refers to 'torch._utils _rebuild_meta_tensor",
        ),
        (replace(quantized), "its pickle refers to 'torch._utils _rebuild_qtensor'"),
        (
            replace(lambda p: p.to_sparse()),
            "its pickle refers to 'torch._utils _rebuild_sparse_tensor'",
        ),
        (replace(lambda p: {"nested": p}), "got a dict. Allowed: a dense tensor"),
        (replace(lambda p: p[::2]), "with strides [2]"),
        (lambda path: rewrite(path, lambda t: t.update({3: t[PARAMS]})), "a name of type int"),
        (compressed, "its entries are larger than the file"),
        (constructor, "its pickle refers to 'builtins bytearray'"),
        (long_pickle, "its pickle has 17,"),
        (upper_case, "it has an entry 'archive/DATA.pkl'"),
    ],
)
def test_old_tensors_take_no_more_memory_than_their_file(
    saved: Path, change: Callable[[Path], None], said: str
) -> None:
    change(saved)
    assert said in refusal(saved)


def test_aliases_of_one_tensor_are_refused(saved: Path) -> None:
    """Each name costs a few bytes in the file, but checking each tensor takes its full size."""
    rewrite(saved, lambda t: t.update({f"/{i}": t[PARAMS] for i in range(1000)}))
    assert "need more bytes than the file has" in refusal(saved)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickle_does_not_run(saved: Path, tmp_path: Path) -> None:
    went_off = tmp_path / "went_off"
    for write in (
        lambda file: torch.save({"x": _Bomb(went_off)}, file),
        lambda file: file.write_bytes(pickle.dumps(_Bomb(went_off), protocol=2)),
    ):
        write(saved / "tensors.pt")
        resign(saved)
        assert "tensors.pt does not hold plain tensors" in refusal(saved)
        assert not went_off.exists()
    pickle.loads(pickle.dumps(_Bomb(went_off)))  # the pickle would execute code
    assert went_off.exists()


def test_old_file_is_not_read_for_the_current_format(saved: Path) -> None:
    """Otherwise, a checkpoint could have two files of tensors."""
    manifest = (saved / "manifest.json").read_text().replace('"format": 2', f'"format": {FORMAT}')
    changed = json.loads(manifest)
    del changed["seal"]
    (saved / "manifest.json").write_text(json.dumps(changed))
    assert "is incomplete: tensors.safetensors is missing" in refusal(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.pop("spaces"),
        lambda tree: tree["spaces"].update(observation={"type": "Dict", "spaces": 3}),
        lambda tree: tree["optimizer"].update(workers=[1]),
        lambda tree: tree["optimizer"]["workers"].update({"0": {"sampler": {"obs": "x"}}}),
        lambda tree: tree["optimizer"].update(files={"rows": {"tails": [[], {"next_obs": {}}]}}),
    ],
)
def test_rows_that_cannot_be_converted_are_left(saved: Path, change: Any) -> None:
    tree = json.loads((saved / "state.json").read_text())
    change(tree)
    (saved / "state.json").write_text(json.dumps(tree))
    resign(saved)
    assert read_checkpoint(saved)["trainer"] == "SyncPPO"
