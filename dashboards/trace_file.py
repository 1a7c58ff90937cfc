"""`StepTrace`: records some optimizer steps of a run, and writes them as a Chrome trace
(`trace: true`)."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from polopt.common.tracer import MAX_EVENTS, TRACER, Event
from polopt.dashboards.data.chrome_trace import TRACE_FILE, chrome_trace
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.workers.call_workers import foreach_worker

logger = logging.getLogger("polopt")


class StepTrace:
    """Records the optimizer steps that the config selects. The driver records its events, and so do
    all workers that are up at the first of these steps. The driver writes the trace after the last
    of these steps.

    Args:
        first_step: index of the first recorded step, counted from 1. 0 means no trace.
        num_steps: number of recorded steps.
        folder: directory of the trace file.
    """

    def __init__(self, first_step: int, num_steps: int, folder: Path) -> None:
        TRACER.take()  # discards events of an earlier trainer that was stopped while it recorded
        self._first = first_step
        self._last = first_step + num_steps - 1 if first_step else 0
        self._path = folder / TRACE_FILE
        self._steps = 0
        self._begun_s = 0.0
        self._timers_s: dict[str, float] = {}

    def before_step(self, optimizer: PolicyOptimizer) -> None:
        """Begins the recording before the first recorded step."""
        self._steps += 1
        if self._steps == self._first:
            _call_each(optimizer, _begin)
            TRACER.begin()
            self._timers_s = _totals(optimizer)
            self._begun_s = time.perf_counter()

    def after_step(self, optimizer: PolicyOptimizer) -> None:
        """Ends the recording after the last recorded step, and writes the file. Warns if the file
        cannot be written."""
        if self._steps != self._last:
            return
        ended_s = time.perf_counter()
        timers_s = {
            phase: total_s - self._timers_s[phase] for phase, total_s in _totals(optimizer).items()
        }
        # A worker without pending calls reads its clock as soon as it is called, which makes the
        # estimated difference between the clocks more accurate.
        optimizer.drain()
        processes = _by_process(TRACER.take())
        shifts_s = {w.index: _shift_s(optimizer, w.index) for w in _up(optimizer)}
        for index, events in _call_each(optimizer, _take).items():
            shift_s = shifts_s.get(index, 0.0)
            moved = [event._replace(at_s=event.at_s + shift_s) for event in events]
            processes[f"worker {index}"] = moved
        trace = chrome_trace(
            processes,
            (self._begun_s, ended_s),
            first_step=self._first,
            num_steps=self._last - self._first + 1,
            timers_s=timers_s,
            truncated=[name for name, events in processes.items() if len(events) >= MAX_EVENTS],
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(trace), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            logger.warning("The trace was not written: %s", error)

    def close(self) -> None:
        """Warns if the run has ended before the last recorded step, so that there is no trace."""
        if 0 < self._steps < self._last:
            logger.warning(
                "trace=True has written no trace: the run ended after %d optimizer %s, and the "
                "trace records the steps %d to %d. Train longer, or lower trace_first_step or "
                "trace_num_steps",
                self._steps,
                "step" if self._steps == 1 else "steps",
                self._first,
                self._last,
            )


def _by_process(events: list[Event]) -> dict[str, list[Event]]:
    """Separates the events of the local worker from the events of the driver."""
    local = [event for event in events if event.track == "worker"]
    driver = {"driver": [event for event in events if event.track != "worker"]}
    return {**driver, "worker 0": local} if local else driver


def _up(optimizer: PolicyOptimizer) -> list[Any]:
    return [worker for worker in optimizer.workers.remote if worker.up]


def _call_each(optimizer: PolicyOptimizer, fn: Any) -> dict[int, Any]:
    return foreach_worker(optimizer.workers, fn) if optimizer.workers.remote else {}


def _shift_s(optimizer: PolicyOptimizer, index: int) -> float:
    called_s = time.perf_counter()
    clocks_s = foreach_worker(optimizer.workers, _clock, only=index)
    return clock_shift_s(clocks_s.get(index, called_s), called_s, time.perf_counter())


def clock_shift_s(clock_s: float, called_s: float, answered_s: float) -> float:
    """Returns the seconds to add to a worker's clock to get the driver's clock.

    If the worker's reading is between the two readings of the driver, the result is 0, because both
    processes probably use the clock of one machine. Otherwise, the worker is assumed to have read
    its clock in the middle of the call. The error is at most half of the duration of the call
    (Cristian, 1989).

    Args:
        clock_s: the worker's clock during the call.
        called_s: the driver's clock before the call.
        answered_s: the driver's clock after the call.
    """
    if called_s <= clock_s <= answered_s:
        return 0.0
    return (called_s + answered_s) / 2 - clock_s


def _totals(optimizer: PolicyOptimizer) -> dict[str, float]:
    return {phase: optimizer.timers[phase].total_s for phase in optimizer.phases}


def _begin(worker: Any) -> None:
    TRACER.begin()


def _clock(worker: Any) -> float:
    return time.perf_counter()


def _take(worker: Any) -> list[Event]:
    return TRACER.take()
