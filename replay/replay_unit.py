"""`ReplayUnit`: what a replay buffer draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.replay.streams import StreamTail


class ReplayUnit(ABC):
    """What a `ReplayBuffer` draws: `TransitionUnit` for transitions, `SequenceUnit` for sequences.
    The buffer stores the rows and links them. The unit decides which next observations the buffer
    stores and which rows can be drawn, and reads the rows that belong to a drawn row.

    Attributes:
        name: the value of the option `replay_unit`.
        span: all rows that belong to a row are stored at the latest when this many further steps
            are stored.
    """

    name: str
    span: int

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options that must be the same in a saved buffer and in the buffer that loads it."""

    def check(self, batch: SampleBatch) -> None:
        """Checks a fragment before it is stored.

        Raises:
            ConfigError: the fragment is too long.
        """
        return

    def leaves_out(self, batch: SampleBatch) -> bool:
        """Whether streams leave out the rows that only fill the arrays of this fragment (see
        `SampleBatch.row_counts`)."""
        return batch.row_counts is not None

    @abstractmethod
    def needs_successor(self, flags: np.ndarray) -> np.ndarray:
        """Whether the buffer stores the next observation of a row, if the row has its own.

        Args:
            flags: `[T, N]`, see `flags_of`.

        Returns:
            `[T, N]` bool.
        """

    @abstractmethod
    def drawable(self, flags: np.ndarray, tail: StreamTail, ended: bool) -> np.ndarray:
        """Returns `[K, N]` bool: the rows of a tail that can be drawn.

        Args:
            flags: `[K, N]`, the flags of the K steps of the tail. 0 if a row has been overwritten.
            tail: the last steps of a stream.
            ended: whether the stream ends after these steps. The last rows of the stream then have
                the flag `CUT`.
        """

    def added(self, batch: SampleBatch, serials: np.ndarray) -> None:
        """Keeps what the rows of a fragment do not hold.

        Args:
            batch: the fragment, which has been stored.
            serials: `[T, N]`, the serial numbers of its rows.
        """
        return

    def overwritten(self, end: int) -> None:
        """Removes what belongs to rows with serial numbers below `end`."""
        return

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns what `added` has kept."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`. An empty state removes what `added` has kept."""
        return
