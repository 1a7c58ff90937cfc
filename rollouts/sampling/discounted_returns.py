"""`DiscountedReturns`: of each step since its episode began, across fragments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class DiscountedReturns:
    """Sums the rewards of the current episode of each environment, the earlier ones discounted:
    `R_t = gamma R_{t-1} + r_t`, as rewards are normalised by (see `Normalizer`).

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._running = np.zeros(num_envs)

    @np.errstate(all="ignore")  # the caller checks that numbers are finite
    def add(self, columns: Mapping[str, np.ndarray], gamma: float) -> np.ndarray:
        """The returns `[T, N]` after the steps of a fragment.

        Args:
            columns: `rewards`, `terminated` and `truncated` of the fragment, `[T, N]`. Rewards of
                rows without a transition are 0.
            gamma: discount factor.
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
            envs: `[N]` bool, of which environments.
        """
        self._running[envs] = 0.0

    def get_state(self) -> np.ndarray:
        """`[N]` returns of the current episodes."""
        return self._running.copy()

    def set_state(self, state: np.ndarray) -> None:
        """Restores what `get_state` returned."""
        self._running = np.array(state, dtype=np.float64)
