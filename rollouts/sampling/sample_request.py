"""How a fragment is sampled: `SampleRequest`, and `action_chooser`, which chooses its actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from polopt.policies.acting_policy import ActingPolicy

#: How actions are chosen from the policy's distribution. Names of TorchRL's ExplorationType.
#: `random` samples, `mode` and `deterministic` use the most likely action, `mean` the mean.
Exploration = Literal["random", "mode", "mean", "deterministic"]


class SampleRequest(NamedTuple):
    """Request for one fragment.

    Attributes:
        steps: T. None: `rollout_fragment_length` of the worker's config.
        frames: environment steps to sample at least: rows lost to next-step resets are made up
            for with further steps. None: T steps, without a minimum.
        exploration: see `Exploration`.
        uniform: actions are uniform over the action space, or over what a mask allows. The policy
            is not used.
        reset_first: all environments begin new episodes.
    """

    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False


#: `(t, observations [N, ...], memory [N, S]) -> (distribution parameters [N, P], actions [N, ...],
#: memory [N, S])`.
ActionChooser = Callable[[int, np.ndarray, np.ndarray], tuple[Any, np.ndarray, np.ndarray]]


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
        explore: see `Exploration`. True is `random`, False is `mode`.
        uniform: ignore the policy. Actions are uniform over the action space, or over what a mask
            allows.
        shape: T and N.
    """
    dist = policy.dist
    mask = policy.mask
    uniform = uniform or (explore in (True, "random") and policy.samples_uniformly)
    if uniform and mask is not None:
        return lambda t, obs, state: (*dist.random_allowed(rng, mask.masked(0.0, obs)), state)
    if uniform:
        drawn = dist.random(rng, *shape)
        return lambda t, obs, state: (0.0, drawn[t], state)
    if explore == "mean":

        def mean_action(
            t: int, obs: np.ndarray, state: np.ndarray
        ) -> tuple[Any, np.ndarray, np.ndarray]:
            params, state = policy.act(obs, state)
            return params, dist.mean(params), state

        return mean_action
    noise = dist.draw_noise(rng, *shape) if explore in (True, "random") else None

    def action(t: int, obs: np.ndarray, state: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        params, state = policy.act(obs, state)
        return params, dist.sample(params, None if noise is None else noise[t]), state

    return action
