"""`Moments`: the number, mean and squared deviations of rows. Moments of two sets can be merged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """The moments of a set of rows `[S]`: the number of rows, and for each of the S elements the
    mean and the sum of squared deviations from the mean.

    The moments are computed in float64. The merged moments of two sets of rows equal the moments of
    all rows together, up to rounding (Chan, Golub and LeVeque, 1983). The arrays are not changed
    after they are made.

    Attributes:
        rows: the number of rows.
        mean: the mean `[S]`. 0 for zero rows.
        m2: the sum `[S]` of squared deviations from the mean.
    """

    rows: int
    mean: np.ndarray  # [S] float64
    m2: np.ndarray  # [S] float64

    @classmethod
    def zero(cls, size: int) -> Moments:
        """Returns the moments of zero rows."""
        return cls(0, np.zeros(size), np.zeros(size))

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, rows: np.ndarray) -> Moments:
        """Returns the moments of rows `[B, S]`."""
        if len(rows) == 0:
            return cls.zero(rows.shape[1])
        rows = rows.astype(np.float64, copy=False)
        mean = rows.mean(axis=0)
        return cls(len(rows), mean, np.square(rows - mean).sum(axis=0))

    @np.errstate(all="ignore")
    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both sets of rows together."""
        if other.rows == 0 or self.rows == 0:
            return self if other.rows == 0 else other
        count = self.rows + other.rows
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.rows / count)
        m2 = self.m2 + other.m2 + np.square(delta) * (self.rows * (other.rows / count))
        return Moments(count, mean, m2)

    @property
    @np.errstate(all="ignore")
    def variance(self) -> np.ndarray:
        """The mean squared deviation `[S]`. 0 for zero rows."""
        return self.m2 / max(self.rows, 1)

    @property
    def is_finite(self) -> bool:
        """Whether all moments are finite. They may be non-finite even if all rows are finite,
        because the squares may overflow."""
        return bool(np.isfinite(self.mean).all() and np.isfinite(self.m2).all())


def merged(first: Moments | None, second: Moments | None) -> Moments | None:
    """Returns the moments of both sets of rows together. None means zero rows."""
    if first is None or second is None:
        return second if first is None else first
    return first.merge(second)
