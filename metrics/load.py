"""`LoadMeter`: mean and maximum of a number that changes often."""

from __future__ import annotations


class LoadMeter:
    """Mean and maximum of the values since the last report."""

    def __init__(self) -> None:
        self._sum = self._count = self._max = 0

    def add(self, value: int) -> None:
        """Counts one value, 0 or larger."""
        self._sum += value
        self._count += 1
        if value > self._max:
            self._max = value

    def report(self) -> dict[str, float]:
        """`{mean, max}` since the last report, 0 without values; then resets them."""
        report = {"mean": self._sum / max(self._count, 1), "max": self._max}
        self._sum = self._count = self._max = 0
        return report
