"""Measures the cost of one slow environment for synchronous PPO, with and without early stop.

    python benchmarks/early_stop.py          # 2 minutes
    python benchmarks/early_stop.py --page   # only writes the page

SyncPPO trains on CartPole-v1 with two workers of one environment each. The environment of the
second worker takes 10 ms per step. With such an environment, the rate of RLlib 0.8's PPO on two
cores fell from 3,404 to 173 steps per second. Cases are measured in turns. The raw results are in
`benchmarks/results/early_stop.jsonl`, and the page is `docs/collector.md`.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import ray
from stored_runs import between, facts_of, measure_or_page

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/early_stop.jsonl"
PAGE = ROOT / "docs/collector.md"
BEGIN, END = "<!-- early stop: begin -->", "<!-- early stop: end -->"
SLOW_S = 0.010


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1. If the config sets `slow`, it is slow in the second worker."""

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.step_s = SLOW_S if config.get("slow") and config.worker_index == 2 else 0.0

    def step(self, action: Any) -> Any:
        if self.step_s:
            time.sleep(self.step_s)
        return super().step(action)


EARLY_STOP = {"fraction_workers": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "all environments fast": {},
    "one environment with 10 ms per step, no early stop": {"env_config": {"slow": True}},
    "the same, early stop, `fraction_samples` 1/4": {
        "env_config": {"slow": True},
        "fraction_samples": 0.25,
        **EARLY_STOP,
    },
    "the same, early stop, `fraction_samples` 1/20": {
        "env_config": {"slow": True},
        "fraction_samples": 0.05,
        **EARLY_STOP,
    },
}


def measure(trainer: Any, seconds: float) -> tuple[float, float]:
    """Returns the environment steps and the batches per second."""
    first = last = trainer.train()
    started_s = time.perf_counter()
    updates = 0
    while time.perf_counter() - started_s < seconds:
        last = trainer.train()
        updates += 1
    elapsed_s = time.perf_counter() - started_s
    steps = last["num_env_steps_sampled_lifetime"] - first["num_env_steps_sampled_lifetime"]
    return steps / elapsed_s, updates / elapsed_s


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the environment steps and the batches per second of all cases, by turn."""
    ray.init(num_cpus=9, include_dashboard=False, logging_level=logging.ERROR)
    config = {
        "env": lambda ctx: Slow(ctx),
        "num_workers": 2,
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 128,
        "num_sgd_iter": 4,
        "sgd_minibatch_size": 64,
        "min_sample_timesteps_per_iteration": 0,
        "seed": 0,
    }
    trainers = {
        name: polopt.SyncPPO(config={**config, **options}) for name, options in CASES.items()
    }
    found: dict[str, Any] = {name: {"steps_per_s": [], "batches_per_s": []} for name in CASES}
    for _ in range(args.repeats):
        for name, trainer in trainers.items():
            for rates, rate in zip(
                found[name].values(), measure(trainer, args.seconds), strict=True
            ):
                rates.append(round(rate, 2))
    for trainer in trainers.values():
        trainer.stop()
    ray.shutdown()
    return found


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    lines = ["| environments | steps/s, median (range) | batches/s |", "|---|---:|---:|"]
    for name in CASES:
        steps, batches = store[name]["steps_per_s"], store[name]["batches_per_s"]
        spread = f"{min(steps):,.0f} to {max(steps):,.0f}"
        cells = [name, f"{statistics.median(steps):,.0f} ({spread})"]
        lines.append(f"| {' | '.join(cells)} | {statistics.median(batches):.1f} |")
    return between(
        text, BEGIN, END, [*lines, "", f"`python benchmarks/early_stop.py`, {facts_of(store)}."]
    )


def main() -> None:
    """Measures all cases, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure_all, seconds=4.0, repeats=3)


if __name__ == "__main__":
    main()
