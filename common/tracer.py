"""`TRACER`: records the spans and counters of this process for the option `trace`."""

from __future__ import annotations

import time
from typing import NamedTuple

#: The maximum number of events that a trace keeps for one process. Later events are dropped.
MAX_EVENTS = 500_000


class Event(NamedTuple):
    """One span, or one value of a counter.

    Attributes:
        track: the row in which a viewer draws the span. Empty for counters.
        name: the name of the phase or counter.
        at_s: the start of the span, or the time of the value, as seconds of `time.perf_counter`.
        value: the duration of the span in seconds, or the value of the counter.
        event: the number of the event, if the transport numbers what it sends and receives (see
            `Transport.event`). None otherwise.
    """

    track: str
    name: str
    at_s: float
    value: float
    event: int | None = None


class Tracer:
    """Records spans and counters between `begin` and `take`. At other times, drops them."""

    def __init__(self) -> None:
        self._events: list[Event] | None = None

    def begin(self) -> None:
        """Begins a recording."""
        self._events = []

    def take(self) -> list[Event]:
        """Ends the recording, and returns the recorded events."""
        events, self._events = self._events, None
        return events or []

    def span(self, track: str, name: str, started_s: float, event: int | None = None) -> float:
        """Records a span that ends now.

        Args:
            track: for example `driver`, `worker`, or `request 3` for a request to worker 3.
            name: the name of the phase.
            started_s: the start of the span, as seconds of `time.perf_counter`. Seconds of
                `time.monotonic` are also allowed, because both are the same clock on Linux and
                macOS.
            event: see `Event`.

        Returns:
            the duration of the span in seconds.
        """
        duration_s = time.perf_counter() - started_s
        if self._events is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event(track, name, started_s, duration_s, event))
        return duration_s

    def count(self, name: str, value: float) -> None:
        """Records the current value of a counter."""
        if self._events is not None and len(self._events) < MAX_EVENTS:
            self._events.append(Event("", name, time.perf_counter(), value))


#: The tracer of this process.
TRACER = Tracer()
