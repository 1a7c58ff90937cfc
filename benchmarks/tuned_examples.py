"""Runs tuned examples with several seeds, and prints a text for the key `measured` of each.

    python benchmarks/tuned_examples.py [NAME ...] [--seeds 0 1 2]

Seconds are the whole time of a trial, including the start-up of workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
import yaml
from ray import tune

import polopt

EXAMPLES = Path(__file__).parent.parent / "tuned_examples"


def run(example: dict[str, Any], seed: int) -> dict[str, Any]:
    """Runs an example with a seed and returns the last result."""
    with tempfile.TemporaryDirectory() as results:
        analysis = tune.run(
            example["run"],
            config={**example["config"], "seed": seed},
            stop=example["stop"],
            storage_path=results,
            verbose=0,
        )
        last: dict[str, Any] = analysis.trials[0].last_result
    return last


def return_of(example: dict[str, Any], result: dict[str, Any]) -> float:
    """Returns the return to compare with the goal: the return of evaluation, if the example
    evaluates its policy, otherwise the return of training. For an example that stops at a custom
    metric, returns this metric."""
    for key in example["stop"]:
        if "/custom_metrics/" in key:
            found = result["env_runners"].get("custom_metrics", {})
            return float(found.get(key.rpartition("/")[2], "nan"))
    block = result["evaluation"] if "evaluation_interval" in example["config"] else result
    return float(block["env_runners"]["episode_return_mean"])


def main() -> None:
    """Runs the examples, and prints one line for each example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    polopt.register()
    ray.init(
        num_cpus=max(os.cpu_count() or 1, 4), include_dashboard=False, logging_level=logging.ERROR
    )
    for name in names:
        example = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
        results = [run(example, seed) for seed in args.seeds]
        returns = [return_of(example, result) for result in results]
        steps = [r["num_env_steps_sampled_lifetime"] for r in results]
        seconds = [r["time_total_s"] for r in results]
        reached = sum(value >= example["goal"] for value in returns)
        print(
            f"{name}: return {statistics.median(returns):.0f} (lowest {min(returns):.0f}), "
            f"{statistics.median(steps):,.0f} steps ({min(steps):,} - {max(steps):,}), "
            f"{statistics.median(seconds):.1f} s; "
            f"goal reached by {reached} of {len(results)} seeds",
            flush=True,
        )


if __name__ == "__main__":
    main()
