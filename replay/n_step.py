"""`windows_of`: computes the n-step transitions of a fragment. The workers of `AsyncReplay` compute
the initial priorities of rows from these transitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions


class Windows(NamedTuple):
    """The n-step transitions of a fragment. The window of a transition is the steps of its n-step
    return. Transitions whose windows need steps after the fragment are not included.

    Attributes:
        rows: the B transitions. `indices` are the positions `t * N + n` of the rows in the
            fragment.
        complete: `[T, N]` bool. True for the B steps whose transitions are in `rows`.
    """

    rows: Transitions
    complete: np.ndarray  # [T, N]


def windows_of(batch: SampleBatch, gamma: float, n_step: int) -> Windows:
    """Computes the n-step transitions of a fragment. A `ReplayBuffer` with the same `gamma` and
    `n_step` later draws the same transitions.

    The window of a row ends early at the end of an episode, and before a row that is not `valid`
    (see `SampleBatch`).
    The result does not contain rows that are not `valid`, or rows whose windows need steps after
    the fragment. All weights are 1.

    Args:
        batch: `[T, N]`, with observations and rewards before normalisation.
        gamma: discount of a step.
        n_step: largest number of steps of a window.
    """
    steps, envs = batch.shape
    size = steps * envs
    valid = batch["valid"]
    terminated = batch.flat("terminated") & batch.flat("valid")
    own = np.zeros(size, dtype=bool)
    own[batch.successor_index] = True
    cut = terminated | batch.flat("truncated") | own
    cut.reshape(steps, envs)[:-1] |= ~valid[1:]
    obs = np.concatenate([batch.all_obs.reshape(size + envs, -1), _flat(batch.successor_obs)])
    following = np.arange(size) + envs  # positions of the next observations in `obs`
    following[batch.successor_index] = size + envs + np.arange(len(batch.successor_index))

    start = np.flatnonzero(valid)
    last = start.copy()
    rewards = batch.flat("rewards").astype(np.float32)
    returns = rewards[start]
    taken = np.ones(len(start), dtype=np.int64)
    open_ = np.zeros(len(start), dtype=bool)  # the window needs steps after the fragment
    for k in range(1, n_step):
        going = ~cut[last] & ~open_
        open_ |= going & (last >= size - envs)
        going &= ~open_
        last = np.where(going, last + envs, last)
        returns += np.float32(gamma**k) * (rewards[last] * going)
        taken += going
    discounts = (np.float32(gamma) ** np.arange(n_step + 1, dtype=np.float32))[taken]
    discounts[terminated[last]] = 0.0
    kept = ~open_
    start, last = start[kept], last[kept]
    complete = np.zeros(size, dtype=bool)
    complete[start] = True
    next_obs = obs[following[last]].reshape(len(start), *batch.all_obs.shape[2:])
    rows = Transitions(
        obs=batch.flat("obs")[start],
        actions=batch.flat("actions")[start],
        rewards=returns[kept],
        discounts=discounts[kept],
        next_obs=next_obs,
        weights=np.ones(len(start), dtype=np.float32),
        indices=start,
    )
    return Windows(rows, complete.reshape(steps, envs))


def _flat(array: np.ndarray) -> np.ndarray:
    """Reshapes `[K, ...]` to `[K, D]`. K may be 0."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
