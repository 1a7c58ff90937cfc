"""Requests for samples, and the results of workers: fragments, rounds and learning."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights

#: How actions are chosen from the policy's distribution; names of TorchRL's ExplorationType.
#: `random` samples, `mode` and `deterministic` use the most likely action, `mean` the mean.
Exploration = Literal["random", "mode", "mean", "deterministic"]

_numbers = itertools.count(1)


def next_number() -> int:
    """A number that no other request of this process has. Collectors may use the same workers one
    after the other, and a late early stop must not end a fragment of the next one."""
    return next(_numbers)


class SampleRequest(NamedTuple):
    """Request for one fragment.

    Attributes:
        number: identifies the request in `stop_early`, from `next_number`; None: the fragment
            cannot be stopped early.
        steps: T; None: `rollout_fragment_length` of the worker's config.
        frames: environment steps to sample at least: rows lost to next-step resets are made up
            for with further steps; None: T steps, without a minimum.
        exploration: see `Exploration`.
        uniform: actions are uniform over the action space; the policy is not used.
        reset_first: all environments begin new episodes.
    """

    number: int | None = None
    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False


class Fragment(NamedTuple):
    """Result of `RolloutWorker.collect`.

    Attributes:
        batch: samples, postprocessed by the policy and by the user's `postproc`.
        frames: environment steps in it, counted before `postproc`, which may drop or add rows.
        steps: T as sampled; fewer than requested if the fragment was stopped early.
        sample_s: seconds spent sampling.
        faults: faults of environments, and values that are not finite.
    """

    batch: SampleBatch
    frames: int
    steps: int
    sample_s: float
    faults: DataFaults = NO_FAULTS


class RoundInfo(NamedTuple):
    """Counts and statistics of a round of sampling, besides its batch or gradient.

    Attributes:
        env_steps: valid rows sampled.
        episodes: episodes that ended in the round.
        steps: T; fewer than the fragment length if the fragment was stopped early.
        sample_s: seconds spent sampling.
        faults: faults of environments, and values that are not finite.
        worker_index: the worker.
        acted: version of the weights that acted; the oldest if there were several.
        fresh: of a gradient: number of rows that are in no earlier gradient.
        last: of a gradient: it is the last of its rollout.
        restarts_below: number of workers below this one that were replaced in this round.
        gradient_s: seconds of the gradient, compression included.
    """

    env_steps: int
    episodes: EpisodeStats
    steps: int
    sample_s: float
    faults: DataFaults = NO_FAULTS
    worker_index: int = 0
    acted: int = 0
    fresh: int = 0
    last: bool = True
    restarts_below: int = 0
    gradient_s: float = 0.0


class LearnInfo(NamedTuple):
    """Result of `RolloutWorker.learn`, a round of decentralized learning.

    Attributes:
        stats: learner statistics over the rows of all ranks.
        updates: number of updates in this round.
        version: version of the weights before the round.
        acted: version of the weights that sampled; the oldest if there were several.
        learn_s: seconds, sums over the group included.
        allreduce_s: seconds in sums over the group, waiting for other ranks included.
        weights: the weights after the round, if the call requested them.
        checksum: SHA-256 of the weights, if the call requested it.
        broken: why the group broke; None: it did not. The last gradient is dropped then.
        vetoed: the fragment of a rank held values that are not finite, so no rank learned.
        non_finite_gradients: number of this rank's gradients that were not finite; no rank has
            applied their sums.
        skew_s: seconds of `allreduce_s` that this rank waited for others to finish sampling.
        skipped_updates: updates of this round that all ranks skipped because the gradient was not
            finite.
    """

    stats: dict[str, float]
    updates: int
    version: int
    acted: int
    learn_s: float
    allreduce_s: float
    weights: Weights | None = None
    checksum: str | None = None
    broken: str | None = None
    vetoed: bool = False
    non_finite_gradients: int = 0
    skew_s: float = 0.0
    skipped_updates: int = 0
