"""Episode returns and lengths: what a fragment carries, and the window a report is made from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class EpisodeStats(NamedTuple):
    """The episodes that ended within one fragment; travels with it.

    Attributes:
        returns: `[E]` undiscounted sums of rewards.
        lengths: `[E]` lengths in environment steps.
    """

    returns: np.ndarray  # [E] float64
    lengths: np.ndarray  # [E] int64

    def __reduce__(self) -> Any:
        # NumPy would describe the types of these few numbers. By a function of the module: Ray
        # would send the code of a class method along.
        return episodes_of, (self.returns.tolist(), self.lengths.tolist())

    @classmethod
    def empty(cls) -> EpisodeStats:
        """No episode ended."""
        return cls(np.zeros(0), np.zeros(0, dtype=np.int64))

    @classmethod
    def concat(cls, parts: Iterable[EpisodeStats]) -> EpisodeStats:
        """The episodes of several fragments, in the order given."""
        parts = list(parts)
        if not parts:
            return cls.empty()
        return cls(
            np.concatenate([p.returns for p in parts]), np.concatenate([p.lengths for p in parts])
        )


def episodes_of(returns: list[float], lengths: list[int]) -> EpisodeStats:
    """Episodes with these returns and lengths (in environment steps), E of each."""
    return EpisodeStats(np.array(returns, dtype=np.float64), np.array(lengths, dtype=np.int64))


class EpisodeWindow:
    """Mean, minimum and maximum over the last `window` episodes, and counts.

    The mean is over the window, as RLlib's `episode_return_mean` is, so it does not jump when few
    episodes end between two reports. NaN before the first episode ends, as RLlib reports it.

    Args:
        window: how many of the last episodes count.
    """

    def __init__(self, window: int = 100) -> None:
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._since_report: list[float] = []
        self.lifetime = 0

    def add(self, episodes: EpisodeStats) -> None:
        """Takes in the episodes of one fragment."""
        returns = episodes.returns.tolist()
        self._returns.extend(returns)
        self._lengths.extend(episodes.lengths.tolist())
        self._since_report.extend(returns)
        self.lifetime += len(returns)

    def report(self) -> dict[str, float]:
        """Keys as in RLlib's `env_runners/`; starts a new 'since last report'."""
        fresh, self._since_report = self._since_report, []
        returns, lengths = self._returns, self._lengths
        return {
            "episode_return_mean": sum(returns) / len(returns) if returns else math.nan,
            "episode_return_min": min(returns, default=math.nan),
            "episode_return_max": max(returns, default=math.nan),
            "episode_len_mean": sum(lengths) / len(lengths) if lengths else math.nan,
            "episode_return_mean_since_report": sum(fresh) / len(fresh) if fresh else math.nan,
            "num_episodes": len(fresh),
            "num_episodes_lifetime": self.lifetime,
        }

    def get_state(self) -> dict[str, object]:
        """Window and counts, as JSON."""
        return {
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "lifetime": self.lifetime,
        }

    def set_state(self, state: dict[str, object]) -> None:
        """Takes back what `get_state` gave."""
        self._returns.clear()
        self._lengths.clear()
        self._returns.extend(state["returns"])  # type: ignore[arg-type]
        self._lengths.extend(state["lengths"])  # type: ignore[arg-type]
        self.lifetime = int(state["lifetime"])  # type: ignore[call-overload]
