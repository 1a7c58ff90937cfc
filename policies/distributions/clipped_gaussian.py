"""`ClippedGaussian`: actions in a bounded Box, with Gaussian noise."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from polopt.policies.distributions.diag_gaussian import DiagGaussian


class ClippedGaussian(DiagGaussian):
    """Actions from -1 to 1, which are mapped to the bounds of a Box; `params` are means and log
    standard deviations of the noise `[B, 2 A]`.

    A sample is clipped to [-1, 1]. The density is that before clipping.

    Args:
        space: action space of one environment, with finite bounds.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, normalize=True)

    def sample(self, params: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        return np.clip(super().sample(params, noise), -1.0, 1.0)
