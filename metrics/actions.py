"""Statistics of the actions that workers sample from the policy.

For categorical actions, these are counts of the categories. For the actions of a Box, these are
means, standard deviations and the share of clipped values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polopt.common.moments import Moments, merged
from polopt.metrics.number import declare

#: Largest number of bins in the histogram of a categorical action. If the action has more
#: categories, the last bin counts all further categories.
MOST_CATEGORIES = 32
#: The statistics cover at most this many categorical actions of a MultiDiscrete space, and at most
#: this many dimensions of a Box.
MOST_PARTS, MOST_DIMENSIONS = 8, 32

#: The numbers of `ActionStats.report`.
NUMBERS = declare(f"""
    histogram/<component> (actions, histogram): how often each category was sampled in the interval.
        The component is 0 for a Discrete action, and the index in a MultiDiscrete action, for at
        most {MOST_PARTS} components. The last of at most {MOST_CATEGORIES} counts includes all
        further categories
    mean (unit of the action, list): mean of each dimension of a Box action in the interval, for at
        most {MOST_DIMENSIONS} dimensions, before actions are mapped to the bounds, clipped or
        squashed. NaN without samples
    std (unit of the action, list): standard deviation of the same values
    clipped (share, metric=): share of the elements of Box actions in the interval that were outside
        of the bounds and were clipped. 0 with `squash_actions`, NaN without samples
""")


class ActionSums(NamedTuple):
    """Sums over a set of actions. Their size does not depend on the number of actions.

    Attributes:
        counts: for each categorical action, how often each category was chosen.
        moments: number, mean and squared deviations of the values in each dimension of a Box. None
            for categorical actions, and without actions.
        clipped: number of values in the actions of a Box that were outside the bounds. The
            environment received the bound instead.
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
        """Returns the sums of a batch of actions. The actions have not been clipped yet.

        Args:
            actions: categories, counted from 0, of shape `[B]` or `[B, K]`. For a Box, real values
                of shape `[B, A]`.
            sizes: the number of categories of each of the K categorical actions. Empty for a Box.
            bounds: lower and upper bounds that clip the actions of a Box, each of shape `[A]`.
                `None` means that the actions are not clipped.
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
        """Returns the sums over the actions of both objects.

        An object without actions can be merged with sums of any action space.
        """
        if not self.counts or not other.counts:
            counts = self.counts or other.counts
        else:
            counts = tuple(map(_sums, self.counts, other.counts))
        clipped = self.clipped + other.clipped
        return ActionSums(counts, merged(self.moments, other.moments), clipped)


def _sums(counts: list[int], others: list[int]) -> list[int]:
    return [a + b for a, b in zip(counts, others, strict=True)]


class ActionStats:
    """Statistics of the actions since the last report.

    Args:
        sizes: number of categories of each categorical action. Empty for a Box.
        dimensions: number of dimensions of a Box.
    """

    def __init__(self, sizes: Sequence[int] = (), dimensions: int = 0) -> None:
        self._bins = [_bins(size) for size in sizes[:MOST_PARTS]]
        self._dimensions = min(dimensions, MOST_DIMENSIONS)
        self._sums = ActionSums()

    def add(self, sums: ActionSums) -> None:
        """Adds the sums of one call to a worker."""
        self._sums = self._sums.merge(sums)

    def report(self) -> dict[str, Any]:
        """Returns the statistics since the last report, and resets them.

        Returns:
            For categorical actions, `histogram`: the counts of the categories of each action, by
            the position of the action in the action space. For a Box, lists `mean` and `std` with
            one entry per dimension, and the share `clipped` of all values. Without actions, the
            statistics of a Box are NaN.
        """
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
