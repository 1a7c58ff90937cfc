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


class CustomMetrics:
    """Values of metrics by name, since the last report."""

    def __init__(self) -> None:
        self._values: dict[str, Values] = {}
        self._names: dict[str, None] = {}  # ever seen, in order

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds one value of each metric."""
        self.merge({name: Values(1, value, value, value) for name, value in metrics.items()})

    def merge(self, values: Mapping[str, Values]) -> None:
        """Adds what `values` of another object returned."""
        for name, new in values.items():
            old = self._values.get(name, new._replace(number=0, total=0.0))
            self._names[name] = None
            self._values[name] = Values(
                old.number + new.number,
                old.total + new.total,
                min(old.least, new.least),
                max(old.largest, new.largest),
            )

    def values(self) -> dict[str, Values]:
        """The values by name."""
        return dict(self._values)

    def report(self) -> dict[str, float]:
        """`NAME_mean`, `NAME_min` and `NAME_max` since the last report, NaN without values; the
        names of RLlib's block `custom_metrics`. Names that were seen once stay. Then resets the
        values."""
        none = Values(0, math.nan, math.nan, math.nan)
        report = {}
        for name in self._names:
            number, total, least, largest = self._values.get(name, none)
            report[f"{name}_mean"] = total / max(number, 1)
            report[f"{name}_min"], report[f"{name}_max"] = least, largest
        self._values.clear()
        return report
