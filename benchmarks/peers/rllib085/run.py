"""RLlib 0.8.5, the last version with policy optimizers as its default, under Python 3.7.

    python3.7 benchmarks/peers/rllib085/run.py CASE [--seconds 5] [--seed 0]

All cases have two rollout workers in their own processes, and separate MLPs of 64x64 tanh units for
policy and value. RLlib uses its torch policies with one thread per process. Logging is off, and
there is one result per second.

- `a3c-8x20`, `a3c-8x10`, `a3c-1x20`, `a3c-1x10`: the first number is the number of environments per
  worker (8 as in polopt, 1 is RLlib's default). The second number is the number of steps per
  fragment (20 as in polopt, 10 is RLlib's default). The fastest case counts.
- `ddppo`: DD-PPO with RLlib's defaults (5 environments per worker, 100 steps, 10 epochs of
  minibatches of 50 rows on each worker), on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import ray
import torch
from ray.rllib.agents.a3c import A3CTrainer
from ray.rllib.agents.ppo import DDPPOTrainer

COMMON: dict[str, Any] = {
    "num_workers": 2,
    "num_gpus": 0,
    "use_pytorch": True,
    "min_iter_time_s": 1,
    "log_level": "ERROR",
    "model": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False},
}


def make(case: str, seed: int) -> Any:
    """Makes the trainer of a case."""
    if case == "ddppo":
        config = {**COMMON, "num_gpus_per_worker": 0, "seed": seed}
        return DDPPOTrainer(env="CartPole-v1", config=config)
    envs, steps = case.split("-")[1].split("x")
    own = {"num_envs_per_worker": int(envs), "rollout_fragment_length": int(steps), "seed": seed}
    return A3CTrainer(env="CartPole-v1", config={**COMMON, **own})


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training."""
    ray.init(
        num_cpus=4,
        include_webui=False,
        object_store_memory=300 * 1024**2,
        redis_max_memory=100 * 1024**2,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    trainer = make(args.case, args.seed)
    clock = measuring.RateClock(args.seconds)
    while not clock.tick(trainer.train()["timesteps_total"]):
        pass
    trainer.stop()
    ray.shutdown()
    return clock.result()


RATES = ("a3c-8x20", "a3c-8x10", "a3c-1x20", "a3c-1x10", "ddppo")
CASES = dict.fromkeys(RATES, train)

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("ray", "torch", "gym", "numpy"))
