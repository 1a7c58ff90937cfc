"""`WorkerTimes` computes from the replies of workers how each worker spends its time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polopt.metrics.machine import ProcessUse, use_numbers
from polopt.metrics.number import declare, unexported, within
from polopt.metrics.timers import MAX_DURATIONS, percentiles_ms

#: Parts of a worker's time that the worker measures during calls. `other` is the time of calls
#: outside all phases. Results contain these parts for every optimizer.
BUSY_PARTS = ("sample", "gradient", "learn", "allreduce", "skew", "other")
#: All parts of a worker's time. `idle` is the time outside calls.
PARTS = (*BUSY_PARTS, "idle")
#: Numbers of each worker. Results contain their mean, minimum and maximum over workers.
_SPREAD = (
    *declare("""
        env_steps_per_s (environment steps/s): sampling rate of a worker in the interval
        idle_share (share): share of a worker's time in which the worker is idle
    """),
    *use_numbers("a worker's process", metric="workers_"),
)
SPREAD_KEYS = tuple(number.key for number in _SPREAD)
#: The numbers of `WorkerTimes.report`.
NUMBERS = (
    *declare(f"""
        share/<part> (share): share of a worker's wall time, mean over workers. The shares of all
            parts sum to 1
        p50_ms/<part> (ms): median time that the part takes in a call, over the calls that were
            answered in the interval (at most the last {MAX_DURATIONS:,}). 0 without such calls
        p99_ms/<part> (ms): 99th percentile of the same times
    """),
    *(
        number._replace(
            key=f"{number.key}/<over>",
            meaning=f"{number.meaning}. `mean`, `min` and `max` over workers",
        )
        for number in _SPREAD
    ),
    *unexported(
        *within(
            "per_worker/<place>",
            (
                *_SPREAD,
                *declare("""
                    index (): index of the worker. 0 is the local worker
                    gradients_per_s (gradients/s): gradients of the worker per second
                    env_steps_per_sampling_s (environment steps/s): sampling rate of the worker
                        while it samples. 0 without an answer
                """),
            ),
        )
    ),
)


class _Worker:
    """The sums of one worker since the last report."""

    def __init__(self, busy_parts: tuple[str, ...]) -> None:
        self.answered_s: float | None = None
        self.busy_parts = busy_parts
        self.shares = {**dict.fromkeys(busy_parts, 0.0), "idle": 1.0}
        self.use = ProcessUse()
        self.is_new = False  # whether `use` was measured in this interval
        self.begin_interval()

    def begin_interval(self) -> None:
        self.busy_s = dict.fromkeys(self.busy_parts, 0.0)
        self.wall_s = 0.0
        self.env_steps = 0
        self.gradients = 0
        self.is_new = False


class WorkerTimes:
    """Computes how each worker has spent its time since the last report.

    Also collects the environment steps and gradients of each worker, and its use of processors,
    memory and GPUs.

    The wall time of a worker is the time between two of its replies, measured when the driver takes
    the replies. Idle time is wall time minus the busy seconds that the worker reports. A worker is
    idle while its data are in transit, and while it waits for the driver or for other workers. Of
    the time before a worker's first reply, only the busy seconds of this reply count. The local
    worker runs in the driver and has no idle time.

    Args:
        further_phases: names of further phases that the optimizer's workers time.
        on_first_answer: called once, with the busy seconds of the first reply of any worker.
        clock: returns the seconds of a monotonic clock.
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
        """Counts one reply.

        Args:
            index: index of the worker. 0 is the local worker.
            seconds: the worker's busy seconds by phase. The phases do not overlap. A phase that the
                optimizer has not declared counts as `other`. Each reply with the phase `gradient`
                counts as one gradient.
            env_steps: number of environment steps in the reply.
            use: use of processors, memory and GPUs by the worker's process, since the last reply
                that carried this value. `None` means that this reply does not carry this value.
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
        """Returns the block `optimizer/workers/` of a result, and begins a new interval.

        If a worker has not replied since the last report, its last shares are repeated. If no reply
        in the interval has carried the use of the worker's process, the last use is repeated.
        Before its first reply, a worker counts as idle.

        Args:
            indices: indices of the workers of the run.
            elapsed_s: seconds of training since the last report, above 0.
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
            # This is a tuple, because Tune's TensorBoard logger tries to convert lists to
            # histograms, and warns about lists that are not numbers.
            "per_worker": tuple(per_worker),
        }

    def begin_interval(self) -> None:
        """Resets the sums since the last report."""
        for worker in self._workers.values():
            worker.begin_interval()
        for durations_s in self._durations_s.values():
            durations_s.clear()

    def clear(self) -> None:
        """Removes all workers. Call this when the run continues from a restored state."""
        self._workers.clear()
        self.begin_interval()


def _update_shares(worker: _Worker) -> None:
    """Computes the worker's shares of time in the interval.

    If two replies arrive together, their busy seconds can exceed the wall time between them. Then
    the idle time is 0, and the shares are relative to the busy seconds.
    """
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
