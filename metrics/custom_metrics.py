"""`CustomMetrics`: mean, minimum and maximum of what a user's callbacks return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Values(NamedTuple):
    """The values of one metric, in a size that does not depend on their number."""

    number: int
    total: float
    least: float
    largest: float


def values_of(metrics: Mapping[str, float]) -> dict[str, Values]:
    """One value of each metric."""
    return {name: Values(1, value, value, value) for name, value in metrics.items()}


def merge_values(first: Mapping[str, Values], second: Mapping[str, Values]) -> Mapping[str, Values]:
    """The values of both, by name."""
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
    """Values of metrics by name, since the last report."""

    def __init__(self) -> None:
        self._values: Mapping[str, Values] = {}
        self._names: dict[str, None] = {}  # ever seen, in order

    def add(self, values: Mapping[str, Values]) -> None:
        """Adds values by name."""
        self._names |= dict.fromkeys(values)
        self._values = merge_values(self._values, values)

    def report(self) -> dict[str, float]:
        """`NAME_mean`, `NAME_min` and `NAME_max` since the last report, NaN without values. The
        names of RLlib's block `custom_metrics`. Names that were seen once stay. Then resets the
        values."""
        none = Values(0, math.nan, math.nan, math.nan)
        report = {}
        for name in self._names:
            number, total, least, largest = self._values.get(name, none)
            report[f"{name}_mean"] = total / max(number, 1)
            report[f"{name}_min"], report[f"{name}_max"] = least, largest
        self._values = {}
        return report
