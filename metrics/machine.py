"""Measures the use of processors, memory and GPUs.

`ProcessMeter` measures one process. `MachineMeter` measures the driver's machine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil

from polopt.metrics.memory import memory
from polopt.metrics.number import Number, declare


class ProcessUse(NamedTuple):
    """The use of processors, memory and GPUs by a process in an interval.

    Attributes:
        wall_s: length of the interval in seconds.
        cpu_s: processor time of all threads of the process together, in seconds.
        memory_bytes: resident memory at the end of the interval.
        gpu_s: seconds in which the GPU of the process was busy with work of any process, estimated
            from `GpuUse.share` at the end of the interval. NaN if unknown.
        gpu_memory_bytes: GPU memory that PyTorch held at the end of the interval.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpu_s: float = 0.0
    gpu_memory_bytes: int = 0

    def then(self, later: ProcessUse) -> ProcessUse:
        """Returns the use in this interval and a later interval together. If `gpu_s` of one
        interval is unknown, the GPU is assumed to have been equally busy in both intervals."""
        wall_s = self.wall_s + later.wall_s
        known = [use for use in (self, later) if not math.isnan(use.gpu_s)]
        known_s = sum(use.wall_s for use in known)
        gpu_s = sum(use.gpu_s for use in known) if known_s else self.gpu_s + later.gpu_s
        return later._replace(
            wall_s=wall_s,
            cpu_s=self.cpu_s + later.cpu_s,
            gpu_s=gpu_s * (wall_s / known_s) if known_s else gpu_s,
        )

    def report(self) -> dict[str, float]:
        """Returns the numbers that results contain (see `docs/metrics.md`).

        `cpus` is the mean number of processors in use. `gpu_share` is the share of the interval in
        which the GPU was busy.
        """
        wall_s = max(self.wall_s, 1e-9)
        return {
            "cpus": self.cpu_s / wall_s,
            "memory_bytes": self.memory_bytes,
            "gpu_share": self.gpu_s / wall_s,
            "gpu_memory_bytes": self.gpu_memory_bytes,
        }


def use_numbers(process: str, prefix: str = "", metric: str = "") -> tuple[Number, ...]:
    """Declares the numbers of `ProcessUse.report`.

    Args:
        process: the process in sentences, such as `the driver's process`.
        prefix: prefix of the keys.
        metric: prefix of the metrics in Prometheus.
    """
    return declare(f"""
        {prefix}cpus (processors, metric={metric}cpus): processors that all threads of {process} use
        {prefix}memory_bytes (bytes, metric={metric}memory_bytes): resident memory of {process}
        {prefix}gpu_share (share, metric={metric}gpu_share): share of the time in which the GPU of
            {process} is busy with work of any process. 0 without a GPU
        {prefix}gpu_memory_bytes (bytes, metric=): memory that the PyTorch of {process} holds on its
            GPU
    """)


#: The numbers of `MachineMeter.report`.
NUMBERS = (
    *declare("""
        cpu_share (share, metric=): share of the machine's processor time that was used
        num_cpus (processors, metric=): processors that the driver may use
        load_1m (processes, metric=): processes of the machine that run or wait for a processor,
            mean over one minute
        memory_share (share, metric=): share of the memory of the machine or container in use
    """),
    *use_numbers("the driver's process", "driver_", "driver_"),
)


class GpuUse(NamedTuple):
    """The current use of the GPUs of a process.

    Attributes:
        share: the share of time in which the GPU was busy with work of any process. The NVIDIA
            driver measures this share over a sample period of 1/6 to 1 s. With several GPUs, it is
            the largest share. NaN if unknown.
        memory_bytes: GPU memory that PyTorch holds in this process.
    """

    share: float = 0.0
    memory_bytes: int = 0


class GpuReader:
    """Reads the use of the GPUs on which this process holds memory through PyTorch.

    If the process holds memory on a GPU, `GpuUse.share` needs the package `nvidia-ml-py`, which the
    extra `gpu` installs. The share is NaN without this package, if one of these GPUs does not
    report its utilization (as for a MIG slice), or if a query fails.

    Args:
        cuda: the module `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __call__(self) -> GpuUse:
        # Before the process uses a GPU, a query would create a CUDA context, which takes memory.
        cuda = self._cuda
        if not cuda.is_initialized():
            return GpuUse()
        held = {gpu: cuda.memory_reserved(gpu) for gpu in range(cuda.device_count())}
        shares = [self._share(gpu) for gpu, size in held.items() if size > 0]
        return GpuUse(float(np.max(shares, initial=0.0)), sum(held.values()))  # NaN if one is NaN

    def _share(self, gpu: int) -> float:
        try:
            return float(self._cuda.utilization(gpu)) / 100.0
        except Exception:  # NVML's errors have no public base class
            return math.nan


class ProcessMeter:
    """Measures the use of processors, memory and GPUs by this process.

    Args:
        read_gpus: a function, such as a `GpuReader`, that returns the current use of the GPUs.
            `None` means that the process uses no GPU.
    """

    def __init__(self, read_gpus: Callable[[], GpuUse] | None = None) -> None:
        self._process = psutil.Process()
        self._read_gpus = read_gpus or GpuUse
        self._then = (time.perf_counter(), time.process_time())

    def read(self) -> ProcessUse:
        """Returns the use since the last call."""
        then_s, cpu_then_s = self._then
        now_s, cpu_s = self._then = (time.perf_counter(), time.process_time())
        gpus = self._read_gpus()
        return ProcessUse(
            wall_s=now_s - then_s,
            cpu_s=cpu_s - cpu_then_s,
            memory_bytes=self._process.memory_info().rss,
            gpu_s=gpus.share * (now_s - then_s),
            gpu_memory_bytes=gpus.memory_bytes,
        )


class MachineMeter:
    """Measures the use of the driver's machine and process since the last report.

    Args:
        read_gpus: see `ProcessMeter`.
    """

    def __init__(self, read_gpus: Callable[[], GpuUse] | None = None) -> None:
        self._driver = ProcessMeter(read_gpus)
        self._then = _busy_and_total_s()

    def report(self) -> dict[str, float]:
        """Returns the numbers since the last call, and begins a new interval.

        Returns:
            `cpu_share`: the share of all processors that was busy.
            `num_cpus`: the number of processors that this process may use.
            `load_1m`: the mean number of processes that run or wait for a processor, over the last
            minute.
            `memory_share`: the share of the memory that is in use. See `Memory`.
            The keys of `ProcessUse.report` with the prefix `driver_`, for this process.
        """
        busy_then_s, total_then_s = self._then
        busy_s, total_s = self._then = _busy_and_total_s()
        elapsed_s = total_s - total_then_s
        ram = memory()
        return {
            "cpu_share": (busy_s - busy_then_s) / elapsed_s if elapsed_s > 0.0 else 0.0,
            "num_cpus": num_cpus(),
            "load_1m": psutil.getloadavg()[0],
            "memory_share": 1.0 - ram.available / ram.total,
            **{f"driver_{key}": value for key, value in self._driver.read().report().items()},
        }


def num_cpus() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS does not have this function
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _busy_and_total_s() -> tuple[float, float]:
    """Returns busy and total seconds, summed over all processors since the machine started."""
    times = psutil.cpu_times()
    # The fields for user time already contain the time of guests (virtual machines).
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
