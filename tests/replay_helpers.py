"""Policies that learn from transitions, and transitions for these policies."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.transitions import Transitions
from polopt.policies.policy_registry import POLICIES

BOX = spaces.Box(-1.0, 1.0, (3,))


def replay_policy(
    name: str,
    observation_space: Space[Any] = BOX,
    action_space: Space[Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Makes a policy with a small network. By default, the action space is Discrete(3) for `dqn`,
    and a Box of two numbers for other policies."""
    options = {"model": {"fcnet_hiddens": [8]}, **options}
    if action_space is None:
        box = spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 1.0]))
        action_space = spaces.Discrete(3) if name == "dqn" else box
    cls = POLICIES.get(name)
    return cls(observation_space, action_space, cls.config_class.parse(options), seed=seed)


def transitions(policy: Any, count: int = 16, seed: int = 0, **columns: Any) -> Transitions:
    """Makes random rows `[B, ...]` with different weights. The discount of every third row is 0, as
    if its episode was terminated. `columns` replaces columns."""
    rng = np.random.default_rng(seed)
    shape = (count, *policy.encoder.shape)
    discounts = np.where(np.arange(count) % 3 == 2, 0.0, 0.9).astype(np.float32)
    rows = Transitions(
        obs=rng.normal(size=shape).astype(policy.encoder.dtype),
        actions=policy.dist.random(rng, count),
        rewards=rng.normal(size=count).astype(np.float32),
        discounts=discounts,
        next_obs=rng.normal(size=shape).astype(policy.encoder.dtype),
        weights=rng.uniform(0.2, 1.0, count).astype(np.float32),
        indices=np.arange(count),
    )
    return rows._replace(**columns)


def shaken(policy: Any, seed: int = 1) -> Any:
    """Adds noise to all parameters, so that target networks differ from the networks that they
    copy."""
    rng = np.random.default_rng(seed)
    flat = policy.flat.get_params()
    policy.flat.set_params(flat + rng.normal(0.0, 0.2, flat.shape).astype(np.float32))
    return policy
