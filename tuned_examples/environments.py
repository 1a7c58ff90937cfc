"""Environments of the tuned examples that are not Gymnasium's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.wrappers import TransformObservation


def stateless_cartpole(config: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """CartPole-v1 without velocities: observations are the positions of cart and pole. A policy
    without memory balances it for some 40 steps. The task is RLlib's `StatelessCartPole` and RL
    Zoo's `CartPoleNoVel-v1`.

    Args:
        config: not read.
    """
    env = gymnasium.make("CartPole-v1")
    whole: Any = env.observation_space
    kept = [0, 2]
    positions = gymnasium.spaces.Box(whole.low[kept], whole.high[kept], dtype=whole.dtype)
    return TransformObservation(env, lambda obs: obs[kept], positions)
