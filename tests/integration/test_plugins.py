"""Optimizers and policies of third parties: registered by a call, or by entry points of an
installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polopt import A3C, PolicyOptimizerTrainer, register_optimizer, register_policy
from polopt.common.config import ConfigError
from polopt.dashboards.data.tab import OptimizerTab
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_registry import POLICIES

CLI = "polopt.command_line.cli"
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "thirdparty"
version = "1"

[project.entry-points."polopt.policies"]
scaled_policy = "thirdparty:ScaledPolicy"

[project.entry-points."polopt.optimizers"]
repeated_samples = "thirdparty:RepeatedSamples"
broken = "no_such_module:Broken"
"""

MODULE = '''
"""A policy and an optimizer of a third party."""

import polopt
import pydantic
from polopt.optimizers.sync_samples import SyncSamples, SyncSamplesConfig
from polopt.policies.a2c import A2CConfig, A2CPolicy


class ScaledConfig(A2CConfig):
    loss_scale: float = pydantic.Field(2.0, gt=0.0)


class ScaledPolicy(A2CPolicy):
    """A2C with a scaled loss."""

    config_class = ScaledConfig

    def loss(self, rows):
        loss, stats = super().loss(rows)
        return self.config.loss_scale * loss, stats


class RepeatedSamplesConfig(SyncSamplesConfig):
    rounds: int = pydantic.Field(1, ge=1)


class RepeatedSamples(SyncSamples):
    """Reports the number of its rounds."""

    name = "repeated_samples"
    config_class = RepeatedSamplesConfig
    tab = polopt.Tab(
        "How busy the driver is.",
        (polopt.Plot("lag", "Lag", "A help.", "updates", {"mean": "optimizer/policy_lag/mean"}),),
    )

    def step(self):
        for _ in range(self.config.rounds):
            result = super().step()
        return result

    def extra_stats(self):
        return {**super().extra_stats(), "rounds": self.config.rounds}
'''

TRAIN = """
from polopt import PolicyOptimizerTrainer
from polopt.trainers.checkpoints import read_checkpoint

trainer = PolicyOptimizerTrainer({
    "env": "CartPole-v1", "num_workers": 1, "num_envs_per_worker": 2, "seed": 1,
    "policy": "scaled_policy", "loss_scale": 3,
    "optimizer": {"name": "repeated_samples", "rounds": 2},
    "min_sample_timesteps_per_iteration": 1,
})
result = trainer.train()
assert result["optimizer"]["name"] == "repeated_samples", result["optimizer"]
assert result["optimizer"]["rounds"] == 2
assert result["optimizer"]["num_updates"] == 2
assert type(trainer.get_policy()).__module__ == "thirdparty"
trainer.save("checkpoint")
trainer.stop()
config = read_checkpoint("checkpoint")["config"]
assert config["policy"]["name"] == "scaled_policy" and config["policy"]["loss_scale"] == 3
print("trained")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the package with pip in a directory outside of the virtual environment. Returns this
    directory."""
    source = tmp_path_factory.mktemp("source")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "thirdparty.py").write_text(MODULE)
    target = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-build-isolation", "--no-deps", "--target", target, source],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def with_plugin(installed: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_installed_plugin_trains(installed: Path, tmp_path: Path) -> None:
    done = with_plugin(installed, "-c", TRAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")
    # Without the plugin, evaluation fails with an error that names the plugin.
    evaluate = ["-m", CLI, "evaluate", "checkpoint", "--episodes", "1"]
    without = subprocess.run(
        [sys.executable, *evaluate], cwd=tmp_path, capture_output=True, text=True
    )
    assert without.returncode == 2
    assert "key 'policy': got 'scaled_policy'" in without.stderr
    assert with_plugin(installed, *evaluate, cwd=tmp_path).returncode == 0


def test_tab_of_a_plugin_is_written_beside_its_results(installed: Path, tmp_path: Path) -> None:
    changes = [
        *("env=CartPole-v1", "num_workers=0", "optimizer=repeated_samples", "rounds=2"),
        *("stop.training_iteration=2", "min_sample_timesteps_per_iteration=1"),
        *("--results-dir", str(tmp_path)),
    ]
    train = ["-m", CLI, "train", "PolicyOptimizerTrainer", *changes]
    done = with_plugin(installed, *train, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("optimizer.json")
    assert (file.parent / "result.json").exists()
    tab = OptimizerTab.from_json(file.read_text())
    assert (tab.name, tab.title) == ("repeated_samples", "RepeatedSamples")
    assert tab.phases == SyncSamples.phases
    assert "optimizer/rounds" in {number.key for number in tab.numbers}
    assert [plot.title for plot in tab.tab.plots] == ["Lag"]


def test_installed_plugin_is_listed(installed: Path, tmp_path: Path) -> None:
    done = with_plugin(installed, "-m", CLI, "list", cwd=tmp_path)
    assert "  scaled_policy  A2C with a scaled loss\n" in done.stdout
    assert "Reports the number of its rounds" in done.stdout


def test_broken_plugin_fails_only_where_it_is_named(installed: Path, tmp_path: Path) -> None:
    train = ["-m", CLI, "train", "PolicyOptimizerTrainer", "env=CartPole-v1"]
    done = with_plugin(installed, *train, "optimizer=broken", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such" in done.stderr
    assert done.stderr.count("\n") == 1
    done = with_plugin(installed, *train, "optimizer=unknown_name", cwd=tmp_path)
    assert "got 'unknown_name'" in done.stderr


class RegisteredPolicy(A2CPolicy):
    """A policy that is registered by a call."""


class RegisteredOptimizer(SyncSamples):
    """An optimizer that is registered by a call."""

    name = "registered_optimizer"


SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "min_sample_timesteps_per_iteration": 1,
}


def test_registered_by_call() -> None:
    register_policy("registered_policy", RegisteredPolicy)
    register_optimizer("registered_optimizer", RegisteredOptimizer)
    assert {"registered_policy"} <= set(POLICIES.names())
    assert {"registered_optimizer"} <= set(OPTIMIZERS.names())
    trainer = PolicyOptimizerTrainer(
        {**SMALL, "policy": "registered_policy", "optimizer": "registered_optimizer"}
    )
    assert trainer.train()["optimizer"]["name"] == "registered_optimizer"
    assert type(trainer.get_policy()) is RegisteredPolicy
    trainer.stop()


def test_classes_instead_of_names() -> None:
    trainer = PolicyOptimizerTrainer(
        {**SMALL, "policy": RegisteredPolicy, "optimizer": RegisteredOptimizer}
    )
    assert trainer.train()["optimizer"]["name"] == "registered_optimizer"
    trainer.stop()
    assert OPTIMIZERS.name_of(SyncSamples) == "sync_samples"


@pytest.mark.usefixtures("ray_session")
def test_class_of_the_script_reaches_workers() -> None:
    trainer = PolicyOptimizerTrainer(
        {**SMALL, "num_workers": 1, "policy": RegisteredPolicy, "optimizer": "async_gradients"}
    )
    assert trainer.train()["optimizer"]["num_updates"] > 0
    trainer.stop()


@pytest.mark.parametrize("register", [register_policy, register_optimizer])
@pytest.mark.parametrize("given", [int, "A2C", None, A3C])
def test_register_refuses_other_classes(register: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match="a subclass of polopt"):
        register("wrong", given)
    assert "wrong" not in [*POLICIES.names(), *OPTIMIZERS.names()]


def test_existing_name_is_refused_without_override() -> None:
    known = POLICIES.get("ppo")
    with pytest.raises(ConfigError, match=r"'ppo': the name belongs to .* or override=True"):
        register_policy("ppo", RegisteredPolicy)
    assert POLICIES.get("ppo") is known
    register_policy("ppo", RegisteredPolicy, override=True)
    assert POLICIES.get("ppo") is RegisteredPolicy
    register_policy("ppo", known, override=True)
    register_policy("ppo", known)  # the same class again is allowed
