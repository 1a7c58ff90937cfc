"""`trace: true`: records some optimizer steps of a run, and writes them as a Chrome trace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from polopt.common.tracing import TRACER, Event
from polopt.metrics.chrome_trace import TRACE_FILE, chrome_trace
from polopt.optimizers.base import PolicyOptimizer
from polopt.trainers.config import TrainerConfig


class StepTrace:
    """Records the optimizer's steps that the config names, in the driver and in all workers.

    Args:
        config: its keys `trace`, `trace_first_step` and `trace_num_steps`.
        folder: directory of the file, `TRACE_FILE`.
    """

    def __init__(self, config: TrainerConfig, folder: Path) -> None:
        self._first = config.trace_first_step if config.trace else 0
        self._end = self._first + config.trace_num_steps if config.trace else 0
        self._path = folder / TRACE_FILE
        self._steps = 0
        self._begun_s = 0.0
        self._timers_s: dict[str, float] = {}

    def before_step(self, optimizer: PolicyOptimizer) -> None:
        """Begins or ends the recording, if the step that follows is the first one, or the first one
        after it."""
        self._steps += 1
        if self._steps == self._first:
            optimizer.workers.apply(_begin)
            TRACER.begin()
            self._timers_s = _totals(optimizer)
            self._begun_s = time.perf_counter()
        elif self._steps == self._end:
            self._write(optimizer)

    def _write(self, optimizer: PolicyOptimizer) -> None:
        ended_s = time.perf_counter()
        timers_s = {
            phase: total_s - self._timers_s[phase] for phase, total_s in _totals(optimizer).items()
        }
        processes = {"driver": TRACER.take()}
        optimizer.drain()  # the clocks are read by workers that have no other call pending
        called_s = time.perf_counter()
        answers = optimizer.workers.apply(_end) if optimizer.workers.remote else {}
        answered_s = time.perf_counter()
        for index, (events, clock_s) in answers.items():
            shift_s = clock_shift_s(clock_s, called_s, answered_s)
            moved = (event._replace(at_s=event.at_s + shift_s) for event in events)
            processes[f"worker {index}"] = [
                event
                for event in moved
                if self._begun_s <= event.at_s and event.at_s + event.value <= ended_s
            ]
        steps = {"first_step": self._first, "num_steps": self._end - self._first}
        duration_s = ended_s - self._begun_s
        trace = chrome_trace(processes, **steps, duration_s=duration_s, timers_s=timers_s)
        self._path.write_text(json.dumps(trace), encoding="utf-8")


def clock_shift_s(clock_s: float, called_s: float, answered_s: float) -> float:
    """Seconds to add to a worker's clock for the driver's clock. 0 if the worker read its clock
    between the driver's readings: then both have the clock of one machine. Otherwise the middle of
    the call counts, which is wrong by at most half of its duration (Cristian, 1989).

    Args:
        clock_s: the worker's clock during the call.
        called_s: the driver's clock before the call.
        answered_s: the driver's clock after it.
    """
    if called_s <= clock_s <= answered_s:
        return 0.0
    return (called_s + answered_s) / 2 - clock_s


def _totals(optimizer: PolicyOptimizer) -> dict[str, float]:
    return {phase: optimizer.timers[phase].total_s for phase in optimizer.phases}


def _begin(worker: Any) -> None:
    TRACER.begin()


def _end(worker: Any) -> tuple[list[Event], float]:
    return TRACER.take(), time.perf_counter()
