"""Measures the throughput of three optimizers with 1 to 8 workers whose environments sleep.

    python benchmarks/scaling.py [--workers 1 2 4 8] [--seconds 10] [--repeats 3]

Each worker has one environment whose steps sleep for 5 ms, so the cores are not the limit. N
workers can reach at most N / 5 ms. In practice, a sleep takes longer than requested. So the script
divides the rate by N times the rate of one environment without polopt, measured in the same run.
`ray.init` gets enough logical CPUs for all workers. The numbers of workers are measured in turns.
Prints Markdown and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import ray
from about import about

import polopt

STEP_S = 0.005
GOAL = 0.9
#: Preset and settings of each optimizer.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "AsyncGradients": ("A3C", {"rollout_fragment_length": 20, "grads_per_step": 20}),
    "DecentralizedAllReduce": (
        "DDPPO",
        {
            "rollout_fragment_length": 128,
            "num_sgd_iter": 4,
            "sgd_minibatch_size": 64,
            "fraction_workers": 1.0,
        },
    ),
    "SyncSamples": (
        "SyncPPO",
        {"rollout_fragment_length": 128, "num_sgd_iter": 4, "sgd_minibatch_size": 64},
    ),
}


class Sleepy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 whose steps sleep."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", disable_env_checker=True))

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


def bare(seconds: float) -> float:
    """Returns the steps per second of one environment without polopt."""
    env = Sleepy()
    env.reset(seed=0)
    steps, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        _, _, terminated, truncated, _ = env.step(steps % 2)
        steps += 1
        if terminated or truncated:
            env.reset()
    return steps / (time.perf_counter() - started_s)


def measure(name: str, workers: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Returns the steps per second, and the share of time of each phase of the optimizer."""
    preset, settings = CASES[name]
    config = {
        "env": lambda: Sleepy(),  # pickled by value, because workers cannot import this file
        "num_workers": workers,
        "num_envs_per_worker": 1,
        "min_sample_timesteps_per_iteration": 0,
        "seed": 0,
        **settings,
    }
    trainer = getattr(polopt, preset)(config=config)
    try:
        trainer.train()
        trainer.train()
        timers = trainer.optimizer.timers
        before = {phase: timer.total_s for phase, timer in timers.items()}
        first = trainer.optimizer.metrics.num_env_steps_sampled
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            trainer.train()
        elapsed_s = time.perf_counter() - started_s
        steps = trainer.optimizer.metrics.num_env_steps_sampled - first
        shares = {p: (timer.total_s - before[p]) / elapsed_s for p, timer in timers.items()}
        return steps / elapsed_s, shares
    finally:
        trainer.stop()


def print_table(one_bare: float, rates: dict[str, dict[int, list[float]]]) -> None:
    """Prints throughput and its share of linear scaling, by optimizer and number of workers."""
    print(
        f"One bare environment: {one_bare:,.1f} steps/s; {1 / STEP_S:,.0f} if sleep were exact.\n"
    )
    print("| optimizer | workers | steps/s, median (range) | of N bare | of N times one worker |")
    print("|---|---:|---:|---:|---:|")
    for name, by_workers in rates.items():
        fewest = min(by_workers)
        each = statistics.median(by_workers[fewest]) / fewest
        for workers, values in by_workers.items():
            median = statistics.median(values)
            spread = f"{min(values):,.0f} to {max(values):,.0f}"
            print(f"| {name} | {workers} | {median:,.0f} ({spread}) ", end="")
            print(f"| {median / (workers * one_bare):.0%} | {median / (workers * each):.0%} |")


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--optimizers", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/scaling.json"))
    args = parser.parse_args()
    ray.init(num_cpus=max(args.workers) + 1, include_dashboard=False, logging_level=logging.ERROR)
    rates: dict[str, dict[int, list[float]]] = {
        name: {workers: [] for workers in sorted(args.workers)} for name in args.optimizers
    }
    phases: dict[str, dict[int, dict[str, float]]] = {name: {} for name in args.optimizers}
    alone = []
    for _ in range(args.repeats):
        alone.append(bare(min(args.seconds, 3.0)))
        for workers in sorted(args.workers):
            for name in args.optimizers:
                rate, phases[name][workers] = measure(name, workers, args.seconds)
                rates[name][workers].append(rate)
    ray.shutdown()

    print_table(statistics.median(alone), rates)
    print(f"\nGoal: {GOAL:.0%} for AsyncGradients and DecentralizedAllReduce.\n")
    for name, by_workers in phases.items():
        most = max(by_workers)
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in by_workers[most].items())
        print(f"- {name}, {most} workers, of the driver's time: {shares}")
    where = about()
    print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"about": where, "bare": alone, "rates": rates, "phases": phases}
    args.out.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
