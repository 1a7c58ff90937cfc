"""Environment steps per second in training, CartPole-v1, for each optimizer.

    .venv/bin/python benchmarks/training_speed.py [--workers 2] [--envs 8] [--repeats 3]

Optimizers take turns (A B C A B C ...), so that a change in the machine's speed meets all alike.
Rates are over steady state: workers are up and have learned before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from about import about
from rich.console import Console
from rich.table import Table

import polopt

CASES: dict[str, dict[str, Any]] = {
    "A3C": {"rollout_fragment_length": 20},
    "A2C": {"rollout_fragment_length": 20},
    "SyncPPO": {"rollout_fragment_length": 128, "num_sgd_iter": 4, "sgd_minibatch_size": 256},
    "DDPPO": {"rollout_fragment_length": 128, "num_sgd_iter": 4, "sgd_minibatch_size": 128},
}

#: As in `make bench`. An untrained policy's episodes are short, and each end takes a reset.
WARM_UP_S = 2.0


def measure(preset: str, config: dict[str, Any], seconds: float) -> float:
    """Environment steps per second of one run."""
    trainer = getattr(polopt, preset)(config={**config, **CASES[preset]})
    try:
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < WARM_UP_S:
            trainer.train()
        first = last = trainer.train()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            last = trainer.train()
        steps = last["num_env_steps_sampled_lifetime"] - first["num_env_steps_sampled_lifetime"]
        return steps / (time.perf_counter() - started_s)
    finally:
        trainer.stop()


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8, help="environments of each worker")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/training_speed.json"))
    args = parser.parse_args()
    config = {
        "env": args.env,
        "num_workers": args.workers,
        "num_envs_per_worker": args.envs,
        "seed": 0,
    }
    ray.init(
        num_cpus=max(os.cpu_count() or 1, args.workers + 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    rates: dict[str, list[float]] = {preset: [] for preset in CASES}
    for _ in range(args.repeats):
        for preset, measured in rates.items():
            measured.append(measure(preset, config, args.seconds))
    ray.shutdown()

    where = about()
    table = Table(title=f"{args.env}, {args.workers} workers x {args.envs} environments")
    for column in ("preset", "settings", "steps/s (median)", "range"):
        table.add_column(column, justify="left" if column in ("preset", "settings") else "right")
    for preset, measured in rates.items():
        settings = ", ".join(f"{k}={v}" for k, v in CASES[preset].items())
        median = f"{statistics.median(measured):,.0f}"
        table.add_row(preset, settings, median, f"{min(measured):,.0f} - {max(measured):,.0f}")
    console = Console(width=120)
    console.print(table)
    console.print("  ".join(f"{k} {v}" for k, v in where.items()), highlight=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"about": where, "config": config, "rates": rates}, indent=1))


if __name__ == "__main__":
    main()
