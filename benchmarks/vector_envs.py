"""Measures sampling with `FastSyncVectorEnv` and with Gymnasium's `SyncVectorEnv`.

    pip install -e '.[benchmark]' && pip install --no-deps MinAtar==1.0.15
    python benchmarks/vector_envs.py                                # 7 environments. 2 minutes
    python benchmarks/vector_envs.py CartPole-v1 Acrobot-v1

Two workers in this process share a PPO policy of 64x64 units. They sample fragments of 128 steps of
8 environments in turns. One worker was made with `fast_cpu: false`, so it uses `SyncVectorEnv`. A
row has the medians of the processor times over `--pairs` pairs, and the median and quartiles of the
ratios of the pairs.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from typing import Any

from processes import THREADS

os.environ.update(dict.fromkeys(THREADS, "1"))

# isort: split
import gymnasium
from about import about

import polopt

STEPS, NUM_ENVS = 128, 8
MINATAR = ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders")
ENVS = ("CartPole-v1", "HalfCheetah-v5", *(f"MinAtar/{game}-v1" for game in MINATAR))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("envs", nargs="*", default=ENVS)
    parser.add_argument("--pairs", type=int, default=25)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if any(env.startswith("MinAtar/") for env in args.envs):
        from minatar.gym import register_envs

        register_envs()
    print("us of processor time for one step of 8 environments\n")
    print("| environment | SyncVectorEnv | FastSyncVectorEnv | ratio (quartiles) |")
    print("|---|---:|---:|---:|")
    for env in args.envs:
        print(row(env, args.pairs), flush=True)
    print("\n" + ", ".join(f"{name} {value}" for name, value in about().items()))


def row(env: str, pairs: int) -> str:
    """Measures an environment and returns one row in Markdown."""
    plain, fast = make_worker(env, False), make_worker(env, True)
    plain.use_policy(fast.policy)
    times = []
    for turn in range(-1, pairs):
        first, second = (plain, fast) if turn % 2 else (fast, plain)
        pair = {id(worker): sampling_us(worker) for worker in (first, second)}
        if turn >= 0:  # the first turn warms up
            times.append((pair[id(plain)], pair[id(fast)]))
    slow_us, fast_us = (statistics.median(column) for column in zip(*times, strict=True))
    low, median, high = statistics.quantiles([a / b for a, b in times], n=4)
    return f"| {env} | {slow_us:.1f} | {fast_us:.1f} | {median:.3f} ({low:.3f} to {high:.3f}) |"


def make_worker(env: str, fast_cpu: bool) -> Any:
    """Makes a worker in this process."""
    return polopt.GradientWorkerSet.create_factory(
        lambda: gymnasium.make(env, disable_env_checker=True),
        ("ppo", {"fast_cpu": fast_cpu}),
        num_workers=0,
        num_envs_per_worker=NUM_ENVS,
        rollout_fragment_length=STEPS,
        seed=0,
    )().local


def sampling_us(worker: Any, fragments: int = 6) -> float:
    """Returns the microseconds of processor time for one step of all environments."""
    started_s = time.process_time()
    for _ in range(fragments):
        worker.sample()
    return (time.process_time() - started_s) / (fragments * STEPS) * 1e6


if __name__ == "__main__":
    main()
