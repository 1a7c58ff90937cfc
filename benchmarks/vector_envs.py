"""Processor time of sampling with `FastSyncVectorEnv` and with Gymnasium's `SyncVectorEnv`.

    pip install -e '.[benchmark]'; pip install --no-deps MinAtar==1.0.15
    python benchmarks/vector_envs.py                                # 7 environments; 2 minutes
    python benchmarks/vector_envs.py CartPole-v1 Acrobot-v1

One worker in this process with a PPO policy of 64x64 units samples fragments of 128 steps of 8
environments, with either class in turn. A row has medians of `--pairs`, and the
median and quartiles of the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from functools import partial
from typing import Any

from processes import THREADS

os.environ.update(dict.fromkeys(THREADS, "1"))

# isort: split
import gymnasium
from about import about
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import polopt
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, FaultTolerantEnv

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
    """One row in Markdown."""
    plain, fast = make_worker(env, SyncVectorEnv), make_worker(env, FastSyncVectorEnv)
    times = []
    for turn in range(-1, pairs):
        first, second = (plain, fast) if turn % 2 else (fast, plain)
        pair = {id(worker): sampling_us(worker) for worker in (first, second)}
        if turn >= 0:  # the first turn warms up
            times.append((pair[id(plain)], pair[id(fast)]))
    slow_us, fast_us = (statistics.median(column) for column in zip(*times, strict=True))
    low, median, high = statistics.quantiles([a / b for a, b in times], n=4)
    return f"| {env} | {slow_us:.1f} | {fast_us:.1f} | {median:.3f} ({low:.3f} to {high:.3f}) |"


def make_worker(env: str, kind: type[SyncVectorEnv]) -> Any:
    """A worker of this process, whose environments are those that polopt makes."""

    def make() -> Any:
        return gymnasium.make(env, disable_env_checker=True)

    guards = [partial(FaultTolerantEnv, make, EnvPlace(env, 0, i), 10) for i in range(NUM_ENVS)]
    return polopt.GradientWorkerSet.create_factory(
        lambda: kind(guards, copy=False, autoreset_mode=AutoresetMode.SAME_STEP),
        "ppo",
        num_workers=0,
        num_envs_per_worker=NUM_ENVS,
        rollout_fragment_length=STEPS,
        seed=0,
    )().local


def sampling_us(worker: Any, fragments: int = 6) -> float:
    """Microseconds of processor time for one step of all environments."""
    started_s = time.process_time()
    for _ in range(fragments):
        worker.sample()
    return (time.process_time() - started_s) / (fragments * STEPS) * 1e6


if __name__ == "__main__":
    main()
