"""`EpisodeSteps`: tells a user's callbacks of each step, while a fragment is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import Episode


class EpisodeSteps:
    """Sums rewards and counts steps of the current episodes within a fragment, and calls a function
    after each step of each environment.

    Args:
        tell: gets the episode so far.
        num_envs: N.
    """

    def __init__(self, tell: Callable[[Episode], None], num_envs: int) -> None:
        self._tell = tell
        self._data: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        #: Of the episodes that have ended in the fragment, by step and environment.
        self.data_of: dict[tuple[int, int], dict[str, Any]] = {}

    def begin_fragment(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on with the episodes that `EpisodeCounter.get_state` describes."""
        self._returns, self._lengths = state["returns"].tolist(), state["lengths"].tolist()
        self.data_of = {}

    def discard(self, n: int) -> None:
        """The episode of an environment is lost."""
        self._returns[n], self._lengths[n] = 0.0, 0

    def add(
        self, t: int, n: int, reward: float, terminated: bool, done: bool, info: dict[str, Any]
    ) -> None:
        """One step of an environment.

        Args:
            t: number of the step in the fragment.
            n: index of the environment.
            reward: of the step.
            terminated: whether the episode was terminated.
            done: whether it has ended.
            info: of the step.
        """
        if self._lengths[n] == 0:
            self._data[n] = {}
        self._returns[n] += reward
        self._lengths[n] += 1
        total, length, data = self._returns[n], self._lengths[n], self._data[n]
        if done:
            self.discard(n)
            self.data_of[t, n] = data
        self._tell(Episode(n, total, length, terminated, info, data, done))
