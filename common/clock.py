"""`Clock` is the type of clocks. `VirtualClock` is a clock whose time passes only on request."""

from __future__ import annotations

from collections.abc import Callable

#: A function that returns the seconds of a monotonic clock, such as `time.monotonic`.
Clock = Callable[[], float]


class VirtualClock:
    """A clock for tests and simulations. Its time passes only in `advance`.

    Attributes:
        now_s: the current time of the clock, in seconds.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, duration_s: float) -> None:
        """Moves the clock forward."""
        self.now_s += duration_s
