"""`Clock`, and `VirtualClock`, whose time passes only when a method is called."""

from __future__ import annotations

from collections.abc import Callable

#: Seconds of a monotonic clock, such as `time.monotonic`.
Clock = Callable[[], float]


class VirtualClock:
    """A clock for tests and simulations.

    Attributes:
        now_s: its time.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, duration_s: float) -> None:
        """Lets time pass."""
        self.now_s += duration_s
