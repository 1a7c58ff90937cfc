"""What a worker is asked for when it samples, and what it answers."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from polopt.metrics.fragment_faults import NO_FAULTS, FragmentFaults
from polopt.policies.sample_batch import SampleBatch

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
        number: what `cut_short` names it by, from `next_number`; None: it can not be cut short.
        steps: T; None: as the worker's config says.
        exploration: see `Exploration`.
        uniform: the policy is ignored, and actions are uniform over the action space.
        reset_first: all environments begin new episodes.
    """

    number: int | None = None
    steps: int | None = None
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
    faults: FragmentFaults = NO_FAULTS
