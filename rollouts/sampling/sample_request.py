"""`SampleRequest` says how a fragment is sampled. `action_chooser` makes the function that chooses
the actions of the fragment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from polopt.policies.acting_policy import ActingPolicy

#: How actions are chosen from the policy's distribution, with the names of TorchRL's
#: `ExplorationType`. `random` samples an action. `mode` and `deterministic` choose the most likely
#: action. `mean` chooses the mean of the distribution, which categorical actions do not have.
Exploration = Literal["random", "mode", "mean", "deterministic"]


class SampleRequest(NamedTuple):
    """A request for one fragment.

    Attributes:
        steps: the number T of steps. `None` means `rollout_fragment_length` of the worker's config.
        frames: the minimum number of environment steps in the fragment. In Gymnasium's autoreset
            mode next-step, a step that only resets an environment is not an environment step. So
            the fragment may need more than T steps. `None` means that the fragment has T steps,
            whatever the number of environment steps.
        exploration: see `Exploration`.
        uniform: whether to ignore the policy and draw uniform actions. See `VectorSampler.sample`.
        reset_first: whether all environments begin new episodes first.
    """

    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False


#: A function `(t, observations [N, ...], memory [N, S]) -> (distribution parameters [N, P],
#: actions [N, ...], memory [N, S])`.
ActionChooser = Callable[[int, np.ndarray, np.ndarray], tuple[Any, np.ndarray, np.ndarray]]


def action_chooser(
    policy: ActingPolicy,
    rng: np.random.Generator,
    explore: bool | Exploration,
    uniform: bool,
    shape: tuple[int, int],
) -> ActionChooser:
    """Returns a function that chooses the actions of one fragment.

    Where possible, all random numbers of the fragment are drawn at once, because one call per
    fragment is faster than one call per step.

    Args:
        policy: the policy that computes the parameters of the action distribution.
        rng: the generator of the action noise.
        explore: see `Exploration`. True means `random`, and False means `mode`.
        uniform: whether to ignore the policy and draw uniform actions. See `VectorSampler.sample`.
        shape: `(T, N)`, the shape of the fragment.
    """
    dist = policy.dist
    mask = policy.mask
    uniform = uniform or (explore in (True, "random") and policy.samples_uniformly)
    if uniform and mask is not None:
        return lambda t, obs, state: (
            *dist.random_allowed(rng, mask.masked(0.0, policy.encoder.encode(obs))),
            state,
        )
    if uniform:
        drawn = dist.random(rng, *shape)
        return lambda t, obs, state: (0.0, drawn[t], state)
    if explore == "mean":

        def mean_action(
            t: int, obs: np.ndarray, state: np.ndarray
        ) -> tuple[Any, np.ndarray, np.ndarray]:
            params, state = policy.act(policy.to_act_on(obs), state)
            return params, dist.mean(params), state

        return mean_action
    noise = dist.draw_noise(rng, *shape) if explore in (True, "random") else None

    def action(t: int, obs: np.ndarray, state: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        params, state = policy.act(policy.to_act_on(obs), state)
        return params, dist.sample(params, None if noise is None else noise[t]), state

    return action
