"""Environments with infos of each kind, and histories of vectors of environments."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from toy_envs import Drift

from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig

NUM_ENVS = 4


class InfoDrift(Drift):
    """An environment with infos of each kind that vectors batch. Its rewards, `terminated` and
    `truncated` are NumPy values, and its observations have a wider dtype than its space."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {}
        if self.np_random.random() < 0.3:
            info = {"number": reward, "array": obs * 2, "deep": {"word": "so", "count": 3}}
        return obs.astype(np.float64), np.float32(reward), np.bool_(terminated), truncated, info

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, {"positive": True} if obs[0] > 0.0 else {}


class WithoutInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that drops infos and casts arrays to the dtype of their space, like
    `FaultTolerantEnv`."""

    def step(self, action: Any) -> Any:
        observation, *others, _ = super().step(action)
        if isinstance(self.observation_space, spaces.Box):
            observation = observation.astype(self.observation_space.dtype)
        return observation, *others, {}

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {}


def history(env: Any, steps: int = 60) -> list[Any]:
    """Returns copies of the results of `steps` steps. After half of the steps, two environments are
    reset."""
    env.action_space.seed(5)
    results = [deepcopy(env.reset(seed=[10, 11, 12, 13]))]
    for t in range(steps):
        if t == steps // 2:
            mask = np.array([True, False, True, False])
            results.append(deepcopy(env.reset(options={"reset_mask": mask})))
        result = env.step(env.action_space.sample())
        results.append(deepcopy(result))
        if env.autoreset_mode == AutoresetMode.DISABLED and (ended := result[2] | result[3]).any():
            results.append(deepcopy(env.reset(options={"reset_mask": ended})))
    env.close()
    return results


def assert_same(one: Any, other: Any) -> None:
    """Checks that values, types, dtypes, keys and the order of keys are equal."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == object:
            assert_same(one.tolist(), other.tolist())
        else:
            np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def made(creator: Any, mode: str, fast: bool = True, **options: Any) -> VectorEnv[Any, Any, Any]:
    options = {"env": creator, "autoreset_mode": mode, "num_envs_per_worker": NUM_ENVS, **options}
    return make_vector_env(creator, RolloutConfig.parse(options), fast=fast)
