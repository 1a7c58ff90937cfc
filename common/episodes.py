"""Episodes that have ended: one with what a user may ask of it, and statistics of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Episode(NamedTuple):
    """One episode that has ended. In `on_episode_step`, the episode so far.

    Attributes:
        env_index: index of the environment in its worker.
        episode_return: undiscounted sum of rewards.
        episode_len: length in environment steps.
        terminated: True if the episode ended by termination. False if it was truncated, or has not
            ended yet.
        info: the environment's infos of the last step. Empty where they are not kept.
        data: a dict that `on_episode_step` may fill. It is the same dict in all steps of the
            episode. Empty if the callbacks do not define `on_episode_step`.
        done: True if the episode has ended.
    """

    env_index: int
    episode_return: float
    episode_len: int
    terminated: bool
    info: Mapping[str, Any] = {}
    data: dict[str, Any] = {}  # noqa: RUF012 - the sampler gives each episode its own
    done: bool = True


class EpisodeStats(NamedTuple):
    """The E episodes that ended within one fragment. A part of the fragment's batch.

    Attributes:
        returns: `[E]` undiscounted sums of rewards.
        lengths: `[E]` lengths in environment steps.
    """

    returns: Sequence[float] = ()
    lengths: Sequence[int] = ()

    @classmethod
    def concat(cls, parts: Iterable[EpisodeStats]) -> EpisodeStats:
        """The episodes of several fragments, in the given order."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            [value for part in parts for value in part.returns],
            [value for part in parts for value in part.lengths],
        )
