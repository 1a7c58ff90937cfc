"""Every optimizer trains a policy with memory, whose state comes from its workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.registry import OPTIMIZERS
from polopt.policies.ppo import PPOPolicy
from polopt.trainers.trainer import PolicyOptimizerTrainer

MODEL = {"use_lstm": True, "lstm_cell_size": 6, "fcnet_hiddens": [8]}


class ActsAsLearned(PPOPolicy):
    """Fails if what the learner computes of a batch is not what the worker acted with."""

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        assert batch.per_env["state"].shape == (batch.shape[1], self.state_size)
        if (batch.versions == self.version).all():
            params = self.dist_inputs(batch)
            np.testing.assert_allclose(params, batch["action_dist_inputs"], rtol=1e-4, atol=1e-5)
        return super().prepare_batch(batch)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_optimizer_trains_memory(ray_session: None, name: str) -> None:
    config: dict[str, Any] = {
        "optimizer": name,
        "policy": ActsAsLearned,
        "model": MODEL,
        "env": "CartPole-v1",
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 10,
        "num_sgd_iter": 2,
        "sgd_minibatch_size": 10,
        "min_sample_timesteps_per_iteration": 40,
        "seed": 0,
    }
    trainer = PolicyOptimizerTrainer(config)
    try:
        before = trainer.get_policy().get_weights().flat.copy()
        first, last = trainer.train(), trainer.train()
        after = trainer.get_policy().get_weights().flat
    finally:
        trainer.stop()
    assert last["num_env_steps_trained_lifetime"] > first["num_env_steps_trained_lifetime"] > 0
    assert np.isfinite(after).all()
    assert not np.array_equal(before, after)
