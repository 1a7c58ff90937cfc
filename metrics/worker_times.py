"""`WorkerTimes`: how the workers spend their time, computed on the driver from their answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polopt.metrics.machine import USE_KEYS, ProcessUse
from polopt.metrics.timers import MAX_DURATIONS, percentiles_ms

#: Parts of a worker's time that every strategy has. It measures them itself. `other` is the time
#: of calls outside of any phase. The rest of its time is `idle`.
BUSY_PARTS = ("sample", "gradient", "learn", "allreduce", "skew", "other")
PARTS = (*BUSY_PARTS, "idle")
#: Numbers of each worker of which results have mean, smallest and largest.
SPREAD_KEYS = ("env_steps_per_s", "idle_share", *USE_KEYS)


class _Worker:
    """Sums of one worker since the last report."""

    def __init__(self, busy_parts: tuple[str, ...]) -> None:
        self.answered_s: float | None = None
        self.busy_parts = busy_parts
        self.shares = {**dict.fromkeys(busy_parts, 0.0), "idle": 1.0}
        self.use = ProcessUse()
        self.is_new = False  # whether `use` is of this interval
        self.begin_interval()

    def begin_interval(self) -> None:
        self.busy_s = dict.fromkeys(self.busy_parts, 0.0)
        self.wall_s = 0.0
        self.env_steps = 0
        self.gradients = 0
        self.is_new = False


class WorkerTimes:
    """Shares, steps, gradients and use of processors, memory and GPUs of each worker since the last
    report.

    A worker's wall time is the time between two of its answers, as the driver takes them. Idle time
    is wall time minus the seconds that the worker reports: it waits for the driver or for other
    workers, or its data are on their way. The time before a worker's first answer does not count.
    The local worker is part of the driver and has no idle time.

    Args:
        on_first_answer: called once, before the first answer of any worker is counted, with the
            seconds that this worker reports.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        further_phases: Iterable[str] = (),
        on_first_answer: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        further = tuple(phase for phase in further_phases if phase not in PARTS)
        self._busy_parts = (*BUSY_PARTS, *further)
        self._parts = (*self._busy_parts, "idle")
        self._on_first_answer = on_first_answer
        self._workers: dict[int, _Worker] = {}
        self._durations_s = {part: deque[float](maxlen=MAX_DURATIONS) for part in self._parts}

    def add(
        self,
        index: int,
        seconds: Mapping[str, float],
        env_steps: int = 0,
        use: ProcessUse | None = None,
    ) -> None:
        """Counts one answer.

        Args:
            index: of the worker. 0 is the local one.
            seconds: of the worker by phase, disjoint. A phase that the strategy has not declared
                counts as `other`. Each answer with the phase `gradient` is one gradient.
            env_steps: environment steps of the answer.
            use: of the worker's process since it was last told. None: it is not told.
        """
        now_s = self._clock()
        worker = self._workers.get(index)
        if worker is None:
            worker = self._workers[index] = _Worker(self._busy_parts)
        busy_s = 0.0
        for phase, duration_s in seconds.items():
            if duration_s > 0.0:
                part = phase if phase in worker.busy_s else "other"
                busy_s += duration_s
                worker.busy_s[part] += duration_s
                self._durations_s[part].append(duration_s)
        if self._on_first_answer is not None:
            first, self._on_first_answer = self._on_first_answer, None
            first(busy_s)
        answered_s = None if index == 0 else worker.answered_s
        wall_s = busy_s if answered_s is None else now_s - answered_s
        worker.answered_s = now_s
        worker.wall_s += wall_s
        worker.env_steps += env_steps
        worker.gradients += "gradient" in seconds
        if use is not None:
            worker.use = worker.use.then(use) if worker.is_new else use
            worker.is_new = True
        if wall_s > busy_s:
            self._durations_s["idle"].append(wall_s - busy_s)

    def report(self, indices: Iterable[int], elapsed_s: float) -> dict[str, Any]:
        """The block `workers/` since the last report. Then begins a new interval.

        Shares of a worker that has not answered since the last report are repeated, and so is the
        use of its process, which not every answer tells. Before its first answer a worker counts
        as idle.

        Args:
            indices: of the workers that belong to the run.
            elapsed_s: seconds since the last report, positive.
        """
        present = {
            index: self._workers.get(index) or _Worker(self._busy_parts) for index in indices
        }
        per_worker = []
        for index, worker in present.items():
            _update_shares(worker)
            per_worker.append(
                {
                    "index": index,
                    "env_steps_per_s": worker.env_steps / elapsed_s,
                    "idle_share": worker.shares["idle"],
                    "gradients_per_s": worker.gradients / elapsed_s,
                    "env_steps_per_sampling_s": _rate(worker.env_steps, worker.busy_s["sample"]),
                    **worker.use.report(),
                }
            )
        count = max(len(present), 1)
        share = {
            part: sum(w.shares[part] for w in present.values()) / count for part in self._parts
        }
        if not present:
            share["idle"] = 1.0
        percentiles = {part: percentiles_ms(self._durations_s[part]) for part in self._parts}
        self.begin_interval()
        self._workers = {i: worker for i, worker in self._workers.items() if i in present}
        return {
            "share": share,
            "p50_ms": {part: p50 for part, (p50, _) in percentiles.items()},
            "p99_ms": {part: p99 for part, (_, p99) in percentiles.items()},
            **{key: _spread([each[key] for each in per_worker]) for key in SPREAD_KEYS},
            # A tuple: Tune's TensorBoard logger makes histograms of lists, and warns of others.
            "per_worker": tuple(per_worker),
        }

    def begin_interval(self) -> None:
        """Resets the sums."""
        for worker in self._workers.values():
            worker.begin_interval()
        for durations_s in self._durations_s.values():
            durations_s.clear()

    def clear(self) -> None:
        """Removes all workers, for a run that continues from another state."""
        self._workers.clear()
        self.begin_interval()


def _update_shares(worker: _Worker) -> None:
    """Shares of the interval. Answers that arrive together can have been worked on for longer than
    the time between them. Then idle time is 0, and the shares are of the reported seconds."""
    busy_s = sum(worker.busy_s.values())
    total_s = max(worker.wall_s, busy_s)
    if total_s > 0.0:
        worker.shares = {part: busy / total_s for part, busy in worker.busy_s.items()}
        worker.shares["idle"] = max(0.0, 1.0 - busy_s / total_s)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0.0 else 0.0


def _spread(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    return {"mean": mean, "min": min(values, default=0.0), "max": max(values, default=0.0)}
