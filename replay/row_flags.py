"""The column `flags` of the rows of a replay buffer: where episodes and windows end."""

from __future__ import annotations

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
