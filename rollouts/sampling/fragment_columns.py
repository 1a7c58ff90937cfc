"""`FragmentColumns`: holds the arrays that a sampler fills step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.rollouts.sampling.non_finite import replace_unused, surely_finite


class FragmentColumns:
    """The columns of one fragment with at most T steps of N environments. The arrays are allocated
    once, when the fragment begins. A row is one step of one environment.

    Args:
        steps: the maximum number T of steps.
        obs: the observations `[N, ...]` at the start of the fragment, as rows (see
            `ObservationEncoder`).
        dist: the action distribution of the policy.

    Attributes:
        all_obs: `[T + 1, N, ...]`, the rows of the observations before each step and after the last
            step.
        params: `[T, N, P]` float32, the parameters of the action distribution.
        actions: `[T, N, ...]`, the actions before they are converted for the environment.
        rewards: `[T, N]` float32.
        terminated: `[T, N]` bool.
        truncated: `[T, N]` bool.
        valid: `[T, N]` bool. `Autoreset.end_fragment` and `discard_lost` set it to False in rows
            without a transition.
        lost: maps the index of a step to an array `[N]` or `[1]` bool, which is True for the
            environments whose step was lost because of an exception. See `discard_lost`.
        last_infos: maps `(t, n)`, the step and environment at which an episode ended, to the info
            of its last step. The sampler fills it only if `VectorSampler.ended` is a list.
        counts: `[N]`, see `SampleBatch.row_counts`. `close_up` sets it.
    """

    __slots__ = (
        "_final_obs",
        "_final_rows",
        "actions",
        "all_obs",
        "counts",
        "last_infos",
        "lost",
        "params",
        "rewards",
        "terminated",
        "truncated",
        "valid",
    )

    def __init__(self, steps: int, obs: np.ndarray, dist: ActionDistribution) -> None:
        envs = len(obs)
        self.all_obs = np.empty((steps + 1, *obs.shape), dtype=obs.dtype)
        self.all_obs[0] = obs
        self.params = np.empty((steps, envs, dist.num_params), dtype=np.float32)
        self.actions = np.empty((steps, envs, *dist.action_shape), dtype=dist.action_dtype)
        self.rewards = np.empty((steps, envs), dtype=np.float32)
        self.terminated = np.empty((steps, envs), dtype=bool)
        self.truncated = np.empty((steps, envs), dtype=bool)
        self.valid = np.ones((steps, envs), dtype=bool)
        self.lost: dict[int, np.ndarray] = {}
        self.last_infos: dict[tuple[int, int], dict[str, Any]] = {}
        self.counts: np.ndarray | None = None
        self._final_rows: list[int] = []
        self._final_obs: list[np.ndarray] = []

    def add_last_observations(
        self, t: int, envs: np.ndarray, observations: Iterable[np.ndarray]
    ) -> None:
        """Adds the last observations of the episodes that ended at step `t`.

        Args:
            t: the index of the step in the fragment.
            envs: `[K]`, the indices of the environments whose episodes ended.
            observations: the rows of the K last observations of these episodes.
        """
        self._final_rows += (t * self.valid.shape[1] + envs).tolist()
        self._final_obs += observations

    def lose(self, t: int) -> None:
        """Empties step `t`, in which the whole vector environment raised. No episode ends there."""
        self.rewards[t], self.terminated[t], self.truncated[t] = 0.0, False, False
        first = t * self.valid.shape[1]
        while self._final_rows and self._final_rows[-1] >= first:
            del self._final_rows[-1], self._final_obs[-1]

    def discard_lost(self) -> None:
        """Marks the rows that were lost because of an exception. These rows hold no transition, and
        their episodes end there: `valid` becomes False and `truncated` True."""
        for t, lost in self.lost.items():
            self.valid[t] &= ~lost
            self.truncated[t] |= lost

    def close_up(self, kept: np.ndarray) -> int:
        """Moves rows up in time, so that the kept rows of each slot (see `SlotGroup`) follow each
        other without gaps. Rows that are not valid fill the ends. The observation of the first
        of them is the next observation of the last kept row.

        Args:
            kept: `[T, N]` bool, True for the rows to keep.

        Returns:
            the new number of steps, which is the largest number of rows of a slot, at least 1.
        """
        steps, slots = kept.shape
        counts = np.count_nonzero(kept, axis=0)
        length = max(1, int(counts.max()))
        if counts.min() == steps:
            return steps
        self.counts = counts
        order = np.argsort(~kept, axis=0, kind="stable")[:length]  # [T', N], the kept rows first
        filled = np.arange(length + 1)[:, None] >= counts
        # The observation of a slot stays the same until its next row.
        sources = np.where(filled, steps, np.append(order, order[-1:], axis=0))
        self.all_obs[: length + 1] = _taken(self.all_obs, sources)
        for column in (self.params, self.actions, self.rewards, self.terminated, self.truncated):
            column[:length] = _taken(column, order)
        self.valid[:length] = np.take_along_axis(self.valid[:steps], order, axis=0)
        filled = filled[:length]
        for column in (self.valid, self.terminated, self.truncated):
            column[:length][filled] = False
        self.rewards[:length][filled] = 0.0
        places = np.cumsum(kept, axis=0) - 1
        self._final_rows = [
            int(places[divmod(row, slots)]) * slots + row % slots for row in self._final_rows
        ]
        return length

    def discard_envs(self, envs: np.ndarray, steps: int) -> int:
        """Marks all rows of some environments as rows without a transition, because their values
        are not finite. Only the observation before the first step stays, because the previous
        fragment continues with it.

        Args:
            envs: `[N]` bool, True for these environments.
            steps: the number of sampled steps.

        Returns:
            the number of rows that had a transition.
        """
        count = int(np.count_nonzero(self.valid[:steps, envs]))
        self.valid[:steps, envs] = False
        for column in (self.rewards, self.params, self.actions):
            column[:steps, envs] = 0
        self.terminated[:steps, envs] = self.truncated[:steps, envs] = False
        self.all_obs[1 : steps + 1, envs] = 0
        if self.counts is not None:
            self.counts[envs] = steps
        kept = [i for i, row in enumerate(self._final_rows) if not envs[row % len(envs)]]
        self._final_rows = [self._final_rows[i] for i in kept]
        self._final_obs = [self._final_obs[i] for i in kept]
        for place in [place for place in self.last_infos if envs[place[1]]]:
            del self.last_infos[place]
        return count

    def batch(self, steps: int, version: int) -> SampleBatch:
        """Returns a `SampleBatch` of the first `steps` steps, as views. Its version is `version`.

        `successor_index` `[K]` and `successor_obs` `[K, ...]` are the rows and the observations of
        `add_last_observations`. After `terminated`, observations that are not finite are replaced.
        See `replace_unused`."""
        places = np.array(self._final_rows, dtype=np.int64)
        if not len(places):
            last = np.empty((0, *self.all_obs.shape[2:]), dtype=self.all_obs.dtype)
        else:
            last = np.stack(self._final_obs)
            if not surely_finite(last):
                over = self.terminated.reshape(-1)[places]
                used = self.all_obs.reshape(-1, *self.all_obs.shape[2:])[places[over]]
                last[over] = replace_unused(used, last[over])
        columns = {
            "actions": self.actions[:steps],
            "rewards": self.rewards[:steps],
            "terminated": self.terminated[:steps],
            "truncated": self.truncated[:steps],
            "valid": self.valid[:steps],
            "action_dist_inputs": self.params[:steps],
        }
        all_obs, counts = self.all_obs[: steps + 1], self.counts
        return SampleBatch(all_obs, columns, places, last, version=version, row_counts=counts)


def _taken(array: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns `[T', N, ...]`: for each slot, the elements of `array` `[T, N, ...]` at the steps
    `[T', N]`."""
    return array[steps, np.arange(steps.shape[1])]
