"""`PROGRESS`: when this process last made progress, so that slow work is told apart from a hang."""

from __future__ import annotations

import time

import numpy as np


class Progress:
    """The time of the last step of an environment, or of the last beginning or end of a phase.

    Attributes:
        at_s: `[1]` float64, of `time.monotonic`. `ControlPage` moves it into memory that other
            processes of the node can read.
    """

    def __init__(self) -> None:
        self.at_s = np.full(1, time.monotonic())

    def note(self) -> None:
        """Notes that there was progress just now."""
        self.at_s[0] = time.monotonic()


#: The progress of this process.
PROGRESS = Progress()
