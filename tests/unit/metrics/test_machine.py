"""Use of processors, memory and GPUs by the driver and by each worker."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import psutil
import pytest

from polopt.metrics.machine import GpuReader, GpuUse, MachineMeter, ProcessMeter, ProcessUse
from polopt.metrics.worker_times import SPREAD_KEYS, WorkerTimes


def work(duration_s: float) -> None:
    """Uses one processor for `duration_s` seconds of processor time."""
    until_s = time.process_time() + duration_s
    while time.process_time() < until_s:
        pass


def test_processor_seconds_are_those_since_the_last_reading() -> None:
    meter = ProcessMeter()
    work(0.3)
    first = meter.read()
    assert first.cpu_s == pytest.approx(0.3, abs=0.1)
    time.sleep(0.2)
    second = meter.read()
    assert second.cpu_s < 0.1
    assert second.wall_s >= 0.2
    both = first.then(second).report()
    cpus = (first.cpu_s + second.cpu_s) / (first.wall_s + second.wall_s)
    assert both["cpus"] == pytest.approx(cpus)


def test_memory_is_that_of_the_process_now() -> None:
    meter = ProcessMeter()
    before = meter.read()
    held = np.ones(20_000_000)  # 160 MB, written to
    after = meter.read()
    assert after.memory_bytes - before.memory_bytes > 100_000_000
    assert before.then(after).memory_bytes == after.memory_bytes
    assert after.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert held.sum() > 0


def test_gpu_seconds_are_weighted_by_the_time_between_readings() -> None:
    shares = iter([1.0, 0.25])
    meter = ProcessMeter(lambda: GpuUse(next(shares), 7))
    time.sleep(0.05)
    first = meter.read()
    time.sleep(0.15)
    second = meter.read()
    total = first.then(second).report()
    wall_s = first.wall_s + second.wall_s
    assert total["gpu_share"] == pytest.approx((first.wall_s + 0.25 * second.wall_s) / wall_s)
    assert total["gpu_memory_bytes"] == 7


def test_gpu_share_is_known_again_after_a_failed_query() -> None:
    known, unknown = ProcessUse(wall_s=2.0, gpu_s=1.0), ProcessUse(wall_s=6.0, gpu_s=math.nan)
    assert known.then(unknown).report()["gpu_share"] == 0.5
    assert unknown.then(known).report()["gpu_share"] == 0.5
    assert unknown.then(known).then(known).report()["gpu_share"] == 0.5
    assert math.isnan(unknown.then(unknown).gpu_s)


class Cuda:
    """A fake of `torch.cuda` in a process that holds memory on some GPUs."""

    def __init__(self, held: list[int], busy: list[int | Exception], started: bool = True) -> None:
        self.held, self.busy, self.started = held, busy, started
        self.asked: list[int] = []

    def is_initialized(self) -> bool:
        return self.started

    def device_count(self) -> int:
        assert self.started, "this call would create a CUDA context"
        return len(self.held)

    def memory_reserved(self, gpu: int) -> int:
        return self.held[gpu]

    def utilization(self, gpu: int) -> int:
        self.asked.append(gpu)
        busy = self.busy[gpu]
        if isinstance(busy, Exception):
            raise busy
        return busy


def test_a_process_that_uses_no_gpu_begins_no_context() -> None:
    assert GpuReader(Cuda([5], [90], started=False))() == GpuUse(0.0, 0)


def test_gpus_are_those_with_memory_of_this_process() -> None:
    cuda = Cuda([0, 300, 200], [99, 40, 70])
    assert GpuReader(cuda)() == GpuUse(0.7, 500)  # the largest share, and all memory
    assert cuda.asked == [1, 2]


@pytest.mark.parametrize("busy", [[ModuleNotFoundError("pynvml"), 40], [40, RuntimeError("NVML")]])
def test_share_is_nan_only_while_a_gpu_does_not_report_it(busy: list[int | Exception]) -> None:
    cuda = Cuda([300, 200], busy)
    reader = GpuReader(cuda)
    use = reader()
    assert math.isnan(use.share)
    assert use.memory_bytes == 500
    cuda.busy = [40, 30]
    assert reader() == GpuUse(0.4, 500)


def test_the_machines_report_has_the_drivers_process() -> None:
    """The clocks are read around the meter's own readings, because other programs may run between
    two lines. The meter counts processor time in ticks of 10 ms."""
    clocks = [(time.perf_counter(), time.process_time())]
    meter = MachineMeter()
    clocks.append((time.perf_counter(), time.process_time()))
    work(0.2)
    clocks.append((time.perf_counter(), time.process_time()))
    report = meter.report()
    clocks.append((time.perf_counter(), time.process_time()))
    (wall_0, cpu_0), (wall_1, cpu_1), (wall_2, cpu_2), (wall_3, cpu_3) = clocks
    low, high = (cpu_2 - cpu_1) / (wall_3 - wall_0), (cpu_3 - cpu_0) / (wall_2 - wall_1)
    assert low - 0.1 <= report["driver_cpus"] <= high + 0.1
    assert report["driver_memory_bytes"] > 10_000_000
    assert report["driver_gpu_memory_bytes"] == 0
    assert 0.0 < report["cpu_share"] <= 1.0


def reported(times: WorkerTimes, *indices: int) -> dict[str, Any]:
    return times.report(indices, 1.0)


def test_uses_of_an_interval_are_summed_and_then_repeated() -> None:
    times = WorkerTimes()
    times.add(1, {}, use=ProcessUse(wall_s=1.0, cpu_s=0.9, memory_bytes=10))
    times.add(1, {}, use=ProcessUse(wall_s=3.0, cpu_s=0.3, memory_bytes=30))
    times.add(1, {})
    times.add(2, {}, use=ProcessUse(wall_s=2.0, cpu_s=2.0, memory_bytes=50, gpu_s=1.0))
    for _ in range(2):  # the second result has no reply with new numbers
        report = reported(times, 1, 2, 3)
        assert [each["cpus"] for each in report["per_worker"]] == pytest.approx([0.3, 1.0, 0.0])
        assert [each["memory_bytes"] for each in report["per_worker"]] == [30, 50, 0]
        assert report["gpu_share"]["max"] == pytest.approx(0.5)
        assert set(SPREAD_KEYS) <= set(report)
    times.add(1, {}, use=ProcessUse(wall_s=2.0, cpu_s=1.0, memory_bytes=20))
    report = reported(times, 1, 2, 3)
    assert report["per_worker"][0]["cpus"] == pytest.approx(0.5)  # of this interval alone
    assert report["per_worker"][0]["memory_bytes"] == 20
