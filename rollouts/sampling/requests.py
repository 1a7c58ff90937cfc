"""What a worker is asked for when it samples, and what it answers."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights

#: How actions follow from the policy's distribution; names as TorchRL's ExplorationType has them.
#: `random` draws them, `mode` and `deterministic` take the most likely, `mean` the expected one.
Exploration = Literal["random", "mode", "mean", "deterministic"]

_numbers = itertools.count(1)


def next_number() -> int:
    """A number that no other request of this process has: workers outlive who collects with them,
    and a late cut must not meet a fragment of the next one."""
    return next(_numbers)


class SampleRequest(NamedTuple):
    """How one fragment is to be sampled.

    Attributes:
        number: what `stop_early` names it by, from `next_number`; None: it can not be cut short.
        steps: T; None: as the worker's config says.
        exploration: see `Exploration`.
        uniform: the policy is ignored, and actions are uniform over the action space.
        reset_first: all environments begin new episodes.
    """

    number: int | None = None
    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False


class Fragment(NamedTuple):
    """What a collector's worker answers.

    Attributes:
        batch: postprocessed, by the policy and by the user's `postproc`.
        frames: environment steps in it, counted before `postproc`, which may drop or add rows.
        steps: T as sampled; fewer than asked for if it was cut short.
        sample_s: seconds spent sampling.
        faults: of environments, and numbers that are not finite.
    """

    batch: SampleBatch
    frames: int
    steps: int
    sample_s: float
    faults: DataFaults = NO_FAULTS


class RoundInfo(NamedTuple):
    """What a round of sampling tells besides its batch or gradient.

    Attributes:
        env_steps: valid rows sampled.
        episodes: that ended in it.
        steps: T, fewer than the fragment length if it was cut short.
        sample_s: seconds spent sampling.
        faults: of environments, and numbers that are not finite.
        worker_index: whose round it was.
        acted: version of the weights that acted, the oldest if several did.
        fresh: of a gradient: rows in it that no gradient was computed from before.
        last: of a gradient: none of the same rollout will follow.
        restarts_below: workers below it that were replaced in this round.
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
    """What a round of decentralised learning tells.

    Attributes:
        stats: learner statistics over all ranks' rows.
        updates: made in this round.
        version: of the weights that learning began with.
        acted: of those that sampled, the oldest if several did.
        learn_s: seconds, sums over the group included.
        allreduce_s: seconds in sums over the group, waiting for other ranks included.
        weights: of the rank that was asked for them.
        checksum: SHA-256 of the weights, from ranks that were asked for it.
        broken: why the group broke, if it did; then the last gradient was thrown away.
        vetoed: some rank's fragment held bad numbers, so no rank learned.
        non_finite_gradients: this rank's own that were not finite; no rank has applied their sums.
        skew_s: seconds of `allreduce_s` that this rank waited for others to finish sampling.
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
