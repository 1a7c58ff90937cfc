"""How values of several runs are drawn: smoothed, on which axis, and in which range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: A run leaves the range if its values reach so many times as far from 0 as three quarters of the
#: groups do. Where most groups do not learn, the return of a group that learns may be 50 times as
#: large.
OUTLIER_FACTOR = 100.0
# Of the largest value of a run: a KL divergence below 0 by so little is 0 but for rounding.
_ROUNDING = 1e-6

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Scale:
    """The axis of values: of a plot of curves the y axis.

    Attributes:
        log: whether it is logarithmic. Values that are not above 0 are not drawn then.
        range: the least and the greatest value that it contains. None: all values.
        note: what is not drawn, or leaves the range, or why the axis is linear.
    """

    log: bool = False
    range: tuple[float, float] | None = None
    note: str = ""


def smoothed(values: Array, weight: float) -> Array:
    """Exponential moving average: each value counts `weight` times as much as the one after it.

    The weights of each average sum to 1 (the debiased average that TensorBoard draws), so that it
    begins at the first value and a constant stays what it is.

    Args:
        values: shape `[R]`. Entries that are not finite are NaN in the average and have no weight
            in the others.
        weight: from 0, which leaves the values as they are, to below 1.
    """
    # Here, because a report needs no smoothing. The page has pandas from Streamlit.
    from pandas import Series

    known = np.isfinite(values)
    averages = Series(np.where(known, values, np.nan)).ewm(alpha=1.0 - weight, ignore_na=True)
    return np.where(known, averages.mean(), np.nan)


def above_zero(values: Array) -> Array:
    """The values that a logarithmic axis has. NaN for the others."""
    return np.where(values > 0.0, values, np.nan)


def scale_of(groups: Mapping[str, Sequence[Array]], log: bool, robust: bool) -> Scale:
    """The y axis of the curves of some groups.

    Args:
        groups: values of each run of each group, of shape `[R]`. Values that are not finite do not
            count.
        log: whether a logarithmic axis is wanted. With values below 0 it is linear.
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
        note = f"The axis is linear: {why}."
    extents = {
        name: [(float(run.min()), float(run.max())) for run in runs] for name, runs in known.items()
    }
    range_ = robust_range(extents) if robust else None
    if range_ is None:
        return Scale(note=note)
    runs = [extent for members in extents.values() for extent in members]
    return Scale(range=range_, note=f"{note} {_leaving(runs, range_, 'runs')}".strip())


def scale_of_intervals(intervals: Mapping[str, Sequence[float]], robust: bool) -> Scale:
    """The axis of one value of each group with the bounds of its interval.

    Bounds leave the range on their own: a group whose interval is wide because of one run keeps its
    value in the range.

    Args:
        intervals: the value and the bounds of each group. Numbers that are not finite do not count.
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
    """The least and greatest value of all runs but outliers. None if no run is one.

    A run is an outlier if its values reach more than `OUTLIER_FACTOR` times as far from 0 as the
    values of three quarters of the groups, each of which reaches as far as its median run. So
    values that more than a quarter of the groups have are kept. Of an even number of runs the lower
    one of the two in the middle counts. Of two or three groups only the group with the largest
    values may leave the range. Runs without another value than 0 do not count.

    Args:
        groups: least and greatest value of each run of each group.
    """
    reaches = [_quantile([_reach(run) for run in members], 0.5) for members in groups.values()]
    limit = OUTLIER_FACTOR * _quantile(reaches, 0.75)
    runs = [run for members in groups.values() for run in members]
    kept = [run for run in runs if _reach(run) <= limit]
    if len(kept) == len(runs):
        return None
    return min(low for low, _ in kept), max(high for _, high in kept)


def _leaving(extents: Sequence[tuple[float, float]], range_: tuple[float, float], what: str) -> str:
    """A sentence that counts what leaves a range."""
    least, greatest = range_
    leaving = sum(low < least or high > greatest for low, high in extents)
    verb = "leaves" if leaving == 1 else "leave"
    return f"{leaving} of {len(extents)} {what} {verb} the range. A double click shows all."


def _count_below_zero(run: Array) -> int:
    return int(np.count_nonzero(run < -_ROUNDING * float(np.abs(run).max())))


def _reach(extent: tuple[float, float]) -> float:
    """The largest distance from 0."""
    return max(abs(extent[0]), abs(extent[1]))


def _quantile(reaches: Sequence[float], part: float) -> float:
    """A quantile of the reaches above 0, or the lower one of two values between which it lies."""
    known = [reach for reach in reaches if reach > 0.0]
    return float(np.quantile(known, part, method="lower")) if known else 0.0
