"""`FragmentColumns`: the arrays that a sampler fills step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polopt.policies.distributions.action_distribution import ActionDistribution


class FragmentColumns:
    """Columns of one fragment of at most T steps of N environments, allocated once.

    Args:
        steps: T.
        obs: encoded observations `[N, ...]` at the start of the fragment.
        dist: action distribution of the policy.

    Attributes:
        all_obs: `[T + 1, N, ...]`.
        params: `[T, N, P]` float32, parameters of the action distribution.
        actions: `[T, N, ...]`, as drawn, before they are converted for the environment.
        rewards: `[T, N]` float32.
        terminated: `[T, N]` bool.
        truncated: `[T, N]` bool.
        valid: `[T, N]` bool. False for rows without a transition.
        lost: by step, `[N]` bool: environments that raised. See `discard_lost`.
        last_infos: by step and environment: infos of the last steps of episodes, where they are
            kept.
    """

    __slots__ = (
        "_final_obs",
        "_final_rows",
        "actions",
        "all_obs",
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
        self._final_rows: list[int] = []
        self._final_obs: list[np.ndarray] = []

    def add_last_observations(
        self, t: int, envs: np.ndarray, observations: Iterable[np.ndarray]
    ) -> None:
        """Adds the last observations of episodes that ended at step `t`.

        Args:
            t: step of the fragment.
            envs: `[K]`, indices of the environments.
            observations: K encoded observations.
        """
        self._final_rows += (t * self.valid.shape[1] + envs).tolist()
        self._final_obs += observations

    def mark_resets(self, steps: int, resets: np.ndarray) -> np.ndarray:
        """Marks the rows that only reset, in next-step mode: those after an end. They are not
        `valid`, and have no reward. Once per fragment, which costs less than in each step.

        Args:
            steps: number of sampled steps.
            resets: `[N]` bool, environments that the first step resets.

        Returns:
            `[N]` bool, environments that the first step of the next fragment resets.
        """
        ended = self.terminated[:steps] | self.truncated[:steps]
        resetting = np.concatenate([resets[None], ended[:-1]])
        self.valid[:steps][resetting] = False
        self.rewards[:steps][resetting] = 0.0
        return ended[-1]

    def discard_lost(self) -> None:
        """Marks the rows of environments that raised: no transition, and the end of an episode."""
        for t, lost in self.lost.items():
            self.valid[t] &= ~lost
            self.truncated[t] |= lost

    def columns(self, steps: int) -> dict[str, np.ndarray]:
        """The columns of a `SampleBatch`, of the first `steps` steps."""
        return {
            "actions": self.actions[:steps],
            "rewards": self.rewards[:steps],
            "terminated": self.terminated[:steps],
            "truncated": self.truncated[:steps],
            "valid": self.valid[:steps],
            "action_dist_inputs": self.params[:steps],
        }

    def successors(self) -> dict[str, Any]:
        """The arguments of a `SampleBatch` that hold the last observations of episodes: rows
        `[K]` (step times N plus environment) and observations `[K, ...]`."""
        empty = np.empty((0, *self.all_obs.shape[2:]), dtype=self.all_obs.dtype)
        return {
            "successor_index": np.array(self._final_rows, dtype=np.int64),
            "successor_obs": np.stack(self._final_obs) if self._final_obs else empty,
        }
