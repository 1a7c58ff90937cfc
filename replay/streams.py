"""The streams of a replay buffer: the flags of their rows, and their last steps.

The column `flags` of the rows says where episodes and windows end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polopt.common.sample_batch import SampleBatch

VALID = 1  # the row is a transition
TERMINATED = 2
TRUNCATED = 4
CUT = 8  # windows end at this row (`ReplayBuffer` explains windows)
DRAWABLE = 16  # the window of the row is complete, so the row can be drawn
SUCCESSOR = 32  # the row holds only the next observation of another row


def flags_of(batch: SampleBatch) -> np.ndarray:
    """Returns the flags `[T, N]` of the rows of a fragment: `VALID`, `TERMINATED`, `TRUNCATED` and
    `CUT`.

    A window ends at the end of an episode, at a row with a next observation of its own (see
    `SampleBatch.successor_index`), and before a row that is not `valid`, unless this row only fills
    the arrays (see `SampleBatch.row_counts`).
    """
    valid, truncated = batch["valid"], batch["truncated"]
    inside = valid & ~(batch["terminated"] | truncated)
    if not len(batch.successor_index) and np.count_nonzero(inside) == inside.size:
        return np.full(inside.shape, VALID)  # nearly every short fragment
    terminated = batch["terminated"] & valid
    cut = terminated | truncated | has_successor(batch)
    cut[:-1] |= ~valid[1:] if batch.row_counts is None else ~valid[1:] & batch.is_row[1:]
    return valid * VALID + terminated * TERMINATED + truncated * TRUNCATED + cut * CUT


def has_successor(batch: SampleBatch) -> np.ndarray:
    """Returns `[T, N]` bool: whether a row of a fragment has a next observation of its own."""
    own = np.zeros(batch.shape, dtype=bool)
    own.reshape(-1)[batch.successor_index] = True
    return own


@dataclass(slots=True)
class StreamTail:
    """The last steps of a stream. The windows of the rows of these steps may not be complete yet.
    `ReplayBuffer` explains streams, windows and successors. `RowStore` explains serial numbers.

    Attributes:
        place: the `SampleBatch.place` of the fragment that would continue the stream. `None` means
            that the place is not known.
        rows: `[K, N]`, the serial numbers of the last rows of each environment, oldest first. -1 in
            the first places of a slot that has fewer rows than others.
        starts: one bool for each of the K places. True if a fragment begins there.
        priorities: `[K, N]`, the priorities that the caller of `add` passed. -1 stands for a
            priority that the caller did not pass.
        open: `[N]` bool. True if the last row of an environment still needs its next observation.
        nodes: `[N]` serial numbers of the rows that will be linked to the next step. For each
            environment, this is the last row, or the successor of the last row. -1 for a slot that
            has no row yet.
        next_obs: `[N, ...]`, the observations after the last step.
    """

    place: tuple[int, int] | None
    rows: np.ndarray
    starts: list[bool]
    priorities: np.ndarray
    open: np.ndarray
    nodes: np.ndarray
    next_obs: np.ndarray

    def continues_with(self, batch: SampleBatch, follows: bool | None) -> bool:
        """Whether a fragment continues the stream. `ReplayBuffer.add` explains `follows`."""
        if follows is None:
            follows = batch.place is not None and batch.place == self.place
        return follows and len(self.open) == batch.shape[1]

    def prepend(self, before: StreamTail, given: np.ndarray, has_row: np.ndarray | bool) -> None:
        """Puts the steps of an earlier tail of the same stream before the steps of this tail.

        Args:
            before: the earlier tail.
            given: `[K, N]`, newer priorities for the last K rows of each environment in the earlier
                tail. K may be larger than the number of these rows. -1 stands for a priority that
                the caller of `add` did not pass.
            has_row: `[N]` bool. Whether an environment has a row in this tail. True: all have one.
        """
        priorities = before.priorities.copy()
        again = min(len(given), len(priorities))
        if again:
            priorities[-again:] = given[-again:]
        self.rows = np.concatenate([before.rows, self.rows])
        self.starts = before.starts + self.starts
        self.priorities = np.concatenate([priorities, self.priorities])
        if has_row is not True:
            self.open = np.where(has_row, self.open, before.open)
            self.nodes = np.where(has_row, self.nodes, before.nodes)
        self.align()

    def align(self) -> None:
        """Moves the rows of each slot to the last places, if some slots have fewer rows."""
        if self.rows.min() < 0:
            order = np.argsort(self.rows >= 0, axis=0, kind="stable")
            self.rows = np.take_along_axis(self.rows, order, axis=0)
            self.priorities = np.take_along_axis(self.priorities, order, axis=0)

    def keep(self, count: int) -> None:
        """Removes all rows except the last `count` rows of each environment, at least 1."""
        self.rows, self.starts = self.rows[-count:], self.starts[-count:]
        self.priorities = self.priorities[-count:]

    def get_state(self) -> dict[str, Any]:
        """Returns the tail as numbers, arrays and lists of these."""
        return {
            "place": None if self.place is None else list(self.place),
            "rows": self.rows,
            "starts": self.starts,
            "priorities": self.priorities,
            "open": self.open,
            "nodes": self.nodes,
            "next_obs": self.next_obs,
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> StreamTail:
        """Makes a tail from a state that `get_state` returned."""
        place = saved["place"]
        if "rows" in saved:
            rows = np.array(saved["rows"], dtype=np.int64)
        else:  # an older state has the rows of environment 0
            rows = np.array(saved["steps"])[:, None] + np.arange(len(saved["open"]))
        return cls(
            place=None if place is None else (int(place[0]), int(place[1])),
            rows=rows,
            starts=[bool(start) for start in saved["starts"]],
            priorities=np.array(saved["priorities"], dtype=np.float64),
            open=np.array(saved["open"], dtype=bool),
            nodes=np.array(saved["nodes"], dtype=np.int64),
            next_obs=np.array(saved["next_obs"]),
        )
