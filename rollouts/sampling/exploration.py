"""`action_chooser`: how actions follow from observations within one fragment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polopt.policies.acting import ActingPolicy
from polopt.rollouts.sampling.sample_request import Exploration

#: `(t, observations [N, ...]) -> (distribution parameters [N, P], actions [N, ...])`.
ActionChooser = Callable[[int, np.ndarray], tuple[Any, np.ndarray]]


def action_chooser(
    policy: ActingPolicy,
    rng: np.random.Generator,
    explore: bool | Exploration,
    uniform: bool,
    shape: tuple[int, int],
) -> ActionChooser:
    """A function that chooses the actions of one fragment. Draws all random numbers of the fragment
    at once: one call per fragment is cheaper than one per step.

    Args:
        policy: computes the parameters of the action distribution.
        rng: generator of the action noise.
        explore: see `Exploration`; True is `random`, False is `mode`.
        uniform: ignore the policy; actions are uniform over the action space, with parameters 0.
        shape: T and N.
    """
    dist = policy.dist
    if uniform:
        drawn = dist.random(rng, *shape)
        return lambda t, obs: (0.0, drawn[t])
    if explore == "mean":

        def mean_action(t: int, obs: np.ndarray) -> tuple[Any, np.ndarray]:
            params = policy.action_params(obs)
            return params, dist.mean(params)

        return mean_action
    noise = dist.draw_noise(rng, *shape) if explore in (True, "random") else None

    def action(t: int, obs: np.ndarray) -> tuple[Any, np.ndarray]:
        params = policy.action_params(obs)
        return params, dist.sample(params, None if noise is None else noise[t])

    return action
