"""`EpisodeCounter`: computes returns and lengths of episodes across fragments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import EpisodeStats


class EpisodeCounter:
    """Sums the rewards and counts the steps of the current episode of each environment.

    Args:
        num_envs: the number N of environments.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)

    @np.errstate(all="ignore")  # the caller checks that numbers are finite
    def add(self, columns: Mapping[str, np.ndarray]) -> tuple[EpisodeStats, list[tuple[int, int]]]:
        """Adds a fragment, and returns the episodes that end in it.

        Args:
            columns: the columns `rewards`, `terminated`, `truncated` and `valid` of the fragment,
                `[T, N]`. If an episode ends in a row that is not valid, its environment has failed,
                and the episode is discarded.

        Returns:
            the statistics of the episodes, and for each episode the step and the environment
            `(t, n)` of its end. Both are ordered by step and then by environment.
        """
        returns = self._returns + np.cumsum(columns["rewards"], axis=0, dtype=np.float64)
        lengths = self._lengths + np.cumsum(columns["valid"], axis=0)
        returns_before, lengths_before = [0.0] * self._num_envs, [0] * self._num_envs
        ended_returns, ended_lengths, places = [], [], []
        ends = np.nonzero(columns["terminated"] | columns["truncated"])
        at_ends = (*ends, returns[ends], lengths[ends], columns["valid"][ends])
        for t, n, total, length, valid in zip(
            *(column.tolist() for column in at_ends), strict=True
        ):
            if valid:
                places.append((t, n))
                ended_returns.append(total - returns_before[n])
                ended_lengths.append(length - lengths_before[n])
            returns_before[n], lengths_before[n] = total, length
        self._returns = returns[-1] - returns_before
        self._lengths = lengths[-1] - lengths_before
        return EpisodeStats(ended_returns, ended_lengths), places

    def discard(self, envs: np.ndarray) -> None:
        """Discards the current episodes.

        Args:
            envs: `[N]` bool, True for each environment whose episode is discarded.
        """
        self._returns[envs], self._lengths[envs] = 0.0, 0

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns the returns and lengths `[N]` of the current episodes so far."""
        return {"returns": self._returns.copy(), "lengths": self._lengths.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self._returns = np.asarray(state["returns"])
        self._lengths = np.asarray(state["lengths"])
