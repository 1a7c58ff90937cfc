"""`Transitions` and `Sequences`: what is drawn from a replay buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch


class Transitions(NamedTuple):
    """B rows of n-step transitions, as a value-based policy learns from them.

        targets = rows.rewards + rows.discounts * value(rows.next_obs)
        loss = (rows.weights * huber(q(rows.obs, rows.actions) - targets)).mean()

    The next observation of a row is the observation n steps later, or the true last observation
    where the episode was truncated before. Where the episode terminated before, `discounts` is 0,
    and `next_obs` only has the right shape.

    Attributes:
        obs: observations, encoded as in `SampleBatch`.
        actions: actions as the policy sampled them, as in `SampleBatch`.
        rewards: the sums of gamma^k r_k over the steps of each row.
        discounts: gamma^m, where m is the number of steps of the row. 0 after `terminated`.
        next_obs: the observations at the end of the steps. Values are bootstrapped from them.
        weights: importance-sampling weights (Schaul et al., 2016). 1 where sampling is uniform.
        indices: the places of the rows in their buffer, for the priorities that flow back.
    """

    obs: np.ndarray  # [B, ...]
    actions: np.ndarray  # [B, ...]
    rewards: np.ndarray  # [B] float32
    discounts: np.ndarray  # [B] float32
    next_obs: np.ndarray  # [B, ...]
    weights: np.ndarray  # [B] float32
    indices: np.ndarray  # [B] int64

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.rewards)


class Sequences(NamedTuple):
    """B sequences of L steps, as a policy with memory learns from them.

    Attributes:
        batch: `[L, B]`, with `per_env["state"]`, the memory before the first step.
        weights: importance-sampling weights, as of `Transitions`.
        indices: the places of the sequences in their buffer, for the priorities that flow back.
        burn_in: the first steps, which bring the memory up to date and give no loss.
    """

    batch: SampleBatch
    weights: np.ndarray  # [B] float32
    indices: np.ndarray  # [B] int64
    burn_in: int

    @property
    def num_rows(self) -> int:
        """The number of transitions after the burn-in."""
        return int(np.count_nonzero(self.batch["valid"][self.burn_in :]))
