"""`ActionDistribution`: sampling in NumPy. Log-probability, entropy and KL in torch.

Acting creates no `torch.distributions` objects and draws no random numbers per step: the noise of a
whole fragment is drawn at once, and an action is a function of parameters and noise. Without noise
it is the mode.

A batch stores actions as they were sampled, because log-probabilities are computed from these.
`to_env` converts them to the environment's action space (offset, mapping to the bounds, squashing,
clipping, shape and dtype).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from polopt.common.config import ConfigError
from polopt.metrics.actions import ActionStats


class ActionDistribution(ABC):
    """A family of distributions over one action space.

    Attributes:
        num_params: P, number of parameters for one observation.
        action_shape: shape of one action as stored in a batch.
        action_dtype: its dtype.
        sizes: number of categories of each categorical action, which batches count from 0. Empty:
            actions are real numbers.
        bounds: the smallest and the largest stored action, `[A]` each, that `to_env` does not clip.
            None: it clips nothing.
    """

    num_params: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]
    sizes: Sequence[int] = ()
    bounds: tuple[np.ndarray, np.ndarray] | None = None

    def new_stats(self) -> ActionStats:
        """Empty statistics of actions of this distribution."""
        return ActionStats(self.sizes, math.prod(self.action_shape))

    @abstractmethod
    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Noise for `leading` actions: `[*leading, noise size]` float32."""

    @abstractmethod
    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions `[N, *action_shape]` from `params` `[N, P]`. The mode if `noise` is None."""

    @abstractmethod
    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """`[*leading, *action_shape]`: uniform over the action space."""

    def random_allowed(
        self, rng: np.random.Generator, logits: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray]:
        """Uniform over the actions that a mask allows. For categories.

        Args:
            rng: source of random numbers.
            logits: `[N, sum of sizes]`, of that distribution.

        Returns:
            parameters `[N, P]` of it, or 0 if the distribution has none, and actions `[N,
            *action_shape]`.
        """
        return logits, self.sample(logits, self.draw_noise(rng, len(logits)))

    def mean(self, params: np.ndarray) -> np.ndarray:
        """Actions `[N, *action_shape]` at the mean of the distribution.

        Raises:
            ConfigError: for categorical actions, which have no mean.
        """
        raise ConfigError(
            f"exploration 'mean' of {type(self).__name__} actions: categories have no mean; "
            "allowed: 'random', 'mode' or 'deterministic'"
        )

    @abstractmethod
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """`[N, *shape of the action space]` for the environment."""

    def mode_for_env(self, params: Tensor) -> Tensor:
        """As `to_env(sample(params, None))`, in torch, for the export of policies.

        Args:
            params: `[N, P]`.

        Raises:
            ConfigError: the distribution does not have it.
        """
        raise ConfigError(f"{type(self).__name__} actions cannot be exported: no mode_for_env")

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """`[B]` log-probability (density for Box) of `actions` `[B, *action_shape]`."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """`[B]` entropy in nats."""

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """`[B]` KL(old || new) in nats."""


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise: `argmax(logits + noise)` is distributed as softmax(logits)."""
    uniform = rng.random(shape, dtype=np.float32)
    # float32 uniforms can be exactly 0, whose logarithm is -inf.
    np.maximum(uniform, np.float32(1e-20), out=uniform)
    return -np.log(-np.log(uniform))
