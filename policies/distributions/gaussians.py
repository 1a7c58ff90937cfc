"""The distributions of Box actions.

`DiagGaussian` and `ClippedGaussian` are for any Box. `SquashedGaussian` is for bounded actions,
which tanh squashes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.common.config import ConfigError
from polopt.policies.distributions.action_distribution import ActionDistribution

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class DiagGaussian(ActionDistribution):
    """A diagonal Gaussian over Box actions. `params` are means and log standard deviations `[B,
    2 A]`.

    `to_env` maps actions to the bounds and then clips them, as `normalize` and `clip` say.
    `log_prob` gets actions before mapping and clipping, as in RLlib.

    Args:
        space: action space of one environment.
        normalize: whether to map [-1, 1] to the bounds, in each dimension with two finite bounds.
            Other dimensions are not mapped. (If any bound is infinite, RLlib maps no dimension.)
        clip: whether to clip dimensions that are not mapped. Mapped dimensions are always clipped.
    """

    def __init__(self, space: spaces.Box, normalize: bool = False, clip: bool = True) -> None:
        self._space_shape = tuple(space.shape)
        self._size = int(np.prod(space.shape))
        # Bounds keep the precision of the space, because a bound rounded to float32 may lie outside
        # of a float64 box.
        self._low = space.low.reshape(-1)
        self._high = space.high.reshape(-1)
        self._env_dtype = space.dtype
        mapped = np.isfinite(self._low) & np.isfinite(self._high) & normalize
        # Bounds are halved before they are subtracted, because the width of a large box overflows.
        low = np.where(mapped, self._low, 0.0).astype(np.float64) / 2.0
        high = np.where(mapped, self._high, 0.0).astype(np.float64) / 2.0
        precision = np.result_type(self._env_dtype, np.float32)
        self._half_width = np.where(mapped, high - low, 1.0).astype(precision)
        self._middle = (high + low).astype(precision)
        self._maps = bool((self._half_width != 1.0).any() or self._middle.any())
        self._range = np.where(mapped, -1.0, self._low), np.where(mapped, 1.0, self._high)
        if not clip:
            self._low = np.where(mapped, self._low, -np.inf).astype(self._env_dtype)
            self._high = np.where(mapped, self._high, np.inf).astype(self._env_dtype)
        self.bounds = np.where(mapped, -1.0, self._low), np.where(mapped, 1.0, self._high)
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
        """Draws actions uniformly from the box. In dimensions without two finite bounds, draws from
        a standard normal distribution."""
        bounded = np.isfinite(self._range).all(axis=0)
        low, high = (np.where(bounded, bound, 0.0) for bound in self._range)
        uniform = low + (high - low) * rng.random((*leading, self._size))
        normal = rng.standard_normal((*leading, self._size))
        return np.where(bounded, uniform, normal).astype(np.float32)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        if self._maps:
            actions = actions * self._half_width + self._middle
        clipped = np.minimum(np.maximum(actions, self._low), self._high)
        return clipped.reshape(-1, *self._space_shape).astype(self._env_dtype, copy=False)

    def mode_for_env(self, params: Tensor) -> Tensor:
        return self._for_env(params[..., : self._size])

    def _for_env(self, actions: Tensor) -> Tensor:
        """Does the same as `to_env`, in torch."""
        if self._maps:
            half_width = torch.from_numpy(self._half_width)
            actions = actions.to(half_width.dtype) * half_width + torch.from_numpy(self._middle)
        low, high = torch.from_numpy(self._low), torch.from_numpy(self._high)
        clipped = torch.minimum(torch.maximum(actions.to(low.dtype), low), high)
        return clipped.reshape(-1, *self._space_shape)

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


class ClippedGaussian(DiagGaussian):
    """A diagonal Gaussian whose samples are clipped to [-1, 1] and then mapped to the bounds of a
    Box. `params` are means and log standard deviations `[B, 2 A]`.

    `log_prob` returns the log density of the Gaussian, without clipping.

    Args:
        space: action space of one environment, with finite bounds.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, normalize=True)

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        return np.clip(super().sample(params, noise), -1.0, 1.0)


class SquashedGaussian(DiagGaussian):
    """A diagonal Gaussian that is squashed by tanh and scaled to the box (Haarnoja et al., 2018).

    Batches hold actions before squashing, so that the log-probability does not need the inverse of
    tanh. The entropy of the squashed density has no closed form, so `entropy` returns the entropy
    of the Gaussian. `kl` is exact, because squashing does not change a KL divergence.

    Attributes:
        log_half_width: sum of the logarithms of half the widths of the box. Leaves out dimensions
            of width 0, whose actions are constant.

    Raises:
        ConfigError: the box is not bounded.
    """

    def __init__(self, space: spaces.Box) -> None:
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ConfigError(
                f"key 'squash_actions': got True for action space {space}. "
                "Allowed: a Box with finite bounds"
            )
        super().__init__(space, normalize=True)
        self.bounds = None  # actions after tanh are always inside of the bounds
        self.log_half_width = float(np.log(self._half_width[self._half_width > 0.0]).sum())

    def mean(self, params: np.ndarray) -> np.ndarray:
        """Computes the means of the squashed actions with Gauss-Hermite quadrature. Returns the
        inverse of tanh of these means, `[N, A]`, because batches hold actions before squashing."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        mean, std = params[..., : self._size], np.exp(params[..., self._size :])
        squashed = np.tanh(mean[..., None] + std[..., None] * nodes)
        average = squashed @ (weights / weights.sum())
        return np.arctanh(np.clip(average, -1.0 + 1e-6, 1.0 - 1e-6)).astype(np.float32)

    def random(self, rng: np.random.Generator, *leading: int) -> np.ndarray:
        # Batches hold actions before squashing, so this returns the inverse of tanh of uniform
        # actions.
        uniform = rng.uniform(-1.0, 1.0, (*leading, self._size))
        return np.arctanh(np.clip(uniform, -1.0 + 1e-6, 1.0 - 1e-6)).astype(np.float32)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        return super().to_env(np.tanh(actions))

    def mode_for_env(self, params: Tensor) -> Tensor:
        return self._for_env(torch.tanh(params[..., : self._size]))

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not overflow.
        log_slope = 2.0 * (math.log(2.0) - actions - F.softplus(-2.0 * actions))
        gaussian = super().log_prob(params, actions)
        return gaussian - log_slope.sum(-1) - self.log_half_width
