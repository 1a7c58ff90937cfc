"""Measures what one environment step and its updates consist of, in whole loops on one core.

    pip install -e '.[benchmark]'
    python benchmarks/step_parts.py          # 5 minutes
    python benchmarks/step_parts.py --page   # only writes the page

The script runs the loops `loop-*-one-core` of `peers/polopt/run.py`: one process, one environment,
and 256x256 units. Each figure is the median of `TURNS` turns. The floating-point operations of the
products in an update are counted in torch, with the same policy. A second table shows how much
longer a fragment of one step takes if its code has not run for some milliseconds. The raw results
are in `benchmarks/results/step_parts.jsonl`, and the page is `docs/performance.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from processes import THREADS

os.environ.update(dict.fromkeys(THREADS, "1"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "polopt"))

# isort: split
import gymnasium
import numpy as np
from run import TRAINING, start_ray
from stored_runs import between, facts_of, measure_or_page, read_runs
from torch.utils.flop_counter import FlopCounterMode

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/step_parts.jsonl"
PRODUCTS = ROOT / "benchmarks/results/products.jsonl"
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- step parts: begin -->", "<!-- step parts: end -->"
LOOPS = {"SAC": "sac", "TD3": "td3", "CrossQ": "crossq", "DQN": "dqn"}
TURNS, TURN_S, STARTS = 7, 3.0, 500
PHASES = ("sample", "insert", "draw", "learn")
#: What happens before a fragment is sampled.
BEFORE = ("nothing", "10 MB are read", "4 ms of products", "4 ms of sleep")
#: The rows of the table, by the key of a result.
ROWS = {
    "learn": "updates",
    "products": "their products, at {rate:.0f} GFLOP/s",
    "sample": "call of the worker: acting, environment, recording",
    "environment": "the environment alone",
    "insert": "insert into the replay buffer",
    "draw": "draw of the batches",
    "other": "all else",
    "whole": "whole step",
    "eight": "whole step, with eight environments",
}


def trainer_of(loop: str, **changes: Any) -> Any:
    """Makes the trainer of a loop, and trains until it learns."""
    preset, config = TRAINING[f"loop-{loop}-one-core"]
    config = {**config, "learning_starts": STARTS, "seed": 0, **changes}
    trainer = getattr(polopt, preset)(config=config)
    while trainer.train()["num_env_steps_sampled_lifetime"] < 1.5 * STARTS:
        pass
    return trainer


def parts(loop: str, num_envs: int) -> dict[str, list[float]]:
    """Returns the microseconds of a whole step and of its phases, one list of turns each."""
    # As in the presets, a result has 1,000 steps.
    trainer = trainer_of(
        loop, num_envs_per_worker=num_envs, min_sample_timesteps_per_iteration=1000
    )
    found: dict[str, list[float]] = {name: [] for name in ("whole", "other", *PHASES)}
    timers, total = trainer.optimizer.timers, trainer.train()["num_env_steps_sampled_lifetime"]
    for _ in range(TURNS):
        before = {phase: timers[phase].total_s for phase in PHASES}
        first, began_s = total, time.perf_counter()
        while (passed_s := time.perf_counter() - began_s) < TURN_S:
            total = trainer.train()["num_env_steps_sampled_lifetime"]
        spent = {"whole": passed_s}
        spent |= {phase: timers[phase].total_s - before[phase] for phase in PHASES}
        spent["other"] = passed_s - sum(spent[phase] for phase in PHASES)
        for name, seconds in spent.items():
            found[name].append(round(1e6 * seconds / (total - first), 1))
    trainer.stop()
    return found


def flops(loop: str) -> float:
    """Returns the floating-point operations of products in one step, which torch computes."""
    trainer = trainer_of(loop, fast_cpu=False, min_sample_timesteps_per_iteration=20)
    before = trainer.train()["num_env_steps_sampled_lifetime"]
    with FlopCounterMode(display=False) as counter:
        after = trainer.train()["num_env_steps_sampled_lifetime"]
    trainer.stop()
    return float(counter.get_total_flops()) / (after - before)


def environment(loop: str) -> list[float]:
    """Returns the microseconds of a step of the environment alone, with a constant action."""
    env = gymnasium.make(TRAINING[f"loop-{loop}-one-core"][1]["env"], disable_env_checker=True)
    env.action_space.seed(0)
    action, found = env.action_space.sample(), []
    for _ in range(TURNS):
        env.reset(seed=0)
        steps, began_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - began_s) < 0.1 * TURN_S:
            _, _, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated:
                env.reset()
        found.append(round(1e6 * passed_s / steps, 1))
    return found


def fragments() -> dict[str, list[float]]:
    """Returns the microseconds of a fragment of one step of HalfCheetah-v5, by what happens before
    it."""
    policy = ("sac", {"model": {"fcnet_hiddens": [256, 256]}})
    options = {"num_envs_per_worker": 1, "rollout_fragment_length": 1, "seed": 0}
    make = polopt.GradientWorkerSet.create_factory
    worker = make("HalfCheetah-v5", policy, num_workers=0, **options)().local
    arrays = np.random.default_rng(0).standard_normal((40, 256, 256), np.float32)

    def multiply() -> None:
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < 4e-3:
            arrays[0].dot(arrays[1])

    ways: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "10 MB are read": arrays.sum,
        "4 ms of products": multiply,
        "4 ms of sleep": lambda: time.sleep(4e-3),
    }
    found: dict[str, list[float]] = {name: [] for name in BEFORE}
    for _ in range(TURNS):
        for name in BEFORE:
            times_us = []
            for _ in range(100):
                ways[name]()
                began_s = time.perf_counter()
                worker.sample()
                times_us.append(1e6 * (time.perf_counter() - began_s))
            found[name].append(round(median(times_us), 1))
    return found


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Measures all loops on the first core."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    start_ray()
    found: dict[str, Any] = {"fragments": fragments()}
    for name, loop in LOOPS.items():
        found[name] = {**parts(loop, 1), "eight": parts(loop, 8)["whole"]}
        found[name] |= {"environment": environment(loop), "flops": round(flops(loop))}
    return found


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    rate = median(read_runs(PRODUCTS)["256x256x256"]["onednn"])
    lines = [f"| us | {' | '.join(LOOPS)} |", f"|---|{'---:|' * len(LOOPS)}"]
    for row, title in ROWS.items():
        turns = [
            [1e-3 * store[name]["flops"] / rate] if row == "products" else store[name][row]
            for name in LOOPS
        ]
        cells = [f"{median(values):,.0f}" for values in turns]
        lines.append(f"| {title.format(rate=rate)} | {' | '.join(cells)} |")
    cells = [f"{median(store['fragments'][name]):,.0f}" for name in BEFORE]
    lines += ["", f"| a fragment of one step takes, us, after | {' | '.join(BEFORE)} |"]
    lines += [f"|---|{'---:|' * len(BEFORE)}", f"| HalfCheetah-v5, SAC | {' | '.join(cells)} |"]
    lines += [
        "",
        f"Medians of {TURNS} turns: `python benchmarks/step_parts.py`, {facts_of(store)}.",
    ]
    return between(text, BEGIN, END, lines)


def main() -> None:
    """Measures all loops, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure)


if __name__ == "__main__":
    main()
