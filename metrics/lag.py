"""Policy lag: how many updates old the weights were that made a gradient or a batch."""

from __future__ import annotations

import numpy as np


class LagHistogram:
    """Distribution of policy lag since the last report and over the whole run.

    Lag is counted in updates: the learner's version when a gradient or batch is used, less the
    version of the weights it was made with. Bin `i` counts lag `i`; the last bin holds all larger
    ones, so that the shape of what is reported never changes.

    Args:
        bins: number of bins, the last one open.
    """

    def __init__(self, bins: int = 17) -> None:
        self._recent = np.zeros(bins, dtype=np.int64)  # [bins]
        self.lifetime = np.zeros(bins, dtype=np.int64)  # [bins]
        self._sum = 0
        self._count = 0
        self._max = 0

    def add(self, lag: int) -> None:
        """Counts one gradient or batch that was `lag` updates old.

        Raises:
            ValueError: if `lag` is negative: a version from the future is a bug, not a lag.
        """
        if lag < 0:
            raise ValueError(f"policy lag can not be negative; got {lag}")
        self._recent[min(lag, len(self._recent) - 1)] += 1
        self.lifetime[min(lag, len(self.lifetime) - 1)] += 1
        self._sum += lag
        self._count += 1
        self._max = max(self._max, lag)

    def report(self) -> dict[str, object]:
        """`{mean, max, histogram}` of what was added since the last report, then starts anew."""
        report = {
            "mean": self._sum / self._count if self._count else 0.0,
            "max": self._max,
            "histogram": self._recent.tolist(),
        }
        self._recent[:] = 0
        self._sum = self._count = self._max = 0
        return report
