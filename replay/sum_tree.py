"""`SumTree`: draws places in proportion to their priority."""

from __future__ import annotations

import numpy as np

#: Children of a node. Sixteen float64 are two cache lines, and a million leaves have five levels.
_FANOUT = 16


class SumTree:
    """A tree of sums over `size` leaves, float64, with 16 children for each node.

    A draw walks down from the root, one level for all draws of a batch at once. A node is always
    the sum of its children, added from the first to the last. So the bits of the tree depend on its
    leaves alone, and never on the order of the updates.

    Schaul et al., 2016: Prioritized Experience Replay, appendix B.2.1.

    Args:
        size: number of leaves. All are 0 at the start, and a leaf of 0 is never drawn.

    Attributes:
        nbytes: bytes of all levels.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._groups = []  # by level from the leaves up: [groups, 16]
        length = size
        while True:
            groups = -(-length // _FANOUT)
            self._groups.append(np.zeros((groups, _FANOUT)))
            if groups == 1:
                break
            length = groups
        self._flat = [groups.reshape(-1) for groups in self._groups]
        self.leaves = self._flat[0][:size]  # [size], a view; only `update` may change it
        self.nbytes = self.nbytes_of(size)

    @staticmethod
    def nbytes_of(size: int) -> int:
        """Bytes of a tree with `size` leaves."""
        total, length = 0, size
        while True:
            length = -(-length // _FANOUT)
            total += length * _FANOUT * 8
            if length == 1:
                return total

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(np.cumsum(self._groups[-1][0])[-1])

    def update(self, places: np.ndarray, values: np.ndarray | float) -> None:
        """Sets leaves. Where a place occurs twice, the last value counts.

        Args:
            places: `[K]` int64, from 0 to `size - 1`.
            values: `[K]` float64, 0 or larger and finite; one number for all.
        """
        self._flat[0][places] = values
        group = places // _FANOUT
        for children, parents in zip(self._groups, self._flat[1:], strict=False):
            if len(group) > _FANOUT:  # neighbours, as those of new rows, share their parents
                changed = np.empty(len(group), dtype=bool)
                changed[0] = True
                np.not_equal(group[1:], group[:-1], out=changed[1:])
                group = group[changed]
            parents[group] = children[group].cumsum(axis=1)[:, -1]
            group = group // _FANOUT

    def find(self, uniform: np.ndarray) -> np.ndarray:
        """The places of a stratified draw: the sum is cut into B equal parts, and one place is
        drawn from each.

        Args:
            uniform: `[B]` random numbers in [0, 1).

        Returns:
            `[B]` int64. Each has a leaf above 0.

        Raises:
            ValueError: all leaves are 0.
        """
        draws = len(uniform)
        total = self.total
        if not total > 0.0:
            raise ValueError("no place can be drawn: all priorities are 0")
        mass = (np.arange(draws) + uniform) * (total / draws)
        np.minimum(mass, np.nextafter(total, 0.0), out=mass)
        return self.descend(mass)

    def descend(self, mass: np.ndarray) -> np.ndarray:
        """The place where the running sum of the leaves first exceeds `mass`.

        Args:
            mass: `[B]` float64, from 0 to below `total`; changed in place.

        Returns:
            `[B]` int64. Rounding may lead to a neighbour, but never to a leaf of 0.
        """
        draws = len(mass)
        rows = np.arange(draws)
        node = np.zeros(draws, dtype=np.int64)
        before = np.zeros((draws, _FANOUT + 1))  # the sums before each child
        sums = before[:, 1:]
        for level in range(len(self._groups) - 1, -1, -1):
            children = self._groups[level].take(node, axis=0)
            np.cumsum(children, axis=1, out=sums)
            child = (sums <= mass[:, None]).sum(axis=1)
            mass -= before[rows, child]
            # The rest can round to the child's own sum, which would lead past its last child.
            np.minimum(mass, np.nextafter(children[rows, child], 0.0), out=mass)
            node = node * _FANOUT + child
        return node
