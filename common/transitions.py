"""`Transitions` and `Sequences`: the batches that a replay buffer returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch


class Transitions(NamedTuple):
    """B rows of n-step transitions. A `ReplayPolicy`, such as DQN, learns from them:

        targets = rows.rewards + rows.discounts * value(rows.next_obs)
        loss = (rows.weights * huber(q(rows.obs, rows.actions) - targets)).mean()

    The next observation of a row is the observation n steps later. If the episode is truncated
    within these n steps, the next observation is the true last observation of the episode. If the
    data of the worker are interrupted within these steps, the next observation is the last
    observation before the interruption. If the episode terminates within these steps, `discounts`
    is 0, and the content of `next_obs` does not matter.

    Attributes:
        obs: the observations, as in `SampleBatch`. `ReplayPolicy.normalized` encodes them.
        actions: the actions as the policy sampled them, as in `SampleBatch`.
        rewards: the sum of gamma^k r_k over the steps of each row.
        discounts: gamma^m, where m is the number of steps of the row. 0 after `terminated`.
        next_obs: the observations after the steps of each row. Bootstrap values are computed from
            these observations.
        weights: the importance-sampling weights (Schaul et al., 2016). 1 if the buffer draws rows
            uniformly.
        indices: the indices of the rows in the buffer, for updates of their priorities.
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
        """The number B of rows."""
        return len(self.rewards)


class Sequences(NamedTuple):
    """B sequences of L steps, for a `ReplayPolicy` with memory.

    Attributes:
        batch: the sequences as a batch `[L, B]`. `per_env["state"]` is the memory before the first
            step.
        weights: the importance-sampling weights, as in `Transitions`.
        indices: the indices of the sequences in the buffer, for updates of their priorities.
        burn_in: the number of steps at the start of each sequence that only update the memory. They
            are not part of the loss.
    """

    batch: SampleBatch
    weights: np.ndarray  # [B] float32
    indices: np.ndarray  # [B] int64
    burn_in: int

    @property
    def num_rows(self) -> int:
        """The number of transitions after the burn-in steps."""
        return int(np.count_nonzero(self.batch["valid"][self.burn_in :]))
