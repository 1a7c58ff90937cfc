"""Use of processors, memory and GPUs: `ProcessMeter` of a process, `MachineMeter` of the driver's
machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil


class ProcessUse(NamedTuple):
    """Processor time and memory that a process has used in a span of time.

    Attributes:
        wall_s: length of the span.
        cpu_s: seconds of processors, of all its threads together.
        memory_bytes: resident at the end.
        gpu_s: seconds in which its GPU was busy, whatever the process. NaN: not known.
        gpu_memory_bytes: that PyTorch held on GPUs at the end.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpu_s: float = 0.0
    gpu_memory_bytes: int = 0

    def then(self, later: ProcessUse) -> ProcessUse:
        """The use in this span and in a later one together."""
        return later._replace(
            wall_s=self.wall_s + later.wall_s,
            cpu_s=self.cpu_s + later.cpu_s,
            gpu_s=self.gpu_s + later.gpu_s,
        )

    def report(self) -> dict[str, float]:
        """`cpus` (processors in use, mean), `memory_bytes`, `gpu_share` (of the time in which its
        GPU was busy) and `gpu_memory_bytes`. See `docs/metrics.md`."""
        wall_s = max(self.wall_s, 1e-9)
        return {
            "cpus": self.cpu_s / wall_s,
            "memory_bytes": self.memory_bytes,
            "gpu_share": self.gpu_s / wall_s,
            "gpu_memory_bytes": self.gpu_memory_bytes,
        }


#: Keys of `ProcessUse.report`.
USE_KEYS = tuple(ProcessUse().report())


class GpuUse(NamedTuple):
    """The current use of the GPUs of a process.

    Attributes:
        share: how busy the GPU was with work of any process, as a share of the last sample period
            of the GPU's driver (1/6 to 1 s). With several GPUs, the largest share. NaN: not known.
        memory_bytes: GPU memory that PyTorch holds.
    """

    share: float = 0.0
    memory_bytes: int = 0


class GpuReader:
    """Reads the use of the GPUs on which this process holds memory through PyTorch.

    The busy share needs `nvidia-ml-py` (the extra `gpu`). A GPU that does not tell it, as a part of
    one that is shared (MIG), has the share NaN.

    Args:
        cuda: the module `torch.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._known = True

    def __call__(self) -> GpuUse:
        # Not before the process uses a GPU: a question would begin a context of 500 MB there.
        cuda = self._cuda
        if not cuda.is_initialized():
            return GpuUse()
        held = {gpu: cuda.memory_reserved(gpu) for gpu in range(cuda.device_count())}
        shares = [self._share(gpu) for gpu, size in held.items() if size > 0]
        return GpuUse(max(shares, default=0.0), sum(held.values()))

    def _share(self, gpu: int) -> float:
        if self._known:
            try:
                return float(self._cuda.utilization(gpu)) / 100.0
            except Exception:  # NVML's errors share no public class. Training goes on without
                self._known = False
        return math.nan


class ProcessMeter:
    """Use of processors, memory and GPUs by this process.

    Args:
        read_gpus: the use of its GPUs now, a `GpuReader`. None: it uses none.
    """

    def __init__(self, read_gpus: Callable[[], GpuUse] | None = None) -> None:
        self._process = psutil.Process()
        self._read_gpus = read_gpus or GpuUse
        self._then = (time.perf_counter(), time.process_time())

    def read(self) -> ProcessUse:
        """The use since the last call."""
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
    """Use of the driver's machine and of its own process since the last report.

    Args:
        read_gpus: as for `ProcessMeter`.
    """

    def __init__(self, read_gpus: Callable[[], GpuUse] | None = None) -> None:
        self._driver = ProcessMeter(read_gpus)
        self._then = _busy_and_total_s()

    def report(self) -> dict[str, float]:
        """Numbers since the last call. Then begins a new interval.

        Returns:
            `cpu_share` of all processors that is busy, `num_cpus` that this process may use,
            `load_1m` (processes that run or wait for a processor, mean of the last minute),
            `memory_share` in use. Of this process, the keys of `ProcessUse.report` with the prefix
            `driver_`.
        """
        busy_then_s, total_then_s = self._then
        busy_s, total_s = self._then = _busy_and_total_s()
        elapsed_s = total_s - total_then_s
        return {
            "cpu_share": (busy_s - busy_then_s) / elapsed_s if elapsed_s > 0.0 else 0.0,
            "num_cpus": num_cpus(),
            "load_1m": psutil.getloadavg()[0],
            "memory_share": psutil.virtual_memory().percent / 100.0,
            **{f"driver_{key}": value for key, value in self._driver.read().report().items()},
        }


def num_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _busy_and_total_s() -> tuple[float, float]:
    """Seconds of all processors together, since the machine started."""
    times = psutil.cpu_times()
    # The time of users contains the time of guests.
    total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total_s - times.idle - getattr(times, "iowait", 0.0), total_s
