"""`EpisodeSteps`: calls a user's callbacks for steps and ends of episodes while a fragment is
sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import Episode


class EpisodeSteps:
    """Calls functions for the steps that `add` receives, with the episode so far. To describe the
    episode, this class sums the rewards and counts the steps of the current episodes.

    Args:
        num_envs: the number N of environments.
        step: a function that is called after each step. None means that no function is called.
        end: a function that is called at the end of each episode, and returns custom metrics. None
            means that no function is called.

    Attributes:
        needs_infos: True if `add` needs the infos of all steps, and not only of last steps.
        data_of: the `data` of the episodes that ended in this fragment. The key is `(t, n)`, the
            step and the environment at which an episode ended.
        metrics_of: the metrics that `end` returned for these episodes, by `(t, n)`.
    """

    def __init__(
        self,
        num_envs: int,
        step: Callable[[Episode], None] | None,
        end: Callable[[Episode], Mapping[str, float]] | None,
    ) -> None:
        self._step, self._end = step, end
        self.needs_infos = step is not None
        self._data: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        self.data_of: dict[tuple[int, int], dict[str, Any]] = {}
        self.metrics_of: dict[tuple[int, int], Mapping[str, float]] = {}

    def begin_fragment(self, state: Mapping[str, np.ndarray]) -> None:
        """Begins a fragment.

        Args:
            state: the returns and lengths of the current episodes, from `EpisodeCounter.get_state`.
        """
        self._returns, self._lengths = state["returns"].tolist(), state["lengths"].tolist()
        self.data_of, self.metrics_of = {}, {}

    def discard(self, n: int) -> None:
        """Discards the current episode of environment `n`."""
        self._returns[n], self._lengths[n] = 0.0, 0

    def add(
        self, t: int, n: int, reward: float, terminated: bool, done: bool, info: dict[str, Any]
    ) -> None:
        """Adds one step of an environment, and calls the functions.

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
        episode = Episode(n, total, length, terminated, info, data, done)
        if self._step is not None:
            self._step(episode)
        if done and self._end is not None:
            self.metrics_of[t, n] = self._end(episode)
