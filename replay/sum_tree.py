"""`SumTree`: draws places with probabilities in proportion to their priorities."""

from __future__ import annotations

import numpy as np

#: Number of children of a node. 16 float64 numbers are two cache lines.
_FANOUT = 16
#: Largest number of nodes of the top level. One NumPy call computes the running sum of these nodes.
_MOST_AT_TOP = 4096


class SumTree:
    """A tree of float64 sums over `size` leaves. Each node above the leaves has 16 children.

    `find` walks from the top level down to the leaves, for all draws of a batch at once. Each node
    above the leaves is the sum of its children, added from the first to the last. So the bits of
    the tree depend only on the leaves, and not on the order of the updates.

    The source is Schaul et al. (2016), Prioritized Experience Replay, appendix B.2.1.

    Args:
        size: number of leaves. All leaves are 0 at the start, and a leaf of 0 is never drawn.

    Attributes:
        leaves: `[size]` float64, a view. Only `update` may change the leaves.
        nbytes: bytes of all arrays of the tree.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        lengths = _lengths(size)
        self._levels = [np.zeros(length) for length in lengths]  # the first level is the leaves
        # The running sums of each group of children, for the levels between leaves and top level.
        # Each running sum begins with 0.
        self._sums = [np.zeros((length // _FANOUT, _FANOUT + 1)) for length in lengths[1:-1]]
        self._top = np.zeros(lengths[-1] + 1)  # the running sum of the top level, begins with 0
        self._top_is_old = False
        self.leaves = self._levels[0][:size]
        self.nbytes = self.nbytes_of(size)

    @staticmethod
    def nbytes_of(size: int) -> int:
        """Bytes of a tree with `size` leaves."""
        lengths = _lengths(size)
        sums = sum(length + length // _FANOUT for length in lengths[1:-1])
        return 8 * (sum(lengths) + sums + lengths[-1] + 1)

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self._running_sum()[-1])

    def update(self, places: np.ndarray, values: np.ndarray | float) -> None:
        """Sets leaves. If a place occurs twice, the last value counts.

        Args:
            places: `[K]` int64, from 0 to `size - 1`.
            values: `[K]` float64, or one number for all places. Values must be finite and not
                negative.
        """
        self._levels[0][places] = values
        for number, (level, parents) in enumerate(
            zip(self._levels, self._levels[1:], strict=False)
        ):
            if 2 < len(places) == places[-1] - places[0] + 1:  # neighbours share their parents
                group = np.unique(places // _FANOUT)
            else:
                group = places // _FANOUT
            children = level.reshape(-1, _FANOUT).take(group, axis=0)
            if number:
                sums = children.cumsum(axis=1)
                self._sums[number - 1][group, 1:] = sums
                parents[group] = sums[:, -1]
            else:
                parents[group] = _sum_in_order(children)
            places = group
        self._top_is_old = True

    def find(self, uniform: np.ndarray) -> np.ndarray:
        """Makes a stratified draw of B places. The method divides the sum of all leaves into B
        equal parts, and draws one place from each part.

        Args:
            uniform: `[B]` random numbers in [0, 1).

        Returns:
            the places `[B]` int64. The leaf of each place is above 0.

        Raises:
            ValueError: all leaves are 0.
        """
        total = self.total
        if not total > 0.0:
            raise ValueError("no place can be drawn: all priorities are 0")
        return self.descend((np.arange(len(uniform)) + uniform) * (total / len(uniform)))

    def descend(self, mass: np.ndarray) -> np.ndarray:
        """Finds the first places at which the running sum of the leaves exceeds `mass`.

        Args:
            mass: `[B]` float64, from 0 to `total`. The method overwrites this array.

        Returns:
            the places `[B]` int64. Because of rounding, a result may be a neighbour of the exact
            place. A result is never a leaf of 0.
        """
        top = self._running_sum()
        np.minimum(mass, np.nextafter(top[-1], 0.0), out=mass)
        node: np.ndarray = top[1:].searchsorted(mass, side="right")
        mass -= top.take(node)
        rows = np.arange(len(mass))
        for number in range(len(self._levels) - 2, -1, -1):
            if number:
                before = self._sums[number - 1].take(node, axis=0)  # [B, 17]
                sums = before[:, 1:]
            else:
                sums = self._levels[0].reshape(-1, _FANOUT).take(node, axis=0).cumsum(axis=1)
            # Because of rounding, the remaining mass can reach the sum of all children, or exceed
            # this sum.
            np.minimum(mass, np.nextafter(sums[:, -1], 0.0), out=mass)
            child = (sums > mass[:, None]).argmax(axis=1)
            if number:
                mass -= before[rows, child]
            node = node * _FANOUT + child
        return node

    def _running_sum(self) -> np.ndarray:
        if self._top_is_old:
            np.cumsum(self._levels[-1], out=self._top[1:])
            self._top_is_old = False
        return self._top


def _lengths(size: int) -> list[int]:
    """The number of nodes of each level, from the leaves to the top level. All levels except the
    top level are padded to a multiple of 16."""
    lengths = []
    while size > _MOST_AT_TOP:
        size = -(-size // _FANOUT)
        lengths.append(size * _FANOUT)
    return [*lengths, size]


def _sum_in_order(children: np.ndarray) -> np.ndarray:
    """Returns the sums `[K]` of `children` `[K, 16]`, added from the first to the last.

    The results equal the last column of `children.cumsum(axis=1)`, but take a quarter of its time.
    For K = 1, `np.add.reduce` would add the elements in another order, so the function uses
    `cumsum`.
    """
    if len(children) == 1:
        return children.cumsum(axis=1)[:, -1]
    return np.add.reduce(np.ascontiguousarray(children.T), axis=0)
