"""`PROGRESS`: the time at which this process last made progress. The driver uses this time to
distinguish slow calls from hanging calls."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """Stores the time of the last progress, for example of a step or reset of an environment, or of
    the start or end of a phase.

    Attributes:
        at_s: the time of the last progress, `[1]` float64, as seconds of `time.monotonic`.
            `ControlPage` replaces this buffer by memory that other processes of the node can read.
            The buffer is a memoryview, because access to one number takes twice as long in NumPy.
    """

    def __init__(self) -> None:
        self.at_s: Any = memoryview(bytearray(8)).cast("d")
        self.note()

    def note(self) -> None:
        """Notes progress at the current time."""
        self.at_s[0] = time.monotonic()

    def note_of_other(self, silent_s: float) -> None:
        """Notes that another process, for which this process waits, made progress `silent_s`
        seconds ago."""
        self.at_s[0] = max(self.at_s[0], time.monotonic() - silent_s)


#: The progress of this process.
PROGRESS = Progress()
