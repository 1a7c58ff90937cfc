"""`SampleRequest`: how a fragment is sampled, where that is not as the config says."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: How actions are chosen from the policy's distribution; names of TorchRL's ExplorationType.
#: `random` samples, `mode` and `deterministic` use the most likely action, `mean` the mean.
Exploration = Literal["random", "mode", "mean", "deterministic"]


class SampleRequest(NamedTuple):
    """Request for one fragment.

    Attributes:
        steps: T; None: `rollout_fragment_length` of the worker's config.
        frames: environment steps to sample at least: rows lost to next-step resets are made up
            for with further steps; None: T steps, without a minimum.
        exploration: see `Exploration`.
        uniform: actions are uniform over the action space; the policy is not used.
        reset_first: all environments begin new episodes.
    """

    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False
