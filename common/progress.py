"""`PROGRESS`: when this process last made progress, so that slow work is told apart from a hang."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """The time of the last step of an environment, or of the last beginning or end of a phase.

    Attributes:
        at_s: `[1]` float64, of `time.monotonic`. `ControlPage` moves it into memory that other
            processes of the node can read. A memoryview: NumPy takes twice as long for one number.
    """

    def __init__(self) -> None:
        self.at_s: Any = memoryview(bytearray(8)).cast("d")
        self.note()

    def note(self) -> None:
        """Notes that there was progress just now."""
        self.at_s[0] = time.monotonic()

    def note_of_other(self, silent_s: float) -> None:
        """Notes that a process for which this one waits made progress `silent_s` seconds ago."""
        self.at_s[0] = max(self.at_s[0], time.monotonic() - silent_s)


#: The progress of this process.
PROGRESS = Progress()
