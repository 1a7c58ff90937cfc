"""Learner statistics: means over the rows that were learned from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: Reported for every policy, under the names RLlib 2.60 uses. 0 where a loss has no such term.
LEARNER_KEYS = (
    "policy_loss",
    "vf_loss",
    "entropy",
    "total_loss",
    "mean_kl_loss",
    "vf_explained_var",
    "grad_norm",
    "default_optimizer_learning_rate",
)


class LearnerStats:
    """Mean of each learner statistic since the last report, weighted by rows."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._last: dict[str, float] = dict.fromkeys(LEARNER_KEYS, 0.0)

    def add(self, stats: Mapping[str, float], rows: int) -> None:
        """Adds statistics that are means over `rows` rows; those that are not finite are of an
        update that was left out, and are left out too."""
        for key, value in stats.items():
            if not math.isfinite(value):
                continue
            self._sums[key] = self._sums.get(key, 0.0) + value * rows
            self._weights[key] = self._weights.get(key, 0.0) + rows

    def report(self) -> dict[str, float]:
        """Means since the last report; a key that got nothing new repeats its last value."""
        for key, total in self._sums.items():
            if self._weights[key] > 0:
                self._last[key] = total / self._weights[key]
        self._sums.clear()
        self._weights.clear()
        return dict(self._last)


def mean_stats(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """One mean of statistics that are means over so many rows each."""
    means = LearnerStats()
    for stats, rows in parts:
        means.add(stats, rows)
    keys = {key for stats, _ in parts for key in stats}
    return {key: value for key, value in means.report().items() if key in keys}
