"""Timers for the phases of `PolicyOptimizer.step`."""

from __future__ import annotations

import time
from collections import deque


class PhaseTimer:
    """Times one phase: `with self.apply_timer: ...`.

    Keeps the last `window` durations for the reported mean, the total since construction, and the
    number of processed rows for throughputs.

    Args:
        window: number of durations of the mean.

    Attributes:
        count: number of durations since construction.
        total_s: their sum in seconds.
        peak_rows_per_s: largest throughput of one phase.
    """

    def __init__(self, window: int = 100) -> None:
        self._durations_s: deque[float] = deque(maxlen=window)
        self._rows: deque[int] = deque(maxlen=window)
        self._started_s = 0.0
        self.count = 0
        self.total_s = 0.0
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

    def push_rows(self, rows: int) -> None:
        """Sets the number of rows that the last timed phase processed."""
        if not self._rows:
            return
        self._rows[-1] = rows
        if self._durations_s[-1] > 0.0:
            self.peak_rows_per_s = max(self.peak_rows_per_s, rows / self._durations_s[-1])

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
