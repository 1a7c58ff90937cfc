"""`ActingPolicy`: what sampling requires of a policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from polopt.common.action_mask import ActionMask
from polopt.policies.distributions.base import ActionDistribution
from polopt.policies.spaces import ObservationEncoder


class ActingPolicy(Protocol):
    """The part of a policy that `VectorSampler` uses.

    Attributes:
        encoder: converts observations of the environment to arrays.
        dist: samples actions from parameters and noise, and converts them for the environment.
        mask: where observations say which actions are allowed; None: they do not.
        version: version of the weights; written to each batch.
    """

    encoder: ObservationEncoder
    dist: ActionDistribution
    mask: ActionMask | None
    version: int

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`."""
