"""Measures the throughput of three optimizers with 1 to 8 workers whose environments sleep.

    python benchmarks/scaling.py          # 9 minutes
    python benchmarks/scaling.py --page   # only writes the page

Each worker has one environment whose steps sleep for 5 ms, so the cores are not the limit. N
workers can reach at most N / 5 ms. In practice, a sleep takes longer than requested. So the script
divides the rate by N times the rate of one environment without polopt, measured in the same run.
`ray.init` gets enough logical CPUs for all workers. The numbers of workers are measured in turns.
The raw results are in `benchmarks/results/scaling.jsonl`, and the page is `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import ray
from stored_runs import between, facts_of, measure_or_page

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/scaling.jsonl"
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
STEP_S, WORKERS = 0.005, (1, 2, 4, 8)
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


def measure(name: str, workers: int, seconds: float) -> float:
    """Returns the steps per second of an optimizer."""
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
        first = trainer.optimizer.metrics.num_env_steps_sampled
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            trainer.train()
        elapsed_s = time.perf_counter() - started_s
        steps = trainer.optimizer.metrics.num_env_steps_sampled - first
        return float(steps / elapsed_s)
    finally:
        trainer.stop()


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the steps per second by optimizer and number of workers, and of one environment
    without polopt, one list of turns each."""
    ray.init(num_cpus=max(WORKERS) + 1, include_dashboard=False, logging_level=logging.ERROR)
    found: dict[str, Any] = {name: {str(n): [] for n in WORKERS} for name in CASES}
    alone = []
    for _ in range(args.repeats):
        alone.append(round(bare(min(args.seconds, 3.0)), 2))
        for workers in WORKERS:
            for name in CASES:
                found[name][str(workers)].append(round(measure(name, workers, args.seconds), 2))
    ray.shutdown()
    return {**found, "one environment": {"steps_per_s": alone}}


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    most = WORKERS[-1]
    head = ["optimizer", "1 worker, steps/s", *(f"{n} workers" for n in WORKERS[1:])]
    head.append(f"{', '.join(map(str, WORKERS[1:]))} workers: share of N times one worker")
    head.append(f"{most} workers: share of environments without polopt")
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    one = median(store["one environment"]["steps_per_s"])
    for name in CASES:
        rates = {n: median(store[name][str(n)]) for n in WORKERS}
        shares = ", ".join(f"{rates[n] / (n * rates[1]):.0%}" for n in WORKERS[1:])
        cells = [name, *(f"{rate:,.0f}" for rate in rates.values()), shares]
        lines.append(f"| {' | '.join(cells)} | {rates[most] / (most * one):.0%} |")
    return between(
        text, BEGIN, END, [*lines, "", f"`python benchmarks/scaling.py`, {facts_of(store)}."]
    )


def main() -> None:
    """Measures, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure_all, seconds=6.0, repeats=3)


if __name__ == "__main__":
    main()
