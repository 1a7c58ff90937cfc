"""`split_trajectories` of batches of policies with memory and normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import AUTORESET, Drift, make_policy, make_sampler, sync_clocks

from polopt.collectors.trajectories import split_trajectories

MEMORY = {"use_lstm": True, "lstm_cell_size": 5, "fcnet_hiddens": [6]}


@pytest.mark.parametrize("mode", AUTORESET)
@pytest.mark.parametrize("options", [{"model": MEMORY}, {"normalize_observations": True}])
def test_trajectories_keep_what_the_policy_saw(mode: str, options: dict[str, Any]) -> None:
    env = sync_clocks([3, 4, 7], "truncated", mode)
    if "normalize_observations" in options:
        env = SyncVectorEnv([Drift] * 3, autoreset_mode=AutoresetMode[mode.upper()])
    policy: Any = make_policy("a2c", env, **options)
    sampler = make_sampler(env, policy, 11)
    sampler.sample()
    batch = sampler.sample()
    sampler.close()
    parts = split_trajectories(batch)
    assert len(parts) > 3
    for part in parts:
        params = policy.dist_inputs(part)[part["valid"]]
        acted = part["action_dist_inputs"][part["valid"]]
        np.testing.assert_allclose(params, acted, rtol=1e-5, atol=1e-6)
