"""Timers for the phases of `PolicyOptimizer.step`, and a meter of what changes often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from polopt.common.tracer import TRACER

#: The driver's phase between a result and the next iteration.
REPORT = "report"
#: The driver's phase between two iterations in which it plays episodes for evaluation, or requests
#: them of workers, and saves the best policy.
EVALUATION = "evaluation"
#: The time before the first answer of a worker, which no other phase contains.
STARTUP = "startup"
#: Percentiles are over the last so many durations of an interval, which bounds memory.
MAX_DURATIONS = 10_000


class PhaseTimer:
    """Times one phase: `with self.timers["apply"]: ...`.

    Args:
        window: number of durations of the mean.
        name: name of the phase, in traces.
        clock: seconds of a monotonic clock.

    Attributes:
        total_s: sum of the durations since construction.
        peak_rows_per_s: largest throughput of one phase.
    """

    def __init__(
        self, window: int = 100, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._clock = clock
        self._window: deque[float] = deque(maxlen=window)  # the last of earlier intervals
        self._interval: deque[float] = deque(maxlen=MAX_DURATIONS)
        self._started_s = 0.0
        self._running = False
        self._is_cut = False  # whether only a part of the last timing is known
        self._taken_s = 0.0  # total of earlier intervals
        self.total_s = 0.0
        self.peak_rows_per_s = 0.0

    def __enter__(self) -> PhaseTimer:
        self._started_s = self._clock()
        self._running = True
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        TRACER.span("driver", self._name, self._started_s)
        self.push(self._clock() - self._started_s)

    def push(self, duration_s: float) -> None:
        """Records one duration in seconds."""
        self._interval.append(duration_s)
        self.total_s += duration_s

    def push_rows(self, rows: int) -> None:
        """Sets the number of rows that the last timed phase of the interval processed. A timing
        that `restart` has cut counts for no throughput, because its rows belong to the whole
        timing."""
        if self._is_cut:
            self._is_cut = False
        elif self._interval and self._interval[-1] > 0.0:
            self.peak_rows_per_s = max(self.peak_rows_per_s, rows / self._interval[-1])

    def restart(self, at_s: float) -> None:
        """Drops what was timed before `at_s`, as if the timer had been made then. Of the running or
        the last timing, the part after `at_s` is kept.

        Args:
            at_s: of the clock.
        """
        last_s = self._interval[-1] if self._interval and not self._running else 0.0
        after_s = min(last_s, self._started_s + last_s - at_s)
        self._is_cut = after_s > 0.0 or (self._running and self._started_s < at_s)
        self._started_s = max(self._started_s, at_s)
        self._window.clear()
        self._interval.clear()
        self.total_s = self._taken_s = 0.0
        if after_s > 0.0:
            self.push(after_s)

    @property
    def interval_s(self) -> float:
        """Sum of the durations since the last `take_percentiles_ms`."""
        return self.total_s - self._taken_s

    def take_percentiles_ms(self) -> tuple[float, float]:
        """p50 and p99 since the last call in milliseconds, 0 without durations. Then begins a new
        interval."""
        percentiles = percentiles_ms(self._interval)
        self._window.extend(self._interval)
        self._interval.clear()
        self._taken_s = self.total_s
        return percentiles

    @property
    def mean_ms(self) -> float:
        """Mean of the last durations in milliseconds. 0 before the first."""
        durations_s = self._window.copy()
        durations_s.extend(self._interval)
        return 1000.0 * sum(durations_s) / max(len(durations_s), 1)


def percentiles_ms(durations_s: Collection[float]) -> tuple[float, float]:
    """p50 and p99 of durations in milliseconds, interpolated linearly. 0 without durations."""
    if not durations_s:
        return 0.0, 0.0
    p50, p99 = np.percentile(np.fromiter(durations_s, np.float64, len(durations_s)), (50, 99))
    return 1000.0 * float(p50), 1000.0 * float(p99)


class LoadMeter:
    """Mean and maximum of the values since the last report."""

    def __init__(self) -> None:
        self._sum = self._count = self._max = 0

    def add(self, value: int) -> None:
        """Counts one value, 0 or larger."""
        self._sum += value
        self._count += 1
        if value > self._max:
            self._max = value

    def report(self) -> dict[str, float]:
        """`{mean, max}` since the last report, 0 without values. Then resets them."""
        report = {"mean": self._sum / max(self._count, 1), "max": self._max}
        self._sum = self._count = self._max = 0
        return report
