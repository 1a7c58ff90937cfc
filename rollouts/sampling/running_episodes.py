"""The current episodes of a sampler, which continue across fragments: their returns and lengths,
their discounted returns, and the callbacks for their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import Episode, EpisodeStats


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
        returns = self._returns + columns["rewards"].cumsum(axis=0, dtype=np.float64)
        lengths = self._lengths + columns["valid"].cumsum(axis=0)
        done = columns["terminated"] | columns["truncated"]
        if not np.count_nonzero(done):
            self._returns, self._lengths = returns[-1], lengths[-1]
            return EpisodeStats([], []), []
        returns_before, lengths_before = [0.0] * self._num_envs, [0] * self._num_envs
        ended_returns, ended_lengths, places = [], [], []
        ends = np.nonzero(done)
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
            columns: the columns `rewards`, `terminated`, `truncated` and `valid` of the fragment,
                `[T, N]`. Rows that are not valid do not change the returns.
            gamma: the discount factor.
        """
        ends = columns["terminated"] | columns["truncated"]
        valid = columns["valid"]
        returns = np.empty(ends.shape)
        for t, rewards in enumerate(columns["rewards"]):
            returns[t] = self._running * gamma + rewards
            after = returns[t] if valid[t].all() else np.where(valid[t], returns[t], self._running)
            self._running = np.where(ends[t], 0.0, after)
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


class EpisodeSteps:
    """Calls functions for the beginnings of episodes and for the steps that `add` receives, with
    the episode so far. To describe the episode, this class sums the rewards and counts the steps of
    the current episodes.

    Args:
        num_envs: the number N of environments.
        start: a function that is called before the first step of each episode. None means that no
            function is called.
        step: a function that is called after each step. None means that no function is called.
        end: a function that is called at the end of each episode, and returns custom metrics. None
            means that no function is called.

    Attributes:
        start, step, end: the arguments.
        needs_infos: True if `add` needs the infos of all steps, and not only of last steps.
        data: the `data` of the current episode of each environment.
        data_of: the `data` of the episodes that ended in this fragment. The key is `(t, n)`, the
            step and the environment at which an episode ended.
        metrics_of: the metrics that `end` returned for these episodes, by `(t, n)`.
    """

    def __init__(
        self,
        num_envs: int,
        start: Callable[[Episode], None] | None,
        step: Callable[[Episode], None] | None,
        end: Callable[[Episode], Mapping[str, Any]] | None,
    ) -> None:
        self.start, self.step, self.end = start, step, end
        self.needs_infos = step is not None
        self.data: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self._returns, self._lengths = [0.0] * num_envs, [0] * num_envs
        self.data_of: dict[tuple[int, int], dict[str, Any]] = {}
        self.metrics_of: dict[tuple[int, int], Mapping[str, Any]] = {}

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

    def begins(self, n: int) -> bool:
        """Whether the next step of environment `n` is the first step of an episode, unless the
        environment resets in this step."""
        return self._lengths[n] == 0

    def begin_episode(self, n: int, observation: Any) -> None:
        """Calls `start` for the episode that begins in environment `n`."""
        self.data[n] = {}
        if self.start is not None:
            first = Episode(n, 0.0, 0, False, {}, self.data[n], False, observation=observation)
            self.start(first)

    def add(
        self,
        t: int,
        n: int,
        reward: float,
        terminated: bool,
        done: bool,
        info: dict[str, Any],
        observation: Any = None,
        action: Any = None,
    ) -> None:
        """Adds one step of an environment, and calls the functions.

        Args:
            t: the index of the step in the fragment.
            n: the index of the environment.
            reward: the reward of the step.
            terminated: whether the episode ended by termination.
            done: whether the episode ended.
            info: the info of the step.
            observation: the observation after the step.
            action: the action of the step.
        """
        if self.start is None and self._lengths[n] == 0:
            self.data[n] = {}
        self._returns[n] += reward
        self._lengths[n] += 1
        total, length, data = self._returns[n], self._lengths[n], self.data[n]
        if done:
            self.discard(n)
            self.data_of[t, n] = data
        episode = Episode(
            n,
            total,
            length,
            terminated,
            info,
            data,
            done,
            observation=observation,
            action=action,
            reward=reward,
        )
        if self.step is not None:
            self.step(episode)
        if done and self.end is not None:
            self.metrics_of[t, n] = self.end(episode)
