"""`DiscountedReturns`: keeps running discounted returns, which continue across fragments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class DiscountedReturns:
    """Sums the rewards of the current episode of each environment, and discounts earlier rewards:
    `R_t = gamma R_{t-1} + r_t`. `Normalizer` uses these returns to normalise rewards.

    Args:
        num_envs: the number N of environments.
    """

    def __init__(self, num_envs: int) -> None:
        self._running = np.zeros(num_envs)

    @np.errstate(all="ignore")  # the caller checks that numbers are finite
    def add(self, columns: Mapping[str, np.ndarray], gamma: float) -> np.ndarray:
        """Returns the discounted return `[T, N]` after each step of a fragment.

        Args:
            columns: the columns `rewards`, `terminated` and `truncated` of the fragment, `[T, N]`.
                In rows without a transition, the reward is 0.
            gamma: the discount factor.
        """
        ends = columns["terminated"] | columns["truncated"]
        returns = np.empty(ends.shape)
        for t, rewards in enumerate(columns["rewards"]):
            returns[t] = self._running * gamma + rewards
            self._running = np.where(ends[t], 0.0, returns[t])
        return returns

    def discard(self, envs: np.ndarray) -> None:
        """Discards the current episodes.

        Args:
            envs: `[N]` bool, True for each environment whose episode is discarded.
        """
        self._running[envs] = 0.0

    def get_state(self) -> np.ndarray:
        """Returns the discounted returns `[N]` of the current episodes."""
        return self._running.copy()

    def set_state(self, state: np.ndarray) -> None:
        """Restores a state that `get_state` returned."""
        self._running = np.array(state, dtype=np.float64)
