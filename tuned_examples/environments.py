"""Environments of the tuned examples that Gymnasium does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.wrappers import TransformObservation


def stateless_cartpole(config: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Makes CartPole-v1 without velocities: observations are the positions of cart and pole.

    A policy without memory balances the pole for about 40 steps. RLlib has this task as
    `StatelessCartPole`, and RL Zoo has it as `CartPoleNoVel-v1`.

    Args:
        config: not used.
    """
    env = gymnasium.make("CartPole-v1")
    whole: Any = env.observation_space
    kept = [0, 2]
    positions = gymnasium.spaces.Box(whole.low[kept], whole.high[kept], dtype=whole.dtype)
    return TransformObservation(env, lambda obs: obs[kept], positions)
