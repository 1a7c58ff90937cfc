"""Distributions of policies that do not learn, for computed actions and for random actions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.make_distribution import make_distribution


class PassThroughActions(ActionDistribution):
    """A distribution whose parameters are the actions themselves, in the format of the action
    space.

    The parameters are float32, which represents integers up to 2^24 exactly. `to_env` clips Box
    actions to the bounds.

    Args:
        space: action space of one environment.

    Raises:
        ConfigError: `make_distribution` does not support the space.
    """

    def __init__(self, space: Space[Any]) -> None:
        make_distribution(space)  # raises ConfigError for unsupported spaces
        self.space = space
        self.action_shape = tuple(space.shape or ())
        self.action_dtype = np.dtype(space.dtype)
        self.num_params = int(np.prod(self.action_shape))
        if isinstance(space, spaces.Box):
            self.bounds = space.low.reshape(-1), space.high.reshape(-1)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return np.zeros((*leading, 0), dtype=np.float32)

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        return params.reshape(-1, *self.action_shape).astype(self.action_dtype)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        if isinstance(self.space, spaces.Box):
            return np.clip(actions, self.space.low, self.space.high)
        return actions

    def mean(self, params: np.ndarray) -> np.ndarray:
        return self.sample(params, None)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Draws actions uniformly from the action space. In dimensions without two finite bounds,
        draws from a standard normal distribution."""
        shape = (*leading, *self.action_shape)
        if isinstance(self.space, spaces.Discrete):
            return rng.integers(self.space.n, size=shape) + self.space.start
        if isinstance(self.space, spaces.MultiDiscrete):
            return rng.integers(self.space.nvec, size=shape) + self.space.start
        dist = make_distribution(self.space)
        flat = dist.random(rng, *leading)
        return flat.reshape(shape).astype(self.action_dtype)

    def random_allowed(
        self, rng: np.random.Generator, logits: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray]:
        dist = make_distribution(self.space)
        return 0.0, dist.to_env(dist.random_allowed(rng, logits)[1])

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Zeros `[B]`, because the distribution has only one action."""
        return torch.zeros(len(params))

    def entropy(self, params: Tensor) -> Tensor:
        """Zeros `[B]`."""
        return torch.zeros(len(params))

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Zeros `[B]`."""
        return torch.zeros(len(old))


class UniformActions(PassThroughActions):
    """Actions that do not depend on the observation. `random` draws them, so they are uniform
    except in dimensions without two finite bounds. The noise is the action. Without noise, `sample`
    raises ValueError."""

    def __init__(self, space: Space[Any]) -> None:
        super().__init__(space)
        self.num_params = 0
        self._log_size = _log_size(space)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return self.random(rng, *leading)

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        if noise is None:
            raise ValueError("uniform actions have no mode and no mean. Sample them instead")
        return noise

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Minus the logarithm of the number of actions, or of the volume of the box, `[B]`. NaN if
        the box is not bounded."""
        return torch.full((len(actions),), -self._log_size)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.full((len(params),), self._log_size)


def _log_size(space: Space[Any]) -> float:
    if isinstance(space, spaces.Discrete):
        return math.log(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return float(np.log(space.nvec).sum())
    assert isinstance(space, spaces.Box)
    bounded = space.bounded_below & space.bounded_above
    # An unbounded dimension does not have a uniform density.
    return float(np.log((space.high - space.low)[bounded]).sum()) if bounded.all() else math.nan
