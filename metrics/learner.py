"""`LearnerStats`: means of the learner's statistics over the rows of its updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from polopt.metrics.number import declare

#: The statistics that results contain for every policy. Most keys are keys of RLlib. A statistic is
#: NaN if the policy does not compute it.
NUMBERS = declare("""
    policy_loss (loss): loss of the policy. If advantages are standardised, as in PPO, the policy
        loss is close to 0, and a growing magnitude is a warning sign. In SAC and TD3, it falls when
        the predicted returns rise
    vf_loss (loss, title=Value loss): loss of the value function. It falls while the critic learns,
        and rises again when returns grow
    entropy (nats): entropy of the action distribution. With discrete actions, a fall to 0 early in
        training means that exploration has ended. With continuous actions, the entropy may be
        negative
    total_loss (loss): weighted sum of the losses, which the learner minimises
    mean_kl_loss (nats, title=KL divergence): KL divergence between the old policy and the updated
        policy. In PPO, the old policy is the policy that chose the actions
    clip_fraction (share): share of rows whose probability ratio is outside of `[1 - clip_param, 1 +
        clip_param]`
    vf_explained_var (title=Explained variance): explained variance of the value function. 1 means
        that predictions are exact up to a constant error. 0 means that they are not better than a
        constant
    vf_predicted_mean (value, title=Predicted value): mean predicted value of the rows from which
        the learner learned
    vf_target_mean (value, title=Value target): mean value target of these rows: an estimate of the
        discounted return, which the critic learns to predict
    grad_norm (norm, title=Gradient norm): norm of the gradient before clipping. Spikes are a sign
        of instability
    default_optimizer_learning_rate (learning rate, title=Learning rate): current learning rate,
        which follows the schedule
""")
#: The keys of these statistics.
LEARNER_KEYS = tuple(number.key for number in NUMBERS)


class LearnerStats:
    """Mean of each learner statistic since the last report, weighted by rows.

    Args:
        keys: keys of the statistics that a policy computes. They are NaN in reports before their
            first value.
    """

    def __init__(self, keys: Iterable[str] = LEARNER_KEYS) -> None:
        # For each key, the weighted sum and the sum of weights.
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._last: dict[str, float] = dict.fromkeys(keys, math.nan)

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
