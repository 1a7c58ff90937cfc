"""`TRACER`: spans and counters of this process, recorded for `trace: true`."""

from __future__ import annotations

import time
from typing import NamedTuple

#: Events of one process that a trace keeps. Later ones are dropped.
MAX_EVENTS = 500_000


class Event(NamedTuple):
    """One span or one value of a counter.

    Attributes:
        track: row of the process in which a span is drawn. Empty for counters.
        name: of the phase or counter.
        at_s: start of the span, or time of the value, of `time.perf_counter`.
        value: duration of the span in seconds, or value of the counter.
        event: number in the record of the run, for `polopt rerun --at`. None without a record.
    """

    track: str
    name: str
    at_s: float
    value: float
    event: int | None = None


class Tracer:
    """Records spans and counters between `begin` and `take`. Otherwise it keeps nothing."""

    def __init__(self) -> None:
        self._events: list[Event] | None = None

    def begin(self) -> None:
        """Begins a recording."""
        self._events = []

    def take(self) -> list[Event]:
        """Ends the recording, and returns its events."""
        events, self._events = self._events, None
        return events or []

    def span(self, track: str, name: str, started_s: float, event: int | None = None) -> float:
        """Records a span that ends now.

        Args:
            track: `driver`, `worker`, or `request N` of worker N.
            name: of the phase.
            started_s: of `time.perf_counter`, or of `time.monotonic`, which is the same clock on
                Linux and macOS.
            event: see `Event`.

        Returns:
            its duration in seconds.
        """
        duration_s = time.perf_counter() - started_s
        if self._events is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event(track, name, started_s, duration_s, event))
        return duration_s

    def count(self, name: str, value: float) -> None:
        """Records the present value of a counter."""
        if self._events is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event("", name, time.perf_counter(), value))


#: The recorder of this process.
TRACER = Tracer()
