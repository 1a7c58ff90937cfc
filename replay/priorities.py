"""`Priorities`: decides which rows of a replay buffer are drawn, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polopt.replay.row_store import RowFilesError, read_arrays, write_arrays
from polopt.replay.streams import DRAWABLE
from polopt.replay.sum_tree import SumTree

#: `_uniform` draws random places, and draws again for each place that is not drawable. After this
#: many repetitions, it draws from a list of all drawable places.
_MOST_ROUNDS = 20


class Priorities:
    """The priorities of stored rows, and draws in proportion to them (Schaul et al., 2016). Row i
    is drawn with probability P(i) = p_i^alpha / sum of p^alpha, where p_i is the priority of the
    row plus `epsilon`.

    Args:
        capacity: the largest number of rows.
        alpha: exponent of priorities. `None` draws all drawable rows with the same probability.
        epsilon: added to every priority, so that a row with priority 0 can also be drawn.
        few: whether only few of the rows are drawable. Random places would rarely hit these rows,
            so they are drawn with the tree, even if there are no priorities.

    Attributes:
        tree: the sums of p^alpha. The leaf of a row that is not drawable is 0. `None` if rows are
            drawn without a tree.
        largest: the largest priority so far, or 1 if all were smaller.
        num_stale: number of priorities that arrived after their rows had been overwritten.
    """

    def __init__(self, capacity: int, alpha: float | None, epsilon: float, few: bool) -> None:
        self.alpha = alpha
        self.epsilon = epsilon
        self.tree = SumTree(capacity) if alpha is not None or few else None
        self.largest = 1.0
        self.num_stale = 0
        self._given = _Range()

    def clear(self) -> None:
        """Removes the priorities of all rows."""
        if self.tree is not None:
            self.tree = SumTree(self.tree.size)
        self._given = _Range()

    @property
    def nbytes(self) -> int:
        """Bytes of the tree, or 0 if there is no tree."""
        return 0 if self.tree is None else self.tree.nbytes

    def remove(self, start: int, end: int) -> None:
        """Removes the priorities of the rows that the serial numbers from `start` to `end - 1`
        overwrite."""
        if self.tree is not None and start < end:
            self.tree.update(np.arange(start, end) % self.tree.size, 0.0)

    def add(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of rows that have become drawable.

        Args:
            places: `[K]`, the places of the rows.
            priorities: `[K]`. A negative number stands for the largest priority so far.
        """
        if self.tree is not None:
            self._set(places, np.where(priorities < 0, self.largest, priorities))

    def update(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Changes the priorities `[K]` of drawable rows, which the learner has computed."""
        if len(places):
            self._given.add(priorities)
            self._set(places, priorities)

    def _set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        if self.tree is not None and len(places):
            self.largest = max(self.largest, float(priorities.max()))
            self.tree.update(places, (priorities + self.epsilon) ** (self.alpha or 0.0))

    def draw(
        self, rng: np.random.Generator, count: int, flags: np.ndarray, beta: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws B rows with replacement.

        Args:
            rng: generator of the random numbers.
            count: B.
            flags: the flags of all stored rows, of which at least one is drawable.
            beta: exponent of the weights.

        Returns:
            the places and the weights `[B]` of the rows. The weight of row i is P(i)^-beta, divided
            by the largest of these numbers.
        """
        if self.tree is None:
            return _uniform(rng, count, flags), np.ones(count, dtype=np.float32)
        places = self.tree.find(rng.random(count))
        if self.alpha is None:
            return places, np.ones(count, dtype=np.float32)
        leaves = self.tree.leaves.take(places)
        # The sum of all priorities is the same for every row, and cancels out.
        weights = (leaves / leaves.min()) ** -beta
        return places, weights.astype(np.float32)

    def save(self, path: Path, filled: int) -> dict[str, Any]:
        """Writes the priorities of the first `filled` rows to a file, if there is a tree.

        Returns:
            the state that `load` needs in addition to the file.

        Raises:
            OSError: the file cannot be written.
        """
        if self.tree is None:
            return {}
        return {"priorities_sha256": write_arrays(path, [self.tree.leaves[:filled]])}

    def load(self, path: Path, state: Mapping[str, Any], drawable: np.ndarray) -> None:
        """Reads a file of `save`. The priorities stay the same if `alpha` or `epsilon` has another
        value now.

        Args:
            path: the file.
            state: what `save` returned, with the `alpha` and `priority_epsilon` of the saved
                buffer.
            drawable: `[B]` bool, True for each row that can be drawn.

        Raises:
            RowFilesError: the file is missing or damaged, or does not fit the rows.
        """
        if self.tree is None:
            return
        leaves = np.zeros(len(drawable))
        read_arrays(path, [leaves], state["priorities_sha256"])
        if not (np.isfinite(leaves).all() and ((leaves > 0) == drawable).all()):
            raise RowFilesError(f"{path}: the priorities do not fit the rows")
        leaves = self._rescaled(leaves, drawable, state)
        if not (np.isfinite(leaves).all() and ((leaves > 0) == drawable).all()):
            raise RowFilesError(f"{path}: the priorities do not fit the saved exponent")
        self.tree.update(np.arange(len(drawable)), leaves)

    @np.errstate(all="ignore")
    def _rescaled(
        self, leaves: np.ndarray, drawable: np.ndarray, state: Mapping[str, Any]
    ) -> np.ndarray:
        """Converts saved leaves `[B]`, which are (priority + epsilon)^alpha, to this exponent and
        this epsilon."""
        alpha, epsilon = state.get("alpha"), state.get("priority_epsilon")
        if alpha is None or epsilon is None or self.alpha is None:
            return leaves  # no priorities, or the state of an older version
        if (alpha, epsilon) == (self.alpha, self.epsilon):
            return leaves
        priorities = np.maximum(leaves ** np.divide(1.0, alpha) - epsilon, 0.0)
        return np.where(drawable, (priorities + self.epsilon) ** self.alpha, 0.0)

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of `ReplayBuffer.stats` about priorities, or an empty dict if
        there are no priorities."""
        if self.alpha is None:
            return {}
        return {
            "priority": self._given.take(),
            "max_priority": self.largest,
            "num_stale_priorities": self.num_stale,
        }


class _Range:
    """The mean and the maximum of the numbers that were added since the last `take`."""

    def __init__(self) -> None:
        self._sum, self._count, self._max = 0.0, 0, 0.0

    def add(self, values: np.ndarray) -> None:
        self._sum += float(values.sum())
        self._count += len(values)
        self._max = max(self._max, float(values.max()))

    def take(self) -> dict[str, float]:
        report = {"mean": self._sum / max(1, self._count), "max": self._max}
        self._sum, self._count, self._max = 0.0, 0, 0.0
        return report


def _uniform(rng: np.random.Generator, count: int, flags: np.ndarray) -> np.ndarray:
    places = rng.integers(0, len(flags), count)
    drawn = flags.take(places) & DRAWABLE
    if np.count_nonzero(drawn) == count:  # nearly always
        return places
    wrong = np.flatnonzero(drawn == 0)
    for _ in range(_MOST_ROUNDS):
        if not len(wrong):
            return places
        again = rng.integers(0, len(flags), len(wrong))
        places[wrong] = again
        wrong = wrong[(flags.take(again) & DRAWABLE) == 0]
    if len(wrong):
        drawable = np.flatnonzero(flags & DRAWABLE)
        places[wrong] = drawable[rng.integers(0, len(drawable), len(wrong))]
    return places
