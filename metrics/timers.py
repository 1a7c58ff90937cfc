"""`PhaseTimer` times a phase of `PolicyOptimizer.step`. `LoadMeter` averages a changing number."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from polopt.common.tracer import TRACER

#: The phase of the driver between a result and the next iteration.
REPORT = "report"
#: The phase of the driver at the end of an iteration, in which the driver evaluates the policy and
#: saves the best policy. The driver plays the episodes itself, or requests them from workers.
EVALUATION = "evaluation"
#: The phase of start-up. No other phase includes this time. See `OptimizerStats`.
STARTUP = "startup"
#: Percentiles use only this many of the last durations of an interval. This bounds memory.
MAX_DURATIONS = 10_000


class PhaseTimer:
    """Times one phase: `with self.timers["apply"]: ...`.

    Args:
        window: number of durations in the mean.
        name: name of the phase in traces.
        clock: returns the seconds of a monotonic clock.

    Attributes:
        total_s: sum of the durations since construction or `restart`.
        peak_rows_per_s: highest throughput of a single timing. See `push_rows`.
    """

    def __init__(
        self, window: int = 100, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._clock = clock
        self._window: deque[float] = deque(maxlen=window)  # last durations of earlier intervals
        self._interval: deque[float] = deque(maxlen=MAX_DURATIONS)
        self._started_s = 0.0
        self._running = False
        self._is_cut = False  # whether `restart` has shortened the running or the last timing
        self._taken_s = 0.0  # sum of the durations in earlier intervals
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
        """Records the number of rows that the last timing processed, for `peak_rows_per_s`.

        A timing that `restart` has shortened is ignored, because its rows belong to the whole
        duration.
        """
        if self._is_cut:
            self._is_cut = False
        elif self._interval and self._interval[-1] > 0.0:
            self.peak_rows_per_s = max(self.peak_rows_per_s, rows / self._interval[-1])

    def restart(self, at_s: float) -> None:
        """Discards all time before `at_s`, but keeps `peak_rows_per_s`.

        If the running or the last timing extends beyond `at_s`, its later part is kept.

        Args:
            at_s: a time of the timer's clock.
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
        """Returns p50 and p99 since the last call in milliseconds, and begins a new interval.

        Both are 0 without durations.
        """
        percentiles = percentiles_ms(self._interval)
        self._window.extend(self._interval)
        self._interval.clear()
        self._taken_s = self.total_s
        return percentiles

    @property
    def mean_ms(self) -> float:
        """Mean of the last `window` durations in milliseconds, or 0 before the first duration."""
        durations_s = self._window.copy()
        durations_s.extend(self._interval)
        return 1000.0 * sum(durations_s) / max(len(durations_s), 1)


def percentiles_ms(durations_s: Collection[float]) -> tuple[float, float]:
    """Returns p50 and p99 of durations in milliseconds, or 0 without durations.

    The percentiles are interpolated linearly.
    """
    if not durations_s:
        return 0.0, 0.0
    p50, p99 = np.percentile(np.fromiter(durations_s, np.float64, len(durations_s)), (50, 99))
    return 1000.0 * float(p50), 1000.0 * float(p99)


class LoadMeter:
    """Computes mean and maximum of a number since the last report."""

    def __init__(self) -> None:
        self._sum = self._count = self._max = 0

    def add(self, value: int) -> None:
        """Adds one value, which is at least 0."""
        self._sum += value
        self._count += 1
        if value > self._max:
            self._max = value

    def report(self) -> dict[str, float]:
        """Returns `{mean, max}` since the last report, and resets them.

        Both are 0 without values.
        """
        report = {"mean": self._sum / max(self._count, 1), "max": self._max}
        self._sum = self._count = self._max = 0
        return report
