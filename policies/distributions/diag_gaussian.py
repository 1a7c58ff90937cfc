"""`DiagGaussian`: Box actions from a diagonal Gaussian."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from polopt.policies.distributions.base import ActionDistribution

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class DiagGaussian(ActionDistribution):
    """Box actions; `params` are means and log standard deviations `[B, 2 A]`.

    The environment receives the action clipped to the box; the density is that of the action before
    clipping, as in RLlib and Stable-Baselines3.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._space_shape = tuple(space.shape)
        self._size = int(np.prod(space.shape))
        # In the precision of the space: a bound rounded to float32 may lie outside a float64 box.
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

    def mode_for_env(self, params: Tensor) -> Tensor:
        return self._clipped(params[..., : self._size])

    def _clipped(self, actions: Tensor) -> Tensor:
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
