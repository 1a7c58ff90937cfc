"""A notebook shows a trainer, a policy, a batch and a Collector as one short line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

import polopt
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.trainer import PolicyOptimizerTrainer

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}


def test_reprs_of_trainer_and_policy_show_kind_and_progress() -> None:
    trainer = polopt.SyncPPO(SMALL)
    what = "CartPole-v1, sync_samples, ppo, 0 workers"
    assert repr(trainer) == f"SyncPPO({what}, iteration 0, 0 env steps)"
    steps = trainer.train()["num_env_steps_sampled_lifetime"]
    assert repr(trainer) == f"SyncPPO({what}, iteration 1, {steps} env steps)"
    policy = trainer.get_policy()
    assert policy.version > 0
    said = f"PPOPolicy(Box(4,) -> Discrete(2), 107 parameters, version {policy.version}, cpu, "
    assert repr(policy) == f"{said}learns with {policy.learns_with})"
    assert trainer.optimizer.stats()["learns_with"] == policy.learns_with
    assert repr(trainer.workers) == "WorkerSet(0 of 0 remote workers up)"
    trainer.stop()
    assert repr(trainer) == f"SyncPPO({what}, stopped)"


def test_repr_of_a_trainer_in_a_trial_is_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prints this text before each line of the trial's output."""
    trainer = PolicyOptimizerTrainer({**SMALL, "policy": "a2c"})
    monkeypatch.setattr(trainer, "_storage_of_trial", object())
    assert repr(trainer) == "PolicyOptimizerTrainer"
    monkeypatch.undo()
    trainer.stop()


def test_loaded_policy_says_its_device_and_version(tmp_path: Path) -> None:
    trainer = polopt.A2C(SMALL)
    trainer.save(str(tmp_path))
    trainer.stop()
    assert repr(polopt.load(tmp_path)).endswith(
        "107 parameters, version 0, cpu, learns with NumPy)"
    )


def test_batch_shows_shapes_and_no_numbers() -> None:
    collector = polopt.Collector(
        "CartPole-v1", ("a2c", {}), num_collectors=0, num_envs=2, frames_per_batch=16, seed=1
    )
    assert repr(collector) == "Collector(WorkerSet(0 of 0 remote workers up), 0 frames)"
    batch = next(collector)
    said = repr(batch)
    assert said.startswith(
        f"SampleBatch(T=8, N=2, env_steps={batch.env_steps}, version=0, obs=float32[8, 2, 4], "
    )
    assert all(f"{name}={column.dtype}[8, 2" in said for name, column in batch.columns.items())
    assert "\n" not in said
    assert repr(collector).endswith("up), 16 frames)")
    collector.shutdown()


def test_long_space_is_cut() -> None:
    observations = spaces.Dict({f"part {i}": spaces.Box(0.0, 1.0, (3,)) for i in range(9)})
    cls = POLICIES.get("a2c")
    policy = cls(observations, spaces.MultiDiscrete([3, 2]), cls.config_class())
    assert len(repr(policy)) < 250
    assert "MultiDiscrete([3 2])" in repr(policy)
