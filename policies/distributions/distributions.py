"""Action distributions: sampling in NumPy, log-probability, entropy and KL in torch.

Acting makes no `torch.distributions` objects and draws no random numbers per step: the noise of a
whole fragment is drawn at once, and an action is a plain function of parameters and noise. Zero
noise gives the mode, which is what acting without exploration is.

`actions` are what the policy chose and what its log-probability is of; `to_env` makes of them what
the environment's action space wants (offsets, clipping, squashing, shape and dtype).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.common.config import ConfigError

SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, Box"
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class ActionDistribution(ABC):
    """One family of distributions over one action space.

    Attributes:
        num_params: P, how many numbers the network gives for one observation.
        action_shape: shape of one action as stored in a batch.
        action_dtype: its dtype.
    """

    num_params: int
    action_shape: tuple[int, ...]
    action_dtype: np.dtype[Any]

    @abstractmethod
    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Noise for `leading` actions: `[*leading, noise size]` float32."""

    @abstractmethod
    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Actions `[N, *action_shape]` from `params` `[N, P]`; the mode if `noise` is None."""

    @abstractmethod
    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """`[*leading, *action_shape]`: uniform over the action space, whatever the parameters."""

    def mean(self, params: np.ndarray) -> np.ndarray:
        """Actions `[N, *action_shape]` at the mean of the distribution.

        Raises:
            ConfigError: if actions are categories, which have none.
        """
        raise ConfigError(
            f"exploration 'mean' of {type(self).__name__} actions: categories have no mean; "
            "allowed: 'random', 'mode' or 'deterministic'"
        )

    @abstractmethod
    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """`[N, *shape of the action space]` for the environment."""

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """`[B]` log-probability (density for Box) of `actions` `[B, *action_shape]`."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """`[B]` entropy in nats."""

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """`[B]` KL(old || new) in nats."""


class Categorical(ActionDistribution):
    """Discrete actions; `params` are logits `[B, n]`. Sampled by the Gumbel-max trick."""

    def __init__(self, space: spaces.Discrete[Any]) -> None:
        self.num_params = int(space.n)
        self.action_shape = ()
        self.action_dtype = np.dtype(np.int64)
        self._start = int(space.start)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return _gumbel(rng, (*leading, self.num_params))

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        return (params if noise is None else params + noise).argmax(axis=-1)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return rng.integers(self.num_params, size=leading)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return actions if self._start == 0 else actions + self._start

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return F.log_softmax(params, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_p = F.log_softmax(params, dim=-1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        log_old = F.log_softmax(old, dim=-1)
        return (log_old.exp() * (log_old - F.log_softmax(new, dim=-1))).sum(-1)


class MultiCategorical(ActionDistribution):
    """Independent categoricals; `params` are their logits side by side `[B, sum of sizes]`.

    Attributes:
        sizes: how many categories each has.
    """

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        self.sizes = [int(n) for n in space.nvec.reshape(-1)]
        self._space_shape = tuple(space.shape)
        self._start = space.start.reshape(-1)
        self._offsets = np.cumsum([0, *self.sizes])
        self.num_params = sum(self.sizes)
        self.action_shape = (len(self.sizes),)
        self.action_dtype = np.dtype(np.int64)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return _gumbel(rng, (*leading, self.num_params))

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        scores = params if noise is None else params + noise
        parts = [
            scores[..., low:high].argmax(axis=-1)
            for low, high in zip(self._offsets[:-1], self._offsets[1:], strict=True)
        ]
        return np.stack(parts, axis=-1)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return rng.integers(self.sizes, size=(*leading, len(self.sizes)))

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return (actions + self._start).reshape(-1, *self._space_shape)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        parts = [
            F.log_softmax(logits, dim=-1).gather(-1, actions[..., i : i + 1]).squeeze(-1)
            for i, logits in enumerate(params.split(self.sizes, dim=-1))
        ]
        return torch.stack(parts, dim=-1).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        parts = []
        for logits in params.split(self.sizes, dim=-1):
            log_p = F.log_softmax(logits, dim=-1)
            parts.append(-(log_p.exp() * log_p).sum(-1))
        return torch.stack(parts, dim=-1).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        parts = []
        pairs = zip(old.split(self.sizes, dim=-1), new.split(self.sizes, dim=-1), strict=True)
        for old_logits, new_logits in pairs:
            log_old = F.log_softmax(old_logits, dim=-1)
            parts.append((log_old.exp() * (log_old - F.log_softmax(new_logits, dim=-1))).sum(-1))
        return torch.stack(parts, dim=-1).sum(-1)


class DiagGaussian(ActionDistribution):
    """Box actions from a diagonal Gaussian; `params` are means and log standard deviations
    `[B, 2 A]`. The environment gets the action clipped to the box; the density is of the action
    before clipping, as in RLlib and Stable-Baselines3.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._space_shape = tuple(space.shape)
        self._size = int(np.prod(space.shape))
        # In the space's own precision: a bound rounded to float32 may lie outside a float64 box.
        self._low = space.low.reshape(-1)
        self._high = space.high.reshape(-1)
        self._env_dtype = space.dtype
        self.num_params = 2 * self._size
        self.action_shape = (self._size,)
        self.action_dtype = np.dtype(np.float32)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        return rng.standard_normal((*leading, self._size), dtype=np.float32)

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        mean = params[..., : self._size]
        if noise is None:
            return mean.copy()
        return mean + np.exp(params[..., self._size :]) * noise

    def mean(self, params: np.ndarray) -> np.ndarray:
        return self.sample(params, None)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        """Uniform over the box; standard normal in dimensions without both bounds."""
        bounded = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(bounded, self._low, 0.0), np.where(bounded, self._high, 0.0)
        uniform = low + (high - low) * rng.random((*leading, self._size))
        normal = rng.standard_normal((*leading, self._size))
        return np.where(bounded, uniform, normal).astype(np.float32)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        clipped = np.minimum(np.maximum(actions, self._low), self._high)
        return clipped.reshape(-1, *self._space_shape).astype(self._env_dtype, copy=False)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = params.chunk(2, dim=-1)
        z = (actions - mean) * torch.exp(-log_std)
        return -(0.5 * z.square() + log_std).sum(-1) - self._size * _HALF_LOG_2PI

    def entropy(self, params: Tensor) -> Tensor:
        log_std = params[..., self._size :]
        return log_std.sum(-1) + self._size * (0.5 + _HALF_LOG_2PI)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        old_mean, old_log_std = old.chunk(2, dim=-1)
        new_mean, new_log_std = new.chunk(2, dim=-1)
        ratio = (2.0 * (old_log_std - new_log_std)).exp()
        distance = (old_mean - new_mean).square() * (-2.0 * new_log_std).exp()
        return (new_log_std - old_log_std + 0.5 * (ratio + distance - 1.0)).sum(-1)


class SquashedGaussian(DiagGaussian):
    """A diagonal Gaussian squashed by tanh and scaled to the box (Haarnoja et al., 2018).

    Stored actions are those before squashing, so that the log-probability needs no inverse tanh.
    Entropy is the Gaussian's own: that of the squashed density has no closed form. KL is exact,
    for it does not change under a bijection.

    Raises:
        ConfigError: if the box is not bounded.
    """

    def __init__(self, space: spaces.Box) -> None:
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ConfigError(
                f"key 'squash_actions': got True for action space {space}; "
                "allowed: a Box with finite bounds"
            )
        super().__init__(space)
        self._middle = (self._high + self._low) / 2.0
        self._half_width = (self._high - self._low) / 2.0
        self._log_half_width = float(np.log(self._half_width).sum())

    def mean(self, params: np.ndarray) -> np.ndarray:
        """Before squashing, like all actions here: the point that tanh takes to the mean of the
        squashed action, which Gauss-Hermite quadrature gives."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        mean, std = params[..., : self._size], np.exp(params[..., self._size :])
        squashed = np.tanh(mean[..., None] + std[..., None] * nodes)
        average = squashed @ (weights / weights.sum())
        return np.arctanh(np.clip(average, -1.0 + 1e-6, 1.0 - 1e-6)).astype(np.float32)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        # The inverse of tanh takes what is uniform in the box to where actions are stored.
        uniform = rng.uniform(-1.0, 1.0, (*leading, self._size))
        return np.arctanh(np.clip(uniform, -1.0 + 1e-6, 1.0 - 1e-6)).astype(np.float32)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        squashed = self._middle + self._half_width * np.tanh(actions)
        return super().to_env(squashed)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not overflow.
        log_slope = 2.0 * (math.log(2.0) - actions - F.softplus(-2.0 * actions))
        gaussian = super().log_prob(params, actions)
        return gaussian - log_slope.sum(-1) - self._log_half_width


def make_distribution(space: Space[Any], squash_actions: bool = False) -> ActionDistribution:
    """The distribution for an action space.

    Raises:
        ConfigError: for a space outside `SUPPORTED_ACTIONS`; it names the space.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return SquashedGaussian(space) if squash_actions else DiagGaussian(space)
    raise ConfigError(
        f"action space {space} is not supported; allowed: {SUPPORTED_ACTIONS} (of floats)"
    )


def _gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise: `argmax(logits + noise)` is distributed as softmax(logits)."""
    uniform = rng.random(shape, dtype=np.float32)
    # float32 uniforms can be exactly 0, whose logarithm would be -inf.
    np.maximum(uniform, np.float32(1e-20), out=uniform)
    return -np.log(-np.log(uniform))
