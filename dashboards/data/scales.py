"""Smooths curves, and chooses the type and the range of their y axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Values that are more than this many times as large as the values of three quarters of the groups
#: do not affect the range of the axis. The factor is large, because the return of a group that
#: learns may be 50 times as large as the returns of other groups.
OUTLIER_FACTOR = 100.0
# Negative values up to this fraction of a run's largest absolute value count as 0. A KL divergence,
# for example, can be slightly negative because of rounding.
_ROUNDING = 1e-6

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Scale:
    """The type and range of an axis of values. In a plot of curves, this is the y axis.

    Attributes:
        log: whether the axis is logarithmic. A logarithmic axis shows only values above 0.
        range: minimum and maximum of the axis. `None` means that the axis shows all values.
        note: a sentence for the reader about values that the axis does not show, or about the
            reason for a linear axis. Empty if there is nothing to say.
    """

    log: bool = False
    range: tuple[float, float] | None = None
    note: str = ""


def smoothed(values: Array, weight: float) -> Array:
    """Returns the exponential moving average of a curve.

    Each point of the result is a weighted mean of the values up to this point. The coefficient
    of a value is `weight` times the coefficient of the next value. The coefficients of a mean
    sum to 1, as in TensorBoard. So the result begins at the first value, and a constant curve
    does not change.

    Args:
        values: shape `[R]`. For a value that is not finite, the average is NaN. Such a value has no
            effect on other averages.
        weight: smoothing weight, at least 0 and below 1. With 0, the values do not change.
    """
    # Only the live page smooths curves. It needs Streamlit, which installs pandas. The import is
    # in this function, so that the report works without pandas.
    from pandas import Series

    known = np.isfinite(values)
    averages = Series(np.where(known, values, np.nan)).ewm(alpha=1.0 - weight, ignore_na=True)
    return np.where(known, averages.mean(), np.nan)


def above_zero(values: Array) -> Array:
    """Returns the values that a logarithmic axis can show, and NaN in place of other values."""
    return np.where(values > 0.0, values, np.nan)


def scale_of(groups: Mapping[str, Sequence[Array]], log: bool, robust: bool) -> Scale:
    """Returns the y axis for the curves of groups.

    Args:
        groups: for each group, the values of each run, of shape `[R]`. Values that are not finite
            are ignored.
        log: whether the user wants a logarithmic axis. The axis is linear nevertheless if a value
            is below 0, or if no value is above 0.
        robust: whether a linear axis has the range of `robust_range`.
    """
    known = {
        name: [finite for run in runs if len(finite := run[np.isfinite(run)])]
        for name, runs in groups.items()
    }
    note = ""
    if log and any(known.values()):
        values = np.concatenate([run for runs in known.values() for run in runs])
        below = sum(map(_count_below_zero, (run for runs in known.values() for run in runs)))
        if not below and np.any(values > 0.0):
            left_out = int(np.count_nonzero(values <= 0.0))
            count = f"{left_out:,} of {len(values):,} values are not above 0 and not drawn."
            return Scale(log=True, note=count if left_out else "")
        why = f"{below:,} of {len(values):,} values are below 0" if below else "no value is above 0"
        note = f"The axis is linear, because {why}."
    extents = {
        name: [(float(run.min()), float(run.max())) for run in runs] for name, runs in known.items()
    }
    range_ = robust_range(extents) if robust else None
    if range_ is None:
        return Scale(note=note)
    runs = [extent for members in extents.values() for extent in members]
    return Scale(range=range_, note=f"{note} {_leaving(runs, range_, 'runs')}".strip())


def scale_of_intervals(intervals: Mapping[str, Sequence[float]], robust: bool) -> Scale:
    """Returns the axis of a plot of one value per group, each with an interval.

    The value and each bound of an interval may be outliers independently of each other. For
    example, one run of a group may make the interval so wide that a bound is outside the range of
    the axis. The value may still be in the range.

    Args:
        intervals: value, lower bound and upper bound of each group. Numbers that are not finite are
            ignored.
        robust: whether the axis has the range of `robust_range`.
    """
    known = {
        name: [float(value) for value in values if np.isfinite(value)]
        for name, values in intervals.items()
    }
    points = {name: [(value, value) for value in values] for name, values in known.items()}
    range_ = robust_range(points) if robust else None
    if range_ is None:
        return Scale()
    extents = [(min(values), max(values)) for values in known.values() if values]
    return Scale(range=range_, note=_leaving(extents, range_, "groups"))


def robust_range(groups: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[float, float] | None:
    """Returns minimum and maximum over all runs that are not outliers, or None without outliers.

    The reach of a run is the largest absolute value of the run. The reach of a group is the
    median reach of its runs. A run is an outlier if its reach is more than `OUTLIER_FACTOR`
    times the 0.75 quantile of the reaches of all groups. If a quantile is between two values,
    the lower value is used. The medians and the quantile ignore reaches of 0.

    So at most a third of the groups, or one of two groups, have a reach above this limit.

    Args:
        groups: for each group, minimum and maximum of each run.
    """
    reaches = [_quantile([_reach(run) for run in members], 0.5) for members in groups.values()]
    limit = OUTLIER_FACTOR * _quantile(reaches, 0.75)
    runs = [run for members in groups.values() for run in members]
    kept = [run for run in runs if _reach(run) <= limit]
    if len(kept) == len(runs):
        return None
    return min(low for low, _ in kept), max(high for _, high in kept)


def _leaving(extents: Sequence[tuple[float, float]], range_: tuple[float, float], what: str) -> str:
    """Returns a sentence with the number of runs or groups that are not entirely in a range."""
    least, greatest = range_
    leaving = sum(low < least or high > greatest for low, high in extents)
    verb = "leaves" if leaving == 1 else "leave"
    return f"{leaving} of {len(extents)} {what} {verb} the range. A double click shows all values."


def _count_below_zero(run: Array) -> int:
    return int(np.count_nonzero(run < -_ROUNDING * float(np.abs(run).max())))


def _reach(extent: tuple[float, float]) -> float:
    """Returns the largest distance of the values from 0."""
    return max(abs(extent[0]), abs(extent[1]))


def _quantile(reaches: Sequence[float], part: float) -> float:
    """Returns a quantile of the reaches above 0. Between two reaches, it takes the lower reach."""
    known = [reach for reach in reaches if reach > 0.0]
    return float(np.quantile(known, part, method="lower")) if known else 0.0
