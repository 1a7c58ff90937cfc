"""`PROGRESS`: when this process last made progress, so that slow work is told apart from a hang."""

from __future__ import annotations

import time
from typing import Any

#: Steps of a vector, or of one of its environments, that take longer are noted one by one.
SLOW_STEP_S = 0.1


class Progress:
    """The time of the last step of an environment, or of the last beginning or end of a phase.

    Attributes:
        at_s: `[1]` float64, of `time.monotonic`. `ControlPage` moves it into memory that other
            processes of the node can read. A memoryview: NumPy takes twice as long for one number.
        by_environment: each environment of a vector notes its steps. Only while they are slow: to
            note all steps of fast environments would take a fiftieth of their time.
    """

    by_environment = True

    def __init__(self) -> None:
        self.at_s: Any = memoryview(bytearray(8)).cast("d")
        self.note()

    def note(self) -> None:
        """Notes that there was progress just now."""
        self.at_s[0] = time.monotonic()

    def note_vector_step(self) -> None:
        """Notes that all environments of a vector have made a step."""
        now_s = time.monotonic()
        self.by_environment = now_s - self.at_s[0] > SLOW_STEP_S
        self.at_s[0] = now_s

    def note_of_other(self, silent_s: float) -> None:
        """Notes that a process for which this one waits made progress `silent_s` seconds ago."""
        self.at_s[0] = max(self.at_s[0], time.monotonic() - silent_s)


#: The progress of this process.
PROGRESS = Progress()
