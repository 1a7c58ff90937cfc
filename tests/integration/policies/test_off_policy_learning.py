"""Policies for stale samples learn CartPole from synchronous and from asynchronous samples."""

from __future__ import annotations

from typing import Any

import pytest
from learning import train_cartpole

OPTIONS: dict[str, dict[str, Any]] = {
    "impala": {"num_sgd_iter": 2, "sgd_minibatch_size": 64, "rollout_fragment_length": 32},
    "appo": {"num_sgd_iter": 2, "sgd_minibatch_size": 64, "rollout_fragment_length": 32},
    "decoupled_ppo": {"num_sgd_iter": 4, "sgd_minibatch_size": 128, "lr": 1e-3},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["sync_samples", "async_samples"])
@pytest.mark.parametrize("policy", OPTIONS)
def test_cartpole_is_learned_by(policy: str, optimizer: str, ray_session: None) -> None:
    options = {"policy": policy, "optimizer": optimizer, **OPTIONS[policy]}
    assert train_cartpole(options) >= 400.0


@pytest.mark.parametrize("policy", OPTIONS)
def test_gradients_of_workers_train(policy: str, ray_session: None) -> None:
    from polopt.trainers.trainer import PolicyOptimizerTrainer

    trainer = PolicyOptimizerTrainer(
        {
            "env": "CartPole-v1",
            "policy": policy,
            "optimizer": "async_gradients",
            "num_workers": 2,
            "num_cpus_per_worker": 0.5,
            "min_sample_timesteps_per_iteration": 500,
            **OPTIONS[policy],
        }
    )
    result = trainer.train()
    trainer.stop()
    learner = result["learners"]["default_policy"]
    assert learner["grad_norm"] > 0.0
    assert result["optimizer"]["num_updates"] > 0
