"""Every optimizer that learns from samples trains a policy with memory and normalisation. The
learner uses the states and moments with which the workers acted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.ppo import PPOPolicy
from polopt.trainers.trainer import PolicyOptimizerTrainer


class ActsAsLearned(PPOPolicy):
    """A policy that raises an error unless the learner computes the same parameters of the action
    distribution as the worker that acted."""

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        assert batch.per_env["obs_mean"].shape == batch.all_obs.shape[1:]
        assert batch.per_env["state"].shape == (batch.shape[1], self.state_size)
        if (batch.versions == self.version).all():
            params = self.dist_inputs(batch)
            np.testing.assert_allclose(params, batch["action_dist_inputs"], rtol=1e-4, atol=1e-5)
        return super().prepare_batch(batch)


FROM_SAMPLES = [
    name for name in OPTIMIZERS.names() if OPTIMIZERS.get(name).learns_from is SampleBatch
]


#: The usual tests have one optimizer for each place of learning: in the worker that sampled, in the
#: driver, and in each rank.
USUAL = {"async_gradients", "async_samples", "decentralized_allreduce"}


@pytest.mark.parametrize(
    ("name", "below"),
    [
        *(pytest.param(n, 0, marks=[] if n in USUAL else pytest.mark.slow) for n in FROM_SAMPLES),
        ("async_gradients", 1),
    ],
)
def test_learner_has_the_states_and_moments_of_workers(
    ray_session: None, name: str, below: int
) -> None:
    config: dict[str, Any] = {
        "optimizer": name,
        "policy": ActsAsLearned,
        "model": {"use_lstm": True, "lstm_cell_size": 6, "fcnet_hiddens": [8]},
        "normalize_observations": True,
        "normalize_rewards": True,
        "env": "Pendulum-v1",
        "num_workers": 2,
        "num_workers_below": below,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 10,
        "num_sgd_iter": 2,
        "sgd_minibatch_size": 10,
        "min_sample_timesteps_per_iteration": 40,
        "seed": 0,
    }
    trainer = PolicyOptimizerTrainer(config)
    try:
        trainer.train()
        trainer.train()
        weights = trainer.get_policy().get_weights()
        sampled = trainer.optimizer.metrics.num_env_steps_sampled
    finally:
        trainer.stop()
    assert weights.moments is not None
    assert weights.moments.rows == sampled >= 80
    assert weights.version > 0
    assert np.isfinite(weights.flat).all()
    # The observation of a pendulum is the cosine and sine of the angle, and the angular velocity.
    assert np.all(np.abs(weights.moments.mean[:2]) <= 1.0)
    assert weights.moments.variance[2] > weights.moments.variance[0]
