"""SBX: Stable-Baselines3's algorithms in JAX.

    python benchmarks/peers/sbx/run.py CASE [--seconds 5] [--seed 0]

SBX has the classes and options of Stable-Baselines3, so its cases have the same settings as in
`peers/sb3/run.py`. Cases with a CNN are left out, because the CNN is a module of torch. JAX uses
all cores of the process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
from sbx import DQN, PPO, SAC, TD3, CrossQ

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sb3"))

import run as of_sb3  # the script of Stable-Baselines3

measuring.WARM_UP_S = 30.0  # JAX compiles meanwhile


def loop(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second of a whole training loop."""
    return of_sb3.loop_of(args, {"dqn": DQN, "sac": SAC, "td3": TD3, "crossq": CrossQ})


def train_ppo(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second of PPO, whose units are tanh by default."""
    return of_sb3.train_ppo(args, PPO, {"net_arch": of_sb3.MODEL["net_arch"]})


def learn_sac(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until HalfCheetah-v5 is solved."""
    return of_sb3.learn_sac_of(args, SAC)


if __name__ == "__main__":
    cases = {
        **dict.fromkeys(of_sb3.LOOP_CASES, loop),
        **dict.fromkeys(of_sb3.PPO_RATES, train_ppo),
        "learn-sac": learn_sac,
    }
    measuring.main(
        __doc__,
        {case: measure for case, measure in cases.items() if "breakout" not in case},
        ("sbx-rl", "jax", "stable-baselines3", "gymnasium", "numpy"),
    )
