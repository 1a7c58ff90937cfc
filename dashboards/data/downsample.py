"""Downsamples curves to at most as many points as a plot has columns of pixels.

`tsdownsample` is faster (0.03 instead of 0.16 ms for 10,000 values), but it selects single values
and does not compute the mean of a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Curve:
    """A curve with a band.

    In a curve that was downsampled, each point stands for the values in one column of pixels, and
    the band is their minimum and maximum. Other bands are percentiles or bootstrap intervals.

    Attributes:
        x: position of each point, shape `[points]`. For several values, their mean position.
        mean: the curve, shape `[points]`. For several values, their mean.
        low: lower edge of the band, shape `[points]`.
        high: upper edge of the band, shape `[points]`.
        exact: True if `downsample` kept every value, so that low and high equal the mean.
    """

    x: Array
    mean: Array
    low: Array
    high: Array
    exact: bool = False


def column_starts(x: Array, columns: int, whole: tuple[float, float] | None = None) -> Array:
    """Returns the index of the first point in each column of pixels. Skips empty columns.

    Args:
        x: increasing positions, shape `[R]`, where R is at least 1.
        columns: number of columns, which divide the range into equal parts.
        whole: the ends of the range. `None` means the range of `x`.
    """
    begin, end = whole or (x[0], x[-1])
    places = (x - begin) / max(float(end - begin), 1e-12) * columns
    return np.flatnonzero(np.diff(np.clip(places.astype(np.int64), 0, columns - 1), prepend=-1))


def downsample(x: Array, y: Array, columns: int = 800) -> Curve:
    """Returns minimum, maximum and mean of `y` in each column of pixels.

    If there are at most `columns` finite points, these are the points of the curve.

    Args:
        x: increasing positions, shape `[R]`.
        y: values, shape `[R]`. Points that are not finite are ignored.
        columns: number of columns, at least 1. They divide the range of `x` into equal parts.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= columns:
        return Curve(x, y, y, y, exact=True)
    starts = column_starts(x, columns)
    counts = np.diff(np.append(starts, len(x)))
    return Curve(
        x=np.add.reduceat(x, starts) / counts,
        mean=np.add.reduceat(y, starts) / counts,
        low=np.minimum.reduceat(y, starts),
        high=np.maximum.reduceat(y, starts),
    )


def downsample_rows(
    x: Array, rows: Array, weights: Array | None = None, columns: int = 400
) -> tuple[Array, Array]:
    """Returns the weighted mean of the rows in each column of pixels.

    Args:
        x: increasing positions, shape `[R]`.
        rows: values, shape `[R, K]`. Entries that are not finite count as 0.
        weights: shape `[R]`. `None` means equal weights.
        columns: number of columns. They divide the range of `x` into equal parts.

    Returns:
        The last position in each column, of shape `[columns]`, and the means, of shape
        `[columns, K]`. Empty columns are omitted. If there are at most `columns` rows, the result
        has each position and each row.
    """
    weights = np.ones(len(x)) if weights is None else np.nan_to_num(weights)
    finite = np.isfinite(x)
    x, rows = x[finite], np.nan_to_num(rows[finite], posinf=0.0, neginf=0.0)
    weights = np.maximum(weights[finite], 1e-12)[:, None]
    if len(x) <= columns:
        return x, rows
    starts = column_starts(x, columns)
    ends = np.append(starts[1:], len(x)) - 1
    sums = np.add.reduceat(rows * weights, starts, axis=0)
    return x[ends], sums / np.add.reduceat(weights, starts, axis=0)
