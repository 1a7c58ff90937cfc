"""The n-step transitions of a fragment and of stored rows. Both follow the same windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.replay.replay_unit import ReplayUnit
from polopt.replay.streams import CUT, TERMINATED, VALID, StreamTail, flags_of


class NStepReturns(NamedTuple):
    """The n-step returns of B rows. The window of a row is the steps of its n-step return.

    Attributes:
        last: the positions of the last rows of the windows.
        rewards: the sums of gamma^k r_k over the steps of the windows.
        discounts: gamma^m, where m is the number of steps of a window. 0 after `terminated`.
    """

    last: np.ndarray  # [B] int64
    rewards: np.ndarray  # [B] float32
    discounts: np.ndarray  # [B] float32


def n_step_returns(
    first: np.ndarray,
    rewards: np.ndarray,
    flags: np.ndarray,
    step_after: np.ndarray,
    gamma: float,
    n_step: int | np.ndarray,
) -> NStepReturns:
    """Computes n-step returns. A window ends after `n_step` steps, or at a row with the flag `CUT`.

    Args:
        first: `[B]` int64, the positions of the first rows of the windows.
        rewards: float32, the rewards of all rows.
        flags: the flags of all rows, see `flags_of`.
        step_after: the position of the row one step later, for all rows without the flag `CUT`.
        gamma: discount of a step.
        n_step: largest number of steps of a window, or one number `[B]` for each window.
    """
    most = n_step if isinstance(n_step, int) else int(n_step.max(initial=1))
    last, returns, ends = first, rewards.take(first), flags.take(first)
    steps = np.ones(len(first), dtype=np.int64)
    for k in range(1, most):
        going = ((ends & CUT) == 0) & (k < n_step)
        last = np.where(going, step_after.take(last), last)
        returns += np.float32(gamma**k) * (rewards.take(last) * going)
        ends = np.where(going, flags.take(last), ends)
        steps += going
    discounts = (np.float32(gamma) ** np.arange(most + 1, dtype=np.float32)).take(steps)
    discounts[(ends & TERMINATED) > 0] = 0.0
    return NStepReturns(last, returns, discounts)


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
    `n_step` later draws the same transitions. The workers of `AsyncReplay` compute the initial
    priorities of rows from these transitions.

    The window of a row ends early at the end of an episode, and before a row that is not `valid`
    (see `flags_of`).
    The result does not contain rows that are not `valid`, or rows whose windows need steps after
    the fragment. All weights are 1.

    Args:
        batch: `[T, N]`, with observations and rewards before normalisation.
        gamma: discount of a step.
        n_step: largest number of steps of a window.
    """
    steps, envs = batch.shape
    size = steps * envs
    flags = flags_of(batch).reshape(-1)
    known = flags.copy()
    if batch.row_counts is None:
        known[-envs:] |= CUT  # the steps after the fragment are not known
    else:
        slots = np.flatnonzero(batch.row_counts)
        known[(batch.row_counts[slots] - 1) * envs + slots] |= CUT
    first, rewards = np.flatnonzero(batch["valid"]), batch.flat("rewards").astype(np.float32)
    returns = n_step_returns(first, rewards, known, np.arange(size) + envs, gamma, n_step)
    full = (returns.last - first) // envs == n_step - 1
    kept = full | ((flags[returns.last] & CUT) > 0)
    first, last = first[kept], returns.last[kept]
    obs = np.concatenate([batch.all_obs.reshape(size + envs, -1), _flat(batch.successor_obs)])
    following = np.arange(size) + envs  # positions of the next observations in `obs`
    following[batch.successor_index] = size + envs + np.arange(len(batch.successor_index))
    complete = np.zeros(size, dtype=bool)
    complete[first] = True
    rows = Transitions(
        obs=batch.flat("obs")[first],
        actions=batch.flat("actions")[first],
        rewards=returns.rewards[kept],
        discounts=returns.discounts[kept],
        next_obs=obs[following[last]].reshape(len(first), *batch.all_obs.shape[2:]),
        weights=np.ones(len(first), dtype=np.float32),
        indices=first,
    )
    return Windows(rows, complete.reshape(steps, envs))


class TransitionUnit(ReplayUnit):
    """Draws n-step transitions from a `ReplayBuffer`.

    Args:
        gamma: discount of a step.
        n_step: largest number of steps of a window. With a pair, it is drawn for each drawn row,
            uniformly between the two numbers, which are included.
    """

    name = "transition"

    def __init__(self, gamma: float, n_step: int | Sequence[int]) -> None:
        self.gamma = gamma
        self.n_step = list(n_step) if isinstance(n_step, Sequence) else n_step
        self.span = n_step[1] if isinstance(n_step, Sequence) else n_step

    def options(self) -> dict[str, Any]:
        """See `ReplayUnit.options`."""
        return {"replay_unit": self.name, "n_step": self.n_step}

    def needs_successor(self, flags: np.ndarray) -> np.ndarray:
        """See `ReplayUnit.needs_successor`. The learner does not bootstrap from the next
        observation of a row with `terminated`."""
        return (flags & (VALID | TERMINATED)) == VALID

    def drawable(self, flags: np.ndarray, tail: StreamTail, ended: bool) -> np.ndarray:
        """Returns `[K, N]` bool: the transitions of a tail whose windows are complete. See
        `ReplayUnit.drawable`."""
        found = (flags & VALID) > 0
        last = slice(max(0, len(flags) - self.span), None)  # the last `span` steps
        closed = (flags[last] & CUT) > 0
        closed[-1] &= ~tail.open
        if self.span > 1:
            closed = np.logical_or.accumulate(closed[::-1])[::-1]
        found[last] &= closed
        return found

    def read(
        self,
        arrays: Mapping[str, np.ndarray],
        places: np.ndarray,
        weights: np.ndarray,
        indices: np.ndarray,
        rng: np.random.Generator,
    ) -> Transitions:
        """Reads the transitions of drawn rows.

        Args:
            arrays: the columns of the stored rows.
            places: `[B]`, the places of the drawn rows in the columns.
            weights: `[B]` float32, the weights of the rows.
            indices: `[B]`, the serial numbers of the rows.
            rng: draws the numbers of steps.
        """
        n_step: int | np.ndarray = self.span
        if isinstance(self.n_step, list):
            fewest, most = self.n_step
            n_step = rng.integers(fewest, most, size=len(places), endpoint=True)
        following = arrays["next"]
        last, returns, discounts = n_step_returns(
            places, arrays["rewards"], arrays["flags"], following, self.gamma, n_step
        )
        return Transitions(
            obs=arrays["obs"].take(places, axis=0),
            actions=arrays["actions"].take(places, axis=0),
            rewards=returns,
            discounts=discounts,
            next_obs=arrays["obs"].take(following.take(last), axis=0),
            weights=weights,
            indices=indices,
        )


def _flat(array: np.ndarray) -> np.ndarray:
    """Reshapes `[K, ...]` to `[K, D]`. K may be 0."""
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
