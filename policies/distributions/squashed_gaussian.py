"""`SquashedGaussian`: the distribution of bounded Box actions that are squashed with tanh."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.common.config import ConfigError
from polopt.policies.distributions.diag_gaussian import DiagGaussian


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
