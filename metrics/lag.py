"""Histograms of policy lag, and of the age and priority lag of replayed rows.

The policy lag of a batch or gradient is the number of updates since its weights were current. The
priority lag of a replayed row is the number of updates between the computation of the row's
priority and the use of the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import numpy as np

from polopt.metrics.number import Number, declare


def distribution(
    key: str, unit: str, meaning: str, bins: str, metrics: tuple[str, str, str] = ("", "", "")
) -> tuple[Number, ...]:
    """Declares the numbers of a `report` of this module: mean, maximum and histogram.

    Args:
        key: path of the report.
        unit: unit of the values.
        meaning: what a value is.
        bins: what the bins count.
        metrics: names of the metrics in Prometheus of mean, maximum and histogram.
    """
    mean, most, histogram = metrics
    return declare(f"""
        {key}/mean ({unit}, metric={mean}): mean {meaning}
        {key}/max ({unit}, metric={most}): largest {meaning}
        {key}/histogram ({unit}, histogram, metric={histogram}): distribution of this {bins}
    """)


def _of_weights(
    name: str, whose: str, histogram: str = "", rollouts: str = ""
) -> tuple[Number, ...]:
    bins = "lag. Bin i of 17 counts the lag i. The last bin also counts all larger lags"
    metrics = (f"lag_mean{{kind={name}}}", f"lag_max{{kind={name}}}", histogram)
    lag = f"{name} lag in the interval: the updates since the weights that {whose} were current"
    in_rollouts = (
        f"{name} lag in rollouts from which the policy has learned since then, up to 1,024"
    )
    return (
        *distribution(f"{name}_lag", "updates", lag, bins, metrics),
        *distribution(f"{name}_lag_rollouts", "rollouts", in_rollouts, bins, (rollouts, "", "")),
    )


#: The numbers of two `LagMeter`s.
NUMBERS = (
    *_of_weights("policy", "chose the actions", "policy_lag", "lag_rollouts"),
    *_of_weights("gradient", "computed the gradients"),
)


class LagHistogram:
    """Distribution of policy lag since the last report.

    Bin `i` counts lag `i`. The last bin also counts all larger lags, so the reported list has a
    constant length.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int = 17) -> None:
        self._histogram = [0] * bins
        self._sum = 0
        self._max = 0

    def add(self, lag: int, weight: int = 1) -> None:
        """Counts a gradient with this lag, or the data of `weight` environments in a batch.

        Raises:
            ValueError: if `lag` is negative, which is a bug in the caller.
        """
        if lag < 0:
            raise ValueError(f"policy lag cannot be negative; got {lag}")
        self._histogram[min(lag, len(self._histogram) - 1)] += weight
        self._sum += lag * weight
        self._max = max(self._max, lag)

    def report(self) -> dict[str, object]:
        """Returns `{mean, max, histogram}` since the last report, and resets them."""
        histogram = self._histogram
        mean = self._sum / max(sum(histogram), 1)
        report = {"mean": mean, "max": self._max, "histogram": histogram}
        self._histogram, self._sum, self._max = [0] * len(histogram), 0, 0
        return report


class LagMeter:
    """Measures policy lag in updates and in rollouts.

    The lag in updates is the learner's version when it uses a batch or gradient, minus the version
    of the weights that produced this batch or gradient. With a gradient for each minibatch of a
    rollout, this lag does not measure staleness: in a fully synchronous system, the last gradient
    of 4 epochs of 4 minibatches has a lag of 15 updates. The lag in rollouts is the number of
    rollouts that the learner has finished since these weights were current.

    Attributes:
        in_updates: histogram of lag in updates.
        in_rollouts: histogram of lag in rollouts.
    """

    def __init__(self) -> None:
        self.in_updates = LagHistogram()
        self.in_rollouts = LagHistogram()

    def add(self, version: int, now: int, clock: LearnedVersions, weight: int = 1) -> None:
        """Counts a batch or gradient right before the learner uses it.

        Args:
            version: version of the weights that produced the batch or gradient.
            now: version of the learner's weights.
            clock: the versions at which the learner finished its rollouts.
            weight: number of environments in the batch whose data have this lag.
        """
        self.in_updates.add(now - version, weight)
        self.in_rollouts.add(clock.since(version), weight)


class ArrayHistogram(ABC):
    """Distribution of integers since the last report. A subclass says in which bin each integer is.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int) -> None:
        self._bins = bins
        self._begin()

    def _begin(self) -> None:
        self._counts = np.zeros(self._bins, np.int64)
        self._sum = self._max = 0

    @abstractmethod
    def _places(self, values: np.ndarray) -> np.ndarray:
        """Returns the bins of integers, counted from 0. The last bin also counts all places after
        it."""

    def add(self, values: np.ndarray) -> None:
        """Counts integers of shape `[B]`, all at least 0."""
        places = np.minimum(self._places(values), self._bins - 1).astype(np.int64)
        self._counts += np.bincount(places, minlength=self._bins)
        self._sum += int(np.add.reduce(values))  # with less overhead than the methods of arrays
        self._max = max(self._max, int(np.maximum.reduce(values, initial=0)))

    def report(self) -> dict[str, object]:
        """Returns `{mean, max, histogram}` since the last report, and resets them."""
        mean = self._sum / max(int(self._counts.sum()), 1)
        report = {"mean": mean, "max": self._max, "histogram": self._counts.tolist()}
        self._begin()
        return report


class AgeHistogram(ArrayHistogram):
    """Distribution of the ages of rows that were drawn from a replay buffer.

    The age of a row is the number of rows that arrived in the buffer after this row and before the
    row was drawn. The bins divide the capacity of the buffer into equal parts. The last bin also
    counts older rows.

    Args:
        capacity: capacity of the buffer in rows.
        bins: number of bins.
    """

    def __init__(self, capacity: int, bins: int = 16) -> None:
        super().__init__(bins)
        self._width = max(capacity / bins, 1.0)

    def _places(self, values: np.ndarray) -> np.ndarray:
        return values // self._width


class DoublingHistogram(ArrayHistogram):
    """Distribution of integers from 0 to millions.

    Bin 0 counts zeros. Bin `i` counts numbers from `2^(i-1)` to `2^i - 1`. The last bin also counts
    all larger numbers.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int = 22) -> None:
        super().__init__(bins)

    def _places(self, values: np.ndarray) -> np.ndarray:
        # The exponents are 0 for 0, 1 for 1, 2 for the values 2 and 3, and 3 for the values 4 to 7.
        return np.frexp(values.astype(np.float64))[1]


class LearnedVersions:
    """Remembers the version of the weights at the end of learning from each rollout.

    Args:
        memory: number of rollouts to remember. `since` returns at most this number.
    """

    def __init__(self, memory: int = 1024) -> None:
        self._ends: deque[int] = deque(maxlen=memory)

    def end_rollout(self, version: int) -> None:
        """Records that the learner has finished a rollout and its weights now have `version`.

        If `version` is lower than at the end of the previous rollout, removes all earlier records.
        """
        if self._ends and version < self._ends[-1]:
            self.clear()
        self._ends.append(version)

    def since(self, version: int) -> int:
        """Returns how many rollouts the learner has finished since `version`."""
        count = 0
        for end in reversed(self._ends):
            if end <= version:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Removes all records. Call it when the versions of a run start again."""
        self._ends.clear()
