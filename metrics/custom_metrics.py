"""`CustomMetrics`: mean, minimum and maximum of the numbers that a user's callbacks return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Values(NamedTuple):
    """A summary of the values of one metric: their number, sum, minimum and maximum."""

    number: int
    total: float
    least: float
    largest: float


def values_of(metrics: Mapping[str, float | Sequence[float]]) -> dict[str, Values]:
    """Returns the summary of each metric, which has one value or a list of values. A metric with an
    empty list is left out."""
    lists = {name: one if isinstance(one, Sequence) else [one] for name, one in metrics.items()}
    return {
        name: Values(len(values), sum(values), min(values), max(values))
        for name, values in lists.items()
        if values
    }


def merge_values(first: Mapping[str, Values], second: Mapping[str, Values]) -> Mapping[str, Values]:
    """Returns summaries over the values of both arguments, by name."""
    if not first or not second:
        return first or second
    both = dict(first)
    for name, new in second.items():
        old = both.get(name)
        both[name] = (
            new
            if old is None
            else Values(
                old.number + new.number,
                old.total + new.total,
                min(old.least, new.least),
                max(old.largest, new.largest),
            )
        )
    return both


class CustomMetrics:
    """Collects the values of metrics since the last report."""

    def __init__(self) -> None:
        self._values: Mapping[str, Values] = {}
        self._names: dict[str, None] = {}  # all names since the start, in order

    def add(self, values: Mapping[str, Values]) -> None:
        """Adds the values of one call to a worker, by name."""
        self._names |= dict.fromkeys(values)
        self._values = merge_values(self._values, values)

    def report(self) -> dict[str, float]:
        """Returns `NAME_mean`, `NAME_min` and `NAME_max` since the last report, and resets the
        values.

        The keys have the form of RLlib's block `custom_metrics`. Once a metric has occurred, every
        later report contains its keys. They are NaN if the metric has no new values.
        """
        none = Values(0, math.nan, math.nan, math.nan)
        report = {}
        for name in self._names:
            number, total, least, largest = self._values.get(name, none)
            report[f"{name}_mean"] = total / max(number, 1)
            report[f"{name}_min"], report[f"{name}_max"] = least, largest
        self._values = {}
        return report
