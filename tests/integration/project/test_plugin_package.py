"""pip installs the plugin of docs/examples, configs find it by name, and its own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from printed_code import ROOT

from polopt import ConfigError, load
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from polopt.trainers.experiment import Experiment

PLUGIN = ROOT / "docs" / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Installs the plugin. Returns the environment variables of a process that can import it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    files = [path for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(files) == 5
    for path in files:  # a copy, because a build writes files beside the sources
        copy = source / path.relative_to(PLUGIN)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-build-isolation", "--no-deps", "--target", target, source],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(*command: str, env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**env, "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_of_the_plugin_pass(installed: dict[str, str], tmp_path: Path) -> None:
    arguments = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    out = run("-m", "pytest", *arguments, str(PLUGIN / "tests"), env=installed, folder=tmp_path)
    assert "3 passed" in out


def test_command_line_knows_its_names(installed: dict[str, str], tmp_path: Path) -> None:
    out = run("-m", "polopt", "list", env=installed, folder=tmp_path)
    assert "slow_momentum" in out
    assert "huber_a2c" in out


# ---- module:Class -----------------------------------------------------------------------------

OPTIMIZER, POLICY = "polopt.optimizers.sync_samples:SyncSamples", "polopt.policies.a2c:A2CPolicy"


def test_module_and_class_name_a_plugin() -> None:
    given: dict[str, Any] = {"env": "CartPole-v1", "policy": {"name": POLICY, "lr": 0.5}}
    experiment = Experiment.parse({**given, "optimizer": OPTIMIZER, "train_batch_size": 9}, {})
    assert (experiment.optimizer_name, experiment.policy_name) == ("sync_samples", "a2c")
    assert experiment.policy.lr == 0.5
    assert experiment.to_dict()["optimizer"]["train_batch_size"] == 9  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Class", "No module named 'no_such_module'. Allowed: 'module:Class' of a"),
        ("polopt.policies.a2c:Nothing", "has no attribute 'Nothing'"),
        ("polopt.policies.a2c:A2CConfig", "Allowed: a subclass of polopt.policies.policy:Policy"),
        (":x", "Allowed: 'module:Class'"),
    ],
)
def test_what_is_no_policy_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"env": "CartPole-v1", "policy": name}, {})
    assert said in str(caught.value)


def test_checkpoint_cannot_name_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """polopt does not import a module that a checkpoint names."""
    import polopt

    trainer = polopt.A2C(env="CartPole-v1", num_workers=0)
    trainer.save(str(tmp_path / "whole"))
    trainer.stop()
    for plugin in ("optimizer", "policy"):
        state = read_checkpoint(tmp_path / "whole")
        state["config"][plugin]["name"] = "imported_by_a_checkpoint:Class"
        write_checkpoint(tmp_path / plugin, state)
        with pytest.raises(CheckpointError, match=f"field 'config/{plugin}/name'"):
            read_trainer_state(tmp_path / plugin)
    with pytest.raises((CheckpointError, ConfigError)):
        load(tmp_path / "policy")
    assert "imported_by_a_checkpoint" not in sys.modules
