"""`ActionDistribution`: base class of distributions over actions.

A distribution samples in NumPy, and computes log-probability, entropy and KL in torch. For speed,
the sampler does not create `torch.distributions` objects. It draws the noise of a whole fragment at
once. An action is then a function of the parameters and the noise. Without noise, the action is the
mode.

A batch stores the actions before `to_env`, because log-probabilities are computed from these
actions. `to_env` converts actions to the action space of the environment: it applies the offset,
the mapping to the bounds, squashing, clipping, shape and dtype.
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
        action_shape: shape of one action in a batch.
        action_dtype: dtype of the actions in a batch.
        sizes: number of categories of each categorical action, if batches count categories from 0.
            Empty for other distributions.
        bounds: the lower and the upper bound, `[A]` each for A action dimensions. The bounds apply
            to actions as a batch stores them. `to_env` clips actions outside of the bounds, and
            statistics count these actions. `None` means that statistics count no actions as
            clipped.
    """

    num_params: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]
    sizes: Sequence[int] = ()
    bounds: tuple[np.ndarray, np.ndarray] | None = None

    def new_stats(self) -> ActionStats:
        """Makes an empty `ActionStats` for actions of this distribution."""
        return ActionStats(self.sizes, math.prod(self.action_shape))

    @abstractmethod
    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Draws the noise `[*leading, ...]` for an array of actions with the leading dimensions
        `leading`. The other dimensions depend on the distribution."""

    @abstractmethod
    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Computes actions `[N, *action_shape]` from `params` `[N, P]` and noise. If `noise` is
        None, the actions are the mode."""

    @abstractmethod
    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Draws actions `[*leading, *action_shape]` uniformly from the action space. In dimensions
        of a Box without two finite bounds, draws from a standard normal distribution."""

    def random_allowed(
        self, rng: np.random.Generator, logits: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray]:
        """Draws categorical actions uniformly from the actions that a mask allows.

        Args:
            rng: random generator.
            logits: `[N, sum of sizes]`. 0 for allowed actions, and `MASKED_LOGIT` for others.

        Returns:
            a pair. First `logits`, which are the parameters of the uniform distribution over the
            allowed actions, or 0 for a distribution whose parameters are not logits. Second, the
            actions `[N, *action_shape]`.
        """
        return logits, self.sample(logits, self.draw_noise(rng, len(logits)))

    def mean(self, params: np.ndarray) -> np.ndarray:
        """Returns the means of the distributions as actions `[N, *action_shape]`.

        Raises:
            ConfigError: the actions are categorical, so they have no mean.
        """
        raise ConfigError(
            f"exploration 'mean' of {type(self).__name__} actions: categories have no mean. "
            "Allowed: 'random', 'mode' or 'deterministic'"
        )

    @abstractmethod
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Converts actions of a batch to actions for the environment, `[N, *shape of the action
        space]`."""

    def mode_for_env(self, params: Tensor) -> Tensor:
        """Computes `to_env(sample(params, None))` in torch, for the export of policies.

        Args:
            params: `[N, P]`.

        Raises:
            ConfigError: the distribution does not define this method.
        """
        raise ConfigError(
            f"{type(self).__name__} actions cannot be exported: the distribution does not define "
            "mode_for_env"
        )

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-probabilities `[B]` of `actions` `[B, *action_shape]`. For a Box, these are log
        densities."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Entropies `[B]` in nats."""

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """KL divergences KL(old || new) `[B]` in nats."""


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws standard Gumbel noise. `argmax(logits + noise)` then has the distribution
    softmax(logits)."""
    uniform = rng.random(shape, dtype=np.float32)
    # A float32 random number can be exactly 0, and the logarithm of 0 is -inf.
    np.maximum(uniform, np.float32(1e-20), out=uniform)
    return -np.log(-np.log(uniform))
