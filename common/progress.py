"""`PROGRESS`: the time at which this process last made progress. The driver uses this time to
distinguish slow calls from hanging calls."""

from __future__ import annotations

import time
from typing import Any

#: If a vector makes no progress for longer than this, its environments note their own steps.
SLOW_STEP_S = 0.1


class Progress:
    """Stores the time of the last progress. Progress is a step of an environment, or the start or
    end of a phase.

    Attributes:
        at_s: the time of the last progress, `[1]` float64, as seconds of `time.monotonic`.
            `ControlPage` replaces this buffer by memory that other processes of the node can read.
            The buffer is a memoryview, because access to one number takes twice as long in NumPy.
        by_environment: whether each environment of a vector notes its own steps. True before the
            first step of a vector, and while steps are slow. For fast environments, noting each
            step would take a fiftieth of the time of a step.
    """

    by_environment = True

    def __init__(self) -> None:
        self.at_s: Any = memoryview(bytearray(8)).cast("d")
        self.note()

    def note(self) -> None:
        """Notes progress at the current time."""
        self.at_s[0] = time.monotonic()

    def note_vector_step(self) -> None:
        """Notes that all environments of a vector have made a step. If the last progress was more
        than `SLOW_STEP_S` ago, the environments note their own steps in the next step of the
        vector."""
        now_s = time.monotonic()
        self.by_environment = now_s - self.at_s[0] > SLOW_STEP_S
        self.at_s[0] = now_s

    def note_of_other(self, silent_s: float) -> None:
        """Notes that another process, for which this process waits, made progress `silent_s`
        seconds ago."""
        self.at_s[0] = max(self.at_s[0], time.monotonic() - silent_s)


#: The progress of this process.
PROGRESS = Progress()
