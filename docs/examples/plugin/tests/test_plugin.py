"""Tests of the plugin. Its author runs them with `pytest docs/examples/plugin`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polopt

OPTIONS: dict[str, Any] = {
    "env": "CartPole-v1",
    "optimizer": "slow_momentum",
    "policy": "huber_a2c",
    "num_workers": 0,
    "min_sample_timesteps_per_iteration": 0,
    "seed": 1,
}


def test_config_selects_both_by_name(tmp_path: Path) -> None:
    trainer = polopt.PolicyOptimizerTrainer(OPTIONS, local_rounds=3, huber_delta=0.5)
    result = trainer.train()
    assert result["optimizer"]["name"] == "slow_momentum"
    assert trainer.get_policy().config.huber_delta == 0.5
    assert result["optimizer"]["num_updates"] == 3
    assert (
        400 < result["num_env_steps_sampled_lifetime"] <= 3 * 8 * 20
    )  # rows that only reset are not counted
    trainer.save(str(tmp_path / "checkpoint"))
    weights = trainer.get_policy().get_weights().flat
    trainer.stop()
    policy = polopt.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(policy.get_weights().flat, weights)


def test_momentum_goes_on_in_the_direction_of_the_last_move() -> None:
    """The first move is the move of the only worker. The second move adds half of the first."""
    trainer = polopt.PolicyOptimizerTrainer(OPTIONS, slow_momentum=0.5)
    optimizer = trainer.optimizer
    start = optimizer.policy.get_weights().flat
    optimizer.step()
    first = optimizer.policy.get_weights().flat - start
    weights = optimizer.policy.get_weights()
    optimizer._average(weights.flat, [weights])  # a worker whose weights have not changed
    second = optimizer.policy.get_weights().flat - start - first
    trainer.stop()
    assert np.abs(first).max() > 0.0
    np.testing.assert_allclose(second, 0.5 * first, rtol=1e-4, atol=1e-7)


def test_wrong_option_is_named() -> None:
    with pytest.raises(polopt.ConfigError, match=r"key 'slow_momentum': got 1\.5"):
        polopt.PolicyOptimizerTrainer(OPTIONS, slow_momentum=1.5)
