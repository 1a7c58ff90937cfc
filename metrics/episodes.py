"""Running statistics over the last episodes."""

from __future__ import annotations

import math
from collections import deque

from polopt.common.episodes import EpisodeStats


class EpisodeWindow:
    """Mean, minimum and maximum over the last `window` episodes, and episode counts.

    The mean is over the window, as in RLlib's `episode_return_mean`, so that it does not jump when
    few episodes end between two reports. It is NaN before the first episode ends, as in RLlib.

    Args:
        window: number of episodes of the window.

    Attributes:
        lifetime: number of episodes since the start of the run.
    """

    def __init__(self, window: int = 100) -> None:
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._sum_since_report, self._count_since_report = 0.0, 0
        self.lifetime = 0

    def add(self, episodes: EpisodeStats) -> None:
        """Adds the episodes of one fragment."""
        returns = episodes.returns.tolist()
        self._returns.extend(returns)
        self._lengths.extend(episodes.lengths.tolist())
        self._sum_since_report += sum(returns)
        self._count_since_report += len(returns)
        self.lifetime += len(returns)

    def report(self) -> dict[str, float]:
        """Statistics under RLlib's keys of `env_runners/`; resets those since the last report."""
        total, count = self._sum_since_report, self._count_since_report
        self._sum_since_report, self._count_since_report = 0.0, 0
        returns, lengths = self._returns, self._lengths
        return {
            "episode_return_mean": sum(returns) / len(returns) if returns else math.nan,
            "episode_return_min": min(returns, default=math.nan),
            "episode_return_max": max(returns, default=math.nan),
            "episode_len_mean": sum(lengths) / len(lengths) if lengths else math.nan,
            "episode_return_mean_since_report": total / count if count else math.nan,
            "num_episodes": count,
            "num_episodes_lifetime": self.lifetime,
        }

    def get_state(self) -> dict[str, object]:
        """Window and counts, serialisable as JSON."""
        return {
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "lifetime": self.lifetime,
        }

    def set_state(self, state: dict[str, object]) -> None:
        """Restores a state from `get_state`."""
        self._returns.clear()
        self._lengths.clear()
        self._returns.extend(state["returns"])  # type: ignore[arg-type]
        self._lengths.extend(state["lengths"])  # type: ignore[arg-type]
        self.lifetime = int(state["lifetime"])  # type: ignore[call-overload]
