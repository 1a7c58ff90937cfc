"""Functions to make workers and to compare batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_envs import (
    AUTORESET,
    Drift,
)

from polopt.common.sample_batch import SampleBatch
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

every_mode = pytest.mark.parametrize("mode", AUTORESET)


def assert_same(one: SampleBatch, other: SampleBatch) -> None:
    np.testing.assert_array_equal(one.all_obs, other.all_obs)
    np.testing.assert_array_equal(one.successor_index, other.successor_index)
    np.testing.assert_array_equal(one.successor_obs, other.successor_obs)
    np.testing.assert_array_equal(one.episodes.returns, other.episodes.returns)
    np.testing.assert_array_equal(one.episodes.lengths, other.episodes.lengths)
    assert one.columns.keys() == other.columns.keys()
    for name in one.columns:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def rollout(env: Any = Drift, **options: Any) -> RolloutConfig:
    options = {"num_envs_per_worker": 3, "rollout_fragment_length": 7, **options}
    return RolloutConfig.parse({"env": env, **options})


def worker(
    index: int = 1, seed: int = 0, restart_count: int = 0, env: Any = Drift, **options: Any
) -> RolloutWorker:
    config = rollout(env, **options)
    source = resolve_env(env)
    return RolloutWorker(
        WorkerConfig(
            config,
            source,
            A2CPolicy,
            A2CPolicy.config_class.parse({"model": {"fcnet_hiddens": [4]}}),
            *probe_env(source, config)[:2],
            seed=seed,
            restart_count=restart_count,
        ),
        index,
    )
