"""`EpisodeSteps`: calls a user's callback for each step while a fragment is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import Episode


class EpisodeSteps:
    """Calls a function for each step that `add` receives, with the episode so far. To describe the
    episode, this class sums the rewards and counts the steps of the current episodes.

    Args:
        tell: the function that is called with the episode so far.
        num_envs: the number N of environments.
    """

    def __init__(self, tell: Callable[[Episode], None], num_envs: int) -> None:
        self._tell = tell
        self._data: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        #: Maps `(t, n)`, the step and environment at which an episode ended in this fragment, to
        #: the `data` of the episode.
        self.data_of: dict[tuple[int, int], dict[str, Any]] = {}

    def begin_fragment(self, state: Mapping[str, np.ndarray]) -> None:
        """Begins a fragment.

        Args:
            state: the returns and lengths of the current episodes, from `EpisodeCounter.get_state`.
        """
        self._returns, self._lengths = state["returns"].tolist(), state["lengths"].tolist()
        self.data_of = {}

    def discard(self, n: int) -> None:
        """Discards the current episode of environment `n`."""
        self._returns[n], self._lengths[n] = 0.0, 0

    def add(
        self, t: int, n: int, reward: float, terminated: bool, done: bool, info: dict[str, Any]
    ) -> None:
        """Adds one step of an environment, and calls the function.

        Args:
            t: the index of the step in the fragment.
            n: the index of the environment.
            reward: the reward of the step.
            terminated: whether the episode ended by termination.
            done: whether the episode ended.
            info: the info of the step.
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
