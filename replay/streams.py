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
    `SampleBatch.successor_index`), and before a row that is not `valid`.
    """
    valid = batch["valid"]
    terminated, truncated = batch["terminated"] & valid, batch["truncated"]
    cut = terminated | truncated | has_successor(batch)
    cut[:-1] |= ~valid[1:]
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
        steps: the serial numbers of the rows of environment 0 in the last steps, oldest first.
        starts: one bool for each of these steps. True if a fragment begins at the step.
        priorities: `[len(steps), N]`, the priorities that the caller of `add` passed. -1 stands for
            a priority that the caller did not pass.
        open: `[N]` bool. True if the last row of an environment still needs its next observation.
        nodes: `[N]` serial numbers of the rows that will be linked to the next step. For each
            environment, this is the last row, or the successor of the last row.
        next_obs: `[N, ...]`, the observations after the last step.
    """

    place: tuple[int, int] | None
    steps: list[int]
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

    def prepend(self, before: StreamTail, given: np.ndarray) -> None:
        """Puts the steps of an earlier tail of the same stream before the steps of this tail.

        Args:
            before: the earlier tail.
            given: `[K, N]`, newer priorities for the last K steps of the earlier tail. K may be
                larger than the number of these steps. -1 stands for a priority that the caller of
                `add` did not pass.
        """
        priorities = before.priorities.copy()
        again = min(len(given), len(priorities))
        if again:
            priorities[-again:] = given[-again:]
        self.steps = before.steps + self.steps
        self.starts = before.starts + self.starts
        self.priorities = np.concatenate([priorities, self.priorities])

    def keep(self, steps: int) -> None:
        """Removes all steps except the last `steps` steps, at least 1."""
        self.steps, self.starts = self.steps[-steps:], self.starts[-steps:]
        self.priorities = self.priorities[-steps:]

    def serials(self) -> np.ndarray:
        """Returns the serial numbers `[K, N]` of the rows of the K steps."""
        return np.array(self.steps)[:, None] + np.arange(len(self.open))

    def get_state(self) -> dict[str, Any]:
        """Returns the tail as numbers, arrays and lists of these."""
        return {
            "place": None if self.place is None else list(self.place),
            "steps": self.steps,
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
        return cls(
            place=None if place is None else (int(place[0]), int(place[1])),
            steps=[int(step) for step in saved["steps"]],
            starts=[bool(start) for start in saved["starts"]],
            priorities=np.array(saved["priorities"], dtype=np.float64),
            open=np.array(saved["open"], dtype=bool),
            nodes=np.array(saved["nodes"], dtype=np.int64),
            next_obs=np.array(saved["next_obs"]),
        )
