"""The interquartile mean over seeds, and its 95 percent interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy import stats


def interquartile_mean(values: Any, axis: int = 0) -> Any:
    """Returns the mean of the middle half of the values."""
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 percent interval of the interquartile mean, by a percentile bootstrap."""
    found = stats.bootstrap((values,), interquartile_mean, method="percentile", rng=0)
    return found.confidence_interval
