"""Episodes that have ended: one with what a user may ask of it, and statistics of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Episode(NamedTuple):
    """One episode that has ended.

    Attributes:
        env_index: of its environment in the worker.
        episode_return: undiscounted sum of rewards.
        episode_len: length in environment steps.
        terminated: how it ended; False: it was truncated.
        info: the environment's infos of the last step; empty where they are not kept.
    """

    env_index: int
    episode_return: float
    episode_len: int
    terminated: bool
    info: Mapping[str, Any] = {}


class EpisodeStats(NamedTuple):
    """The E episodes that ended within one fragment. A part of the fragment's batch.

    Attributes:
        returns: `[E]` undiscounted sums of rewards.
        lengths: `[E]` lengths in environment steps.
    """

    returns: np.ndarray  # [E] float64
    lengths: np.ndarray  # [E] int64

    def __reduce__(self) -> Any:
        # Lists are smaller than arrays with their dtype descriptions. The constructor is a module
        # function because Ray would pickle a class method by value.
        return episodes_of, (self.returns.tolist(), self.lengths.tolist())

    @classmethod
    def empty(cls) -> EpisodeStats:
        """Zero episodes."""
        return cls(np.zeros(0), np.zeros(0, dtype=np.int64))

    @classmethod
    def concat(cls, parts: Iterable[EpisodeStats]) -> EpisodeStats:
        """The episodes of several fragments, in the given order."""
        parts = list(parts)
        if len(parts) < 2:
            return parts[0] if parts else cls.empty()
        return cls(
            np.concatenate([p.returns for p in parts]), np.concatenate([p.lengths for p in parts])
        )


def episodes_of(returns: list[float], lengths: list[int]) -> EpisodeStats:
    """Episodes with these returns and these lengths in environment steps, E of each."""
    return EpisodeStats(np.array(returns, dtype=np.float64), np.array(lengths, dtype=np.int64))
