"""Optimizers and policies of third parties: registered by a call, or by entry points of an
installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from installed_plugin import install_plugin, with_plugin

from polopt import A3C, PolicyOptimizerTrainer, register_optimizer, register_policy
from polopt.common.config import ConfigError
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_registry import POLICIES

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
    return install_plugin(tmp_path_factory.mktemp("plugin"))


def test_installed_plugin_trains(installed: Path, tmp_path: Path) -> None:
    done = with_plugin(installed, "-c", TRAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")


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
