"""`LearnerStats`: means of the learner's statistics over the rows of its updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

#: Keys that results contain for every policy. Most of them are keys of RLlib. A statistic is NaN if
#: the policy does not compute it.
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
    """Mean of each learner statistic since the last report, weighted by rows.

    Args:
        further: keys of statistics that a policy computes in addition to `LEARNER_KEYS`. All keys
            are NaN in reports before their first value.
    """

    def __init__(self, further: Iterable[str] = ()) -> None:
        # For each key, the weighted sum and the sum of weights.
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._last: dict[str, float] = dict.fromkeys((*LEARNER_KEYS, *further), math.nan)

    def add(self, stats: Mapping[str, float], rows: int) -> None:
        """Adds statistics that are means over `rows` rows.

        Ignores values that are not finite, such as the values of a skipped update.
        """
        for key, value in stats.items():
            if math.isfinite(value):
                sums = self._sums[key]
                sums[0] += value * rows
                sums[1] += rows

    def report(self) -> dict[str, float]:
        """Returns the means since the last report. A key without new values keeps its last mean."""
        for key, (total, weight) in self._sums.items():
            if weight > 0:
                self._last[key] = total / weight
        self._sums.clear()
        return dict(self._last)


def mean_stats(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Returns the mean of each statistic over all rows. It is NaN for a statistic without a finite
    value.

    Args:
        parts: pairs of statistics and the number of rows that these statistics are means over.
    """
    means = LearnerStats()
    for stats, rows in parts:
        means.add(stats, rows)
    report = means.report()
    return {key: report.get(key, math.nan) for stats, _ in parts for key in stats}
