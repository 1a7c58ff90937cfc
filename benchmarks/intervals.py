"""Interquartile mean over seeds, and its 95 percent interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy import stats


def interquartile_mean(values: Any, axis: int = 0) -> Any:
    """Mean of the middle half."""
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 percent interval of the interquartile mean, percentile bootstrap with a fixed seed."""
    found = stats.bootstrap((values,), interquartile_mean, method="percentile", rng=0)
    return found.confidence_interval
