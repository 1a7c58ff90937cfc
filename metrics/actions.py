"""The distribution of sampled actions: shares of categories. Or means, standard deviations and the
share that is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polopt.common.moments import Moments, merged

#: Bins of the histogram of one categorical action. The last one counts all further categories.
MOST_CATEGORIES = 32
#: Categorical actions of a MultiDiscrete space, and dimensions of a Box, that are counted.
MOST_PARTS, MOST_DIMENSIONS = 8, 32


class ActionSums(NamedTuple):
    """What actions sum up to, in a size that does not depend on their number.

    Attributes:
        counts: of each categorical action the number of times that each category was chosen.
        moments: of the dimensions of a Box. None for categories.
        clipped: number of elements of actions of a Box that the environment got clipped.
    """

    counts: tuple[list[int], ...] = ()
    moments: Moments | None = None
    clipped: int = 0

    @classmethod
    def of(
        cls,
        actions: np.ndarray,
        sizes: Sequence[int],
        bounds: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> ActionSums:
        """The sums of actions `[B, ...]` as sampled from the distribution.

        Args:
            actions: categories counted from 0, `[B]` or `[B, K]`. Of a Box `[B, A]`.
            sizes: number of categories of each categorical action, K. Empty: actions are real.
            bounds: beyond which real actions are clipped, `[A]` each. None: they are not.
        """
        flat = actions.reshape(len(actions), math.prod(actions.shape[1:]))
        if not sizes:
            flat, outside = flat[:, :MOST_DIMENSIONS], 0
            if bounds is not None:
                low, high = (bound[:MOST_DIMENSIONS] for bound in bounds)
                outside = int(np.count_nonzero((flat < low) | (flat > high)))
            return cls(moments=Moments.of(flat), clipped=outside)
        return cls(
            tuple(
                np.bincount(np.minimum(column, MOST_CATEGORIES - 1), minlength=_bins(size)).tolist()
                for column, size in zip(flat.T[:MOST_PARTS], sizes, strict=False)
            )
        )

    def merge(self, other: ActionSums) -> ActionSums:
        """The sums of the actions of both. Sums without any action merge with sums of any space."""
        if not self.counts or not other.counts:
            counts = self.counts or other.counts
        else:
            counts = tuple(map(_sums, self.counts, other.counts))
        clipped = self.clipped + other.clipped
        return ActionSums(counts, merged(self.moments, other.moments), clipped)


def _sums(counts: list[int], others: list[int]) -> list[int]:
    return [a + b for a, b in zip(counts, others, strict=True)]


class ActionStats:
    """Distribution of the actions since the last report.

    Args:
        sizes: number of categories of each categorical action. Empty: actions are real.
        dimensions: of a real action.
    """

    def __init__(self, sizes: Sequence[int] = (), dimensions: int = 0) -> None:
        self._bins = [_bins(size) for size in sizes[:MOST_PARTS]]
        self._dimensions = min(dimensions, MOST_DIMENSIONS)
        self._sums = ActionSums()

    def add(self, sums: ActionSums) -> None:
        """Adds the sums of one reply."""
        self._sums = self._sums.merge(sums)

    def report(self) -> dict[str, Any]:
        """`histogram` of each categorical action by its number, or `mean` and `std` of each
        dimension and the share that is `clipped`, NaN without actions. Then resets them. Empty for
        actions of no dimension."""
        sums, self._sums = self._sums, ActionSums()
        if self._bins:
            counts = sums.counts or [[0] * bins for bins in self._bins]
            return {"histogram": {str(part): list(bins) for part, bins in enumerate(counts)}}
        moments = sums.moments
        if moments is None or not moments.rows:
            nothing = [math.nan] * self._dimensions
            return {"mean": nothing, "std": list(nothing), "clipped": math.nan}
        return {
            "mean": moments.mean.tolist(),
            "std": np.sqrt(moments.variance).tolist(),
            "clipped": sums.clipped / max(1, moments.rows * len(moments.mean)),
        }


def _bins(size: int) -> int:
    return min(size, MOST_CATEGORIES)
