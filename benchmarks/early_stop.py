"""Measures the cost of one slow environment for synchronous PPO, with and without early stop.

    python benchmarks/early_stop.py [--seconds 4] [--repeats 3]

SyncPPO trains on CartPole-v1 with two workers of one environment each. The environment of the
second worker takes 10 ms per step. With such an environment, the rate of RLlib 0.8's PPO on two
cores fell from 3,404 to 173 steps per second. Cases are measured in turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import ray
from about import about

import polopt

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
    "no slow environment": {},
    "one at 10 ms, no early stop": {"env_config": {"slow": True}},
    "one at 10 ms, early stop, stragglers keep 1/4": {
        "env_config": {"slow": True},
        "fraction_samples": 0.25,
        **EARLY_STOP,
    },
    "one at 10 ms, early stop, stragglers keep 1/20": {
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


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
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
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(args.repeats):
        for name, trainer in trainers.items():
            rates[name].append(measure(trainer, args.seconds))
    for trainer in trainers.values():
        trainer.stop()
    ray.shutdown()
    print("| environments | steps/s, median (range) | batches/s |\n|---|---:|---:|")
    for name, measured in rates.items():
        steps, batches = zip(*measured, strict=True)
        spread = f"{min(steps):,.0f} to {max(steps):,.0f}"
        print(f"| {name} | {statistics.median(steps):,.0f} ({spread}) ", end="")
        print(f"| {statistics.median(batches):.1f} |")
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
