"""Timers for the phases of `PolicyOptimizer.step`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

import numpy as np

#: Percentiles are over the last so many durations of an interval, which bounds memory.
MAX_DURATIONS = 10_000


class PhaseTimer:
    """Times one phase: `with self.apply_timer: ...`.

    Keeps the last `window` durations for the reported mean, the total since construction, and the
    number of processed rows for throughputs.

    Args:
        window: number of durations of the mean.

    Attributes:
        count: number of durations since construction.
        total_s: their sum in seconds.
        interval_s: the sum since the last `take_percentiles_ms`.
        peak_rows_per_s: largest throughput of one phase.
    """

    def __init__(self, window: int = 100) -> None:
        self._durations_s: deque[float] = deque(maxlen=window)
        self._rows: deque[int] = deque(maxlen=window)
        self._interval: deque[float] = deque(maxlen=MAX_DURATIONS)
        self._started_s = 0.0
        self.count = 0
        self.total_s = 0.0
        self.interval_s = 0.0
        self.peak_rows_per_s = 0.0

    def __enter__(self) -> PhaseTimer:
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.push(time.perf_counter() - self._started_s)

    def push(self, duration_s: float) -> None:
        """Records one duration in seconds."""
        self._durations_s.append(duration_s)
        self._rows.append(0)
        self.count += 1
        self.total_s += duration_s
        self.interval_s += duration_s
        self._interval.append(duration_s)

    def push_rows(self, rows: int) -> None:
        """Sets the number of rows that the last timed phase processed."""
        if not self._rows:
            return
        self._rows[-1] = rows
        if self._durations_s[-1] > 0.0:
            self.peak_rows_per_s = max(self.peak_rows_per_s, rows / self._durations_s[-1])

    def take_percentiles_ms(self) -> tuple[float, float]:
        """p50 and p99 since the last call in milliseconds, 0 without durations; then begins a new
        interval."""
        percentiles = percentiles_ms(self._interval)
        self._interval.clear()
        self.interval_s = 0.0
        return percentiles

    @property
    def mean_ms(self) -> float:
        """Mean of the last durations in milliseconds; 0 before the first."""
        if not self._durations_s:
            return 0.0
        return 1000.0 * sum(self._durations_s) / len(self._durations_s)

    @property
    def rows_per_s(self) -> float:
        """Rows per second over the last durations; 0 before the first."""
        elapsed_s = sum(self._durations_s)
        return sum(self._rows) / elapsed_s if elapsed_s > 0.0 else 0.0


def percentiles_ms(durations_s: Collection[float]) -> tuple[float, float]:
    """p50 and p99 of durations in milliseconds, interpolated linearly; 0 without durations."""
    if not durations_s:
        return 0.0, 0.0
    p50, p99 = np.percentile(np.fromiter(durations_s, np.float64, len(durations_s)), (50, 99))
    return 1000.0 * float(p50), 1000.0 * float(p99)
