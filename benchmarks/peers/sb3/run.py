"""Stable-Baselines3.

    python benchmarks/peers/sb3/run.py CASE [--seconds 5] [--seed 0]

One process, its only mode. Environments: 16, the total of polopt's two workers, or 8, a usual
setting; `subproc` steps each environment in a process of its own. The faster case counts. MLPs of
64x64 tanh units for policy and value, one torch thread, Gymnasium's checker off.

- `a2c-16x10`, `a2c-8x20`: environments and steps, 160 rows per update, as a gradient of A3C;
  `a2c-16x20`: 320 rows, as a batch of A2C. Its default, 8 x 5, is slower. RMSprop.
- `ppo-*`: 2,048 rows per batch, 4 epochs of minibatches of 256.
- `learn-ppo`, `learn-a2c`: hyper-parameters of RL Baselines3 Zoo for CartPole-v1; its PPO learns
  for 100,000 steps with a falling learning rate and clip range.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

FOREVER = 10**9
MODEL = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
A2C_OPTIONS: dict[str, Any] = {"gae_lambda": 1.0, "ent_coef": 0.01}
PPO_OPTIONS: dict[str, Any] = {"n_epochs": 4, "batch_size": 256, "learning_rate": 3e-4}


class Ticks(BaseCallback):
    """Reports each round, a rollout and its update, to a clock."""

    def __init__(self, clock: measuring.RateClock | measuring.GoalClock) -> None:
        super().__init__()
        self._clock = clock
        self._over = False

    def _on_rollout_start(self) -> None:
        if self.num_timesteps == 0:
            return
        if isinstance(self._clock, measuring.RateClock):
            self._over = self._clock.tick(self.num_timesteps)
            return
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        enough = len(returns) == measuring.EPISODES
        mean = sum(returns) / len(returns) if enough else None
        self._over = self._clock.tick(self.num_timesteps, mean)

    def _on_step(self) -> bool:
        return not self._over


def make_envs(env: str, number: int, seed: int, subproc: bool = False) -> Any:
    """A vector environment with episode statistics."""
    return make_vec_env(
        env,
        number,
        seed=seed,
        env_kwargs={"disable_env_checker": True},
        vec_env_cls=SubprocVecEnv if subproc else DummyVecEnv,
        # The default start method starts a Python that imports torch for each.
        vec_env_kwargs={"start_method": "fork"} if subproc else None,
    )


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Environment steps per second in training; a case is `algorithm-environments[-options]`."""
    algorithm, size, *options = args.case.split("-")
    number, _, steps = size.partition("x")
    env = "Pendulum-v1" if "pendulum" in options else "CartPole-v1"
    envs = make_envs(env, int(number), args.seed, "subproc" in options)
    common: dict[str, Any] = {"policy_kwargs": MODEL, "seed": args.seed, "device": "cpu"}
    if algorithm == "a2c":
        model = A2C("MlpPolicy", envs, n_steps=int(steps), **common, **A2C_OPTIONS)
    else:
        model = PPO("MlpPolicy", envs, n_steps=2048 // int(number), **common, **PPO_OPTIONS)
    clock = measuring.RateClock(args.seconds)
    model.learn(FOREVER, callback=Ticks(clock))
    envs.close()
    return clock.result()


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until CartPole-v1 is solved."""
    envs = make_envs("CartPole-v1", 8, args.seed)
    common: dict[str, Any] = {"policy_kwargs": MODEL, "seed": args.seed, "device": "cpu"}
    if args.case == "learn-a2c":
        model = A2C("MlpPolicy", envs, ent_coef=0.0, **common)
        steps = 500_000
    else:
        model = PPO(
            "MlpPolicy",
            envs,
            n_steps=32,
            batch_size=256,
            gae_lambda=0.8,
            gamma=0.98,
            n_epochs=20,
            ent_coef=0.0,
            learning_rate=lambda left: 1e-3 * left,
            clip_range=lambda left: 0.2 * left,
            **common,
        )
        steps = 100_000
    clock = measuring.GoalClock(args.seconds)
    model.learn(steps, callback=Ticks(clock))
    envs.close()
    return clock.result()


RATES = (
    "a2c-8x20",
    "a2c-16x10",
    "a2c-16x10-subproc",
    "a2c-16x20",
    "a2c-16x20-subproc",
    "a2c-16x10-pendulum",
    "ppo-8",
    "ppo-16",
    "ppo-16-subproc",
    "ppo-16-pendulum",
)
CASES = {**dict.fromkeys(RATES, train), "learn-ppo": learn, "learn-a2c": learn}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("stable-baselines3", "torch", "gymnasium", "numpy"))
