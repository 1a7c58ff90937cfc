"""`make_distribution`: selects and makes the distribution for an action space."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.categorical import Categorical, MultiCategorical
from polopt.policies.distributions.gaussians import DiagGaussian, SquashedGaussian

SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, Box"


def make_distribution(
    space: Space[Any],
    squash_actions: bool = False,
    normalize_actions: bool = False,
    clip_actions: bool = True,
) -> ActionDistribution:
    """Makes the distribution for an action space.

    Args:
        space: action space of one environment.
        squash_actions: whether to squash Box actions with tanh instead of clipping them.
        normalize_actions: whether to map Box actions from [-1, 1] to the bounds. See
            `DiagGaussian`.
        clip_actions: whether to clip Box actions that are not mapped. See `DiagGaussian`.

    Raises:
        ConfigError: the space is not one of `SUPPORTED_ACTIONS`, is empty, or is a Box of integers.
            Also raised if `squash_actions` is True and the Box is not bounded.
    """
    if space.shape is not None and 0 in space.shape:
        raise ConfigError(f"action space {space} is empty. Allowed: at least one action dimension")
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if squash_actions:
            return SquashedGaussian(space)
        return DiagGaussian(space, normalize_actions, clip_actions)
    raise ConfigError(
        f"action space {space} is not supported. Allowed: {SUPPORTED_ACTIONS} (of floats)"
    )
