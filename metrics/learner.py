"""Learner statistics: means over the rows of the updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

#: Keys that are reported for every policy: the keys of RLlib 2.60, `clip_fraction`, and the means
#: of a critic's values and value targets. A key is 0 if the policy's loss does not have that term.
LEARNER_KEYS = (
    "policy_loss",
    "vf_loss",
    "entropy",
    "total_loss",
    "mean_kl_loss",
    "clip_fraction",
    "vf_explained_var",
    "vf_predicted_mean",
    "vf_target_mean",
    "grad_norm",
    "default_optimizer_learning_rate",
)


class LearnerStats:
    """Mean of each learner statistic since the last report, weighted by rows."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # and weights
        self._last: dict[str, float] = dict.fromkeys(LEARNER_KEYS, 0.0)

    def add(self, stats: Mapping[str, float], rows: int) -> None:
        """Adds statistics that are means over `rows` rows.

        Non-finite values are left out: they belong to an update that was skipped.
        """
        for key, value in stats.items():
            if math.isfinite(value):
                sums = self._sums[key]
                sums[0] += value * rows
                sums[1] += rows

    def report(self) -> dict[str, float]:
        """Means since the last report. A key without new values keeps its last mean."""
        for key, (total, weight) in self._sums.items():
            if weight > 0:
                self._last[key] = total / weight
        self._sums.clear()
        return dict(self._last)


def mean_stats(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Means over all rows, from pairs of statistics and the number of rows of their means."""
    means = LearnerStats()
    for stats, rows in parts:
        means.add(stats, rows)
    keys = {key for stats, _ in parts for key in stats}
    return {key: value for key, value in means.report().items() if key in keys}
