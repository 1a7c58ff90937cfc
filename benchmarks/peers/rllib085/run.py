"""RLlib 0.8.5, the last version with policy optimizers as its default, under Python 3.7.

    python3.7 benchmarks/peers/rllib085/run.py CASE [--seconds 5] [--seed 0]

Unless stated otherwise, a case has two rollout workers in their own processes, and separate MLPs of
64x64 tanh units for policy and value. RLlib uses its torch policies with one thread per process.
Logging is off, and there is one result per second.

- `a3c-8x20`, `a3c-8x10`, `a3c-1x20`, `a3c-1x10`: the first number is the number of environments per
  worker (8 as in polopt, 1 is RLlib's default). The second number is the number of steps per
  fragment (20 as in polopt, 10 is RLlib's default). The fastest case counts.
- `ddppo`: DD-PPO with RLlib's defaults (5 environments per worker, 100 steps, 10 epochs of
  minibatches of 50 rows on each worker), on the CPU.
- `apex`, `apex-learned`: Ape-X with four workers, whose environments take 5 ms a step, and two
  replay shards. The Q-network has 256x256 units and learns double Q-learning without dueling, from
  batches of 512 rows with 3-step returns. `apex` measures the rate of environment steps, and
  `apex-learned` the rate of learned rows.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gym
import numpy as np
import ray
import torch
from ray.rllib.agents.a3c import A3CTrainer
from ray.rllib.agents.dqn import ApexTrainer
from ray.rllib.agents.ppo import DDPPOTrainer
from ray.tune.registry import register_env

COMMON: dict[str, Any] = {
    "num_workers": 2,
    "num_gpus": 0,
    "use_pytorch": True,
    "min_iter_time_s": 1,
    "log_level": "ERROR",
    "model": {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False},
}
APEX: dict[str, Any] = {
    **COMMON,
    "num_workers": 4,
    "rollout_fragment_length": 50,
    "train_batch_size": 512,
    "buffer_size": 100000,
    "learning_starts": 2000,
    "timesteps_per_iteration": 0,
    "n_step": 3,
    "double_q": True,
    "dueling": False,
    "hiddens": [],
    "model": {"fcnet_hiddens": [256, 256], "fcnet_activation": "relu"},
    "optimizer": {"num_replay_buffer_shards": 2, "debug": False, "max_weight_sync_delay": 400},
}


def aligned(array: Any, from_numpy: Any = torch.from_numpy) -> Any:
    """Returns a tensor with the values of an array. Copies an array that does not begin at a
    multiple of 64 bytes, because torch 1.5.1 ends with SIGSEGV for such batches of Ape-X."""
    return from_numpy(array if array.ctypes.data % 64 == 0 else copy_of(array))


def copy_of(array: Any) -> Any:
    """Returns a copy at an address that is a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    found = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


class Paced(gym.Wrapper):
    """CartPole-v1 whose steps take at least 5 ms."""

    def __init__(self, config: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        """Sleeps, then steps."""
        time.sleep(0.005)
        return self.env.step(action)

    def reset(self) -> Any:
        """Resets."""
        return self.env.reset()


def make(case: str, seed: int) -> Any:
    """Makes the trainer of a case."""
    if case.startswith("apex"):
        torch.from_numpy = aligned
        register_env("paced", lambda config: Paced(config))
        return ApexTrainer(env="paced", config={**APEX, "seed": seed})
    if case == "ddppo":
        config = {**COMMON, "num_gpus_per_worker": 0, "seed": seed}
        return DDPPOTrainer(env="CartPole-v1", config=config)
    envs, steps = case.split("-")[1].split("x")
    own = {"num_envs_per_worker": int(envs), "rollout_fragment_length": int(steps), "seed": seed}
    return A3CTrainer(env="CartPole-v1", config={**COMMON, **own})


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training. With `apex-learned`, it measures the
    rows per second that the learner learned from."""
    ray.init(
        num_cpus=8,
        include_webui=False,
        object_store_memory=300 * 1024**2,
        redis_max_memory=100 * 1024**2,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    trainer = make(args.case, args.seed)
    clock = measuring.RateClock(args.seconds)
    over = False
    while not over:
        result = trainer.train()
        learned = args.case == "apex-learned"
        over = clock.tick(result["info"]["num_steps_trained" if learned else "num_steps_sampled"])
    trainer.stop()
    ray.shutdown()
    return clock.result()


RATES = ("a3c-8x20", "a3c-8x10", "a3c-1x20", "a3c-1x10", "ddppo", "apex", "apex-learned")
CASES = dict.fromkeys(RATES, train)

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("ray", "torch", "gym", "numpy"))
