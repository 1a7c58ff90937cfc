"""`ActingPolicy`: what sampling requires of a policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from polopt.common.action_mask import ActionMask
from polopt.policies.distributions.base import ActionDistribution
from polopt.policies.normalization import Normalizer
from polopt.policies.spaces import ObservationEncoder


class ActingPolicy(Protocol):
    """The part of a policy that `VectorSampler` uses.

    Attributes:
        encoder: converts observations of the environment to arrays.
        normalizer: normalises observations and rewards; None: the policy does not.
        dist: samples actions from parameters and noise, and converts them for the environment.
        mask: where observations say which actions are allowed; None: they do not.
        version: version of the weights; written to each batch.
        state_size: S, size of the policy's memory of one environment; 0 without memory.
    """

    encoder: ObservationEncoder
    normalizer: Normalizer | None
    dist: ActionDistribution
    mask: ActionMask | None
    version: int
    state_size: int

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distribution parameters `[N, P]` float32 of encoded observations `[N, ...]`, and the
        memory `[N, S]` float32 after them.

        Args:
            obs: `[N, ...]`.
            state: memory `[N, S]` before; zeros at the start of an episode.
        """
