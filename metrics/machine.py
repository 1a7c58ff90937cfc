"""`MachineMeter`: how busy the driver's machine is."""

from __future__ import annotations

import os
import time

import psutil


class MachineMeter:
    """Use of processors and memory since the last report, by this process and by the machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._begin()

    def _begin(self) -> None:
        self._then = (time.perf_counter(), time.process_time(), *_busy_and_total_s())

    def report(self) -> dict[str, float]:
        """Numbers since the last call; then begins a new interval.

        Returns:
            `cpu_share` of all processors that is busy, `num_cpus` that this process may use,
            `load_1m` (processes that run or wait for a processor, mean of the last minute),
            `memory_share` in use; of this process `driver_cpus` (processors in use, mean) and
            `driver_memory_bytes` (resident).
        """
        then_s, process_then_s, busy_then_s, total_then_s = self._then
        self._begin()
        now_s, process_s, busy_s, total_s = self._then
        elapsed_s = total_s - total_then_s
        return {
            "cpu_share": (busy_s - busy_then_s) / elapsed_s if elapsed_s > 0.0 else 0.0,
            "num_cpus": num_cpus(),
            "load_1m": psutil.getloadavg()[0],
            "memory_share": psutil.virtual_memory().percent / 100.0,
            "driver_cpus": (process_s - process_then_s) / max(now_s - then_s, 1e-9),
            "driver_memory_bytes": self._process.memory_info().rss,
        }


def num_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _busy_and_total_s() -> tuple[float, float]:
    """Seconds of all processors together, since the machine started."""
    times = psutil.cpu_times()
    # Time of guests is contained in that of users.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
