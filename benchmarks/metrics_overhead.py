"""Measures the cost of statistics and traces for each gradient of AsyncGradients.

    python benchmarks/metrics_overhead.py

The script measures the calls for statistics that one gradient causes in the driver, without
training. It divides their time by the time of a gradient in a run of A3C on CartPole-v1, with 8
environments x 20 steps. The difference between two runs, with and without statistics, would be
smaller than the noise of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import polopt

GRADIENTS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()
    off_us, gradient_us, steps_per_s = measure(args.iterations, args.num_workers, False)
    on_us, *_ = measure(args.iterations, args.num_workers, True)
    # A gradient has five trace events. `calls_us` causes four of them, one for each phase and one
    # for the lag. The fifth event is the request.
    trace_us = (on_us - off_us) * 5 / 4
    print(f"A3C: {gradient_us:.0f} us for each gradient, {steps_per_s:,.0f} environment steps/s")
    print(f"statistics: {off_us:.2f} us, {100.0 * off_us / gradient_us:.2f} percent")
    print(
        f"recording a trace: {trace_us:.2f} us more, {100.0 * trace_us / gradient_us:.2f} percent"
    )
    print(f"Microseconds for each gradient, medians of 7 times {GRADIENTS:,}.")


def calls_us(optimizer: Any, record: Any) -> float:
    """Returns the microseconds of statistics for one gradient: three phases, one record, one lag,
    one update, one count of pending calls, and a 1,000th of a report.

    Args:
        optimizer: its phases are timed.
        record: the record of a call of this optimizer.
    """
    stats, load = type(optimizer.metrics)(optimizer.phases), type(optimizer.calls.load)()
    wait, apply, dispatch = (stats.timers[phase] for phase in optimizer.phases)
    started_s = time.perf_counter()
    for i in range(GRADIENTS):
        with wait:
            load.add(4)
        with apply:
            stats.add_record(1 + i % 4, record, in_driver=False)
            stats.add_lag(i, i + 1, computed=i)
            stats.num_gradients_accepted += 1
            stats.add_training(160, 1, {"policy_loss": 0.1, "vf_loss": 0.2, "entropy": 0.3})
            stats.add_update_rows(1, 160)
        with dispatch:
            pass
        if i % 1000 == 999:
            stats.report((1, 2, 3, 4))
            load.report()
    return 1e6 * (time.perf_counter() - started_s) / GRADIENTS


def record_of_a_call(optimizer: Any) -> Any:
    """Returns the record of the next call of the optimizer."""
    records: list[Any] = []
    add_record = optimizer.metrics.add_record

    def add(worker_index: int, record: Any, in_driver: bool) -> None:
        records.append(record)
        add_record(worker_index, record, in_driver)

    optimizer.metrics.add_record = add
    try:
        optimizer.step()
    finally:
        del optimizer.metrics.add_record
    return records[0]


def measure(iterations: int, num_workers: int, trace: bool) -> tuple[float, float, float]:
    """Trains. Returns the microseconds of `calls_us`, and the microseconds of a gradient and the
    environment steps/s in the fastest iteration. With `trace`, the run records all steps."""
    trainer = polopt.A3C(
        {
            "env": "CartPole-v1",
            "num_workers": num_workers,
            "num_envs_per_worker": 8,
            "rollout_fragment_length": 20,
            "grads_per_step": 1000,
            "vectorization_mode": "sync",
            "trace": trace,
            "trace_first_step": 1,
            "trace_num_steps": 100_000,
        }
    )
    try:
        trainer.train()  # workers start
        blocks = [trainer.train()["optimizer"] for _ in range(iterations)]
        record = record_of_a_call(trainer.optimizer)
        call_us = statistics.median(calls_us(trainer.optimizer, record) for _ in range(7))
    finally:
        trainer.stop()
    best = max(blocks, key=lambda block: float(block["updates_per_s"]))
    return call_us, 1e6 / best["updates_per_s"], best["env_steps_per_s"]


if __name__ == "__main__":
    main()
