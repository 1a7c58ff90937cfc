"""Downsampling of curves to the columns of pixels that a plot has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Curve:
    """A curve with at most one point for each column of pixels.

    Attributes:
        x: shape `[columns]`.
        mean: mean of the values in each column, shape `[columns]`.
        low: least value in each column, shape `[columns]`.
        high: greatest value in each column, shape `[columns]`.
        exact: whether every column holds one value, so that low and high equal the mean.
    """

    x: Array
    mean: Array
    low: Array
    high: Array
    exact: bool = False


def column_starts(x: Array, columns: int, whole: tuple[float, float] | None = None) -> Array:
    """The index of the first point in each column of pixels that has one.

    Args:
        x: increasing, shape `[R]`, at least one.
        columns: equal parts of the range.
        whole: the ends of the range. None: the range of `x`.
    """
    begin, end = whole or (x[0], x[-1])
    places = (x - begin) / max(float(end - begin), 1e-12) * columns
    return np.flatnonzero(np.diff(np.clip(places.astype(np.int64), 0, columns - 1), prepend=-1))


def downsample(x: Array, y: Array, columns: int = 800) -> Curve:
    """Minimum, maximum and mean of `y` in each of `columns` equal parts of the range of `x`.

    Args:
        x: increasing, shape `[R]`.
        y: shape `[R]`. Points that are not finite are left out.
        columns: columns of pixels, at least 1.
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
    """Weighted means of whole rows in each of `columns` parts of the range of `x`.

    Args:
        x: increasing, shape `[R]`.
        rows: shape `[R, K]`. Entries that are not finite count as 0.
        weights: shape `[R]`. None: equal weights.
        columns: columns of pixels.

    Returns:
        the last x in each part, of shape `[columns]`, and means of shape `[columns, K]`.
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
