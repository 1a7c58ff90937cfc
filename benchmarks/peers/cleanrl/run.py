"""PPO in a single file in the manner of CleanRL.

    python benchmarks/peers/cleanrl/run.py CASE [--seconds 5] [--seed 0]

CleanRL is not a library. This file is written like CleanRL's `ppo.py`. It has one process, a
`SyncVectorEnv`, an agent of two MLPs of 64x64 tanh units, `torch.distributions`, minibatches of a
shuffled batch, and Adam. torch has one thread, and Gymnasium's checker is off.

- `ppo-8`, `ppo-16`: the number is the number of environments. 2,048 rows per batch, 4 epochs of
  minibatches of 256. 16 is the total of polopt's two workers. The faster case counts.
- `ppo-16-wide`: 256x256 units.
- `ppo-16-halfcheetah`: the same settings on HalfCheetah-v5, like CleanRL's
  `ppo_continuous_action.py`, with standard deviations that do not depend on the observation, and
  actions clipped to their bounds. As in polopt's case, observations and rewards are not normalised.
- `ppo-16-breakout`: the same settings on MinAtar's Breakout, like CleanRL's `ppo_atari.py`. Policy
  and value share the CNN of MinAtar's paper. Images of bool become float32.
- `ppo-16-async-*`: an `AsyncVectorEnv`, which steps each environment in its own process. The faster
  case counts.
- `learn`: settings tuned for CartPole-v1: 8 environments x 64 steps, 8 epochs of minibatches of
  128, and a learning rate that decreases from 2e-3 over 150,000 steps.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tasks import make_breakout
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

ENVS: dict[str, Callable[..., Any]] = {
    "cartpole": partial(gymnasium.make, "CartPole-v1"),
    "halfcheetah": partial(gymnasium.make, "HalfCheetah-v5"),
    "breakout": make_breakout,
}


@dataclass(frozen=True)
class Options:
    """Hyper-parameters."""

    envs: int
    steps: int
    epochs: int = 4
    minibatch: int = 256
    lr: float = 3e-4
    anneal_steps: int | None = None
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    units: int = 64


def linear(size_in: int, size_out: int, gain: float = 2.0**0.5) -> nn.Linear:
    """Makes an orthogonally initialised layer."""
    layer = nn.Linear(size_in, size_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    """Actor and critic. For images `[H, W, C]`, both read the features of MinAtar's CNN.

    Args:
        obs_space: observation space of one environment.
        action_space: action space of one environment.
        units: the units of each of the two layers.
    """

    def __init__(self, obs_space: Space[Any], action_space: Space[Any], units: int) -> None:
        super().__init__()
        shape = obs_space.shape
        self.log_std: nn.Parameter | None = None
        if isinstance(action_space, Box):
            outputs = action_space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(1, outputs))
        else:
            outputs = action_space.n
        self.images = len(shape) == 3
        if self.images:
            height, width, channels = shape
            conv = nn.Conv2d(channels, 16, 3)
            nn.init.orthogonal_(conv.weight, 2.0**0.5)
            nn.init.constant_(conv.bias, 0.0)
            flat = 16 * (height - 2) * (width - 2)
            layers = (conv, nn.ReLU(), nn.Flatten(), linear(flat, 128), nn.ReLU())
            self.network: nn.Module = nn.Sequential(*layers)
            self.critic: nn.Module = linear(128, 1, 1.0)
            self.actor: nn.Module = linear(128, outputs, 0.01)
            return

        def mlp(size_out: int, gain: float) -> nn.Sequential:
            hidden = (linear(shape[0], units), nn.Tanh(), linear(units, units), nn.Tanh())
            return nn.Sequential(*hidden, linear(units, size_out, gain))

        self.critic = mlp(1, 1.0)
        self.actor = mlp(outputs, 0.01)

    def features(self, obs: Tensor) -> Tensor:
        """Returns the input of actor and critic."""
        return self.network(obs.permute(0, 3, 1, 2)) if self.images else obs

    def value(self, obs: Tensor) -> Tensor:
        """Returns values `[B]`."""
        return self.critic(self.features(obs)).flatten()

    def distribution(self, features: Tensor) -> Distribution:
        """Returns the distribution of actions."""
        outputs = self.actor(features)
        if self.log_std is None:
            return Categorical(logits=outputs)
        return Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1)

    def forward(
        self, obs: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns actions `[B, ...]`, and log-probabilities, entropies and values, each `[B]`."""
        features = self.features(obs)
        dist = self.distribution(features)
        if action is None:
            action = dist.sample()
        value = self.critic(features).flatten()
        return action, dist.log_prob(action), dist.entropy(), value


def ppo(
    seed: int, options: Options, env: str = "cartpole", processes: bool = False
) -> Iterator[tuple[int, float | None]]:
    """Trains without end. After each update, yields the steps so far and the mean return of the
    last 100 episodes, or None if fewer episodes have ended."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = make_envs(env, options.envs, processes)
    obs_shape = envs.single_observation_space.shape
    action_space = envs.single_action_space
    continuous = isinstance(action_space, Box)
    agent = Agent(envs.single_observation_space, action_space, options.units)
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.lr, eps=1e-5)
    shape = (options.steps, options.envs)
    obs = torch.zeros((*shape, *obs_shape))
    actions = torch.zeros(
        (*shape, *action_space.shape),
        dtype=torch.float32 if continuous else torch.int64,
    )
    logps, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    next_obs = torch.tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    next_done = torch.zeros(options.envs)
    returns: deque[float] = deque(maxlen=measuring.EPISODES)
    sampled = 0
    while True:
        if options.anneal_steps is not None:
            left = max(1.0 - sampled / options.anneal_steps, 0.1)
            optimizer.param_groups[0]["lr"] = left * options.lr
        for t in range(options.steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logps[t], _, values[t] = agent(next_obs)
            action = actions[t].numpy()
            if continuous:
                action = action.clip(action_space.low, action_space.high)
            raw, reward, terminated, truncated, infos = envs.step(action)
            rewards[t] = torch.tensor(reward)
            next_obs = torch.tensor(raw, dtype=torch.float32)
            next_done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
            if "episode" in infos:
                returns.extend(infos["episode"]["r"][infos["_episode"]])
        sampled += options.steps * options.envs
        with torch.no_grad():
            next_value = agent.value(next_obs)
        advantages = gae(rewards, values, dones, next_value, next_done, options)
        batch = (
            obs.reshape(-1, *obs_shape),
            actions.reshape(-1, *action_space.shape),
            logps.flatten(),
            advantages.flatten(),
            (advantages + values).flatten(),
        )
        learn_on(agent, optimizer, batch, rng, options)
        enough = len(returns) == measuring.EPISODES
        yield sampled, float(np.mean(returns)) if enough else None


def make_envs(env: str, number: int, processes: bool) -> VectorEnv:
    """Makes a vector environment with episode statistics.

    Args:
        env: a key of `ENVS`.
        number: number of environments.
        processes: whether each environment steps in its own process.
    """
    kind = AsyncVectorEnv if processes else SyncVectorEnv
    make = partial(ENVS[env], disable_env_checker=True)
    envs: VectorEnv = kind([make] * number, autoreset_mode=AutoresetMode.SAME_STEP)
    return RecordEpisodeStatistics(envs)


def gae(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    next_value: Tensor,
    next_done: Tensor,
    options: Options,
) -> Tensor:
    """Returns advantages `[T, N]`. Truncated episodes count as terminated, as in CleanRL."""
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        is_last = t == len(rewards) - 1
        goes_on = 1.0 - (next_done if is_last else dones[t + 1])
        following = next_value if is_last else values[t + 1]
        delta = rewards[t] + options.gamma * following * goes_on - values[t]
        last = delta + options.gamma * options.gae_lambda * goes_on * last
        advantages[t] = last
    return advantages


def learn_on(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, ...],
    rng: np.random.Generator,
    options: Options,
) -> None:
    """Learns from a batch in epochs of minibatches. The batch has observations, actions,
    log-probabilities, advantages and returns."""
    rows = np.arange(len(batch[0]))
    for _ in range(options.epochs):
        rng.shuffle(rows)
        for start in range(0, len(rows), options.minibatch):
            picked = rows[start : start + options.minibatch]
            obs, actions, old_logps, advantages, targets = (column[picked] for column in batch)
            _, logps, entropies, values = agent(obs, actions)
            ratio = (logps - old_logps).exp()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
            policy_loss = torch.max(-advantages * ratio, -advantages * clipped).mean()
            value_loss = 0.5 * ((values - targets) ** 2).mean()
            loss = policy_loss - options.ent_coef * entropies.mean() + options.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), options.max_grad_norm)
            optimizer.step()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the environment steps per second in training. The name of a case is
    `ppo-environments[-async][-wide][-task]`."""
    _, envs, *words = args.case.split("-")
    task = words[-1] if words and words[-1] != "wide" else "cartpole"
    units = 256 if "wide" in words else 64
    options = Options(envs=int(envs), steps=2048 // int(envs), units=units)
    rounds = ppo(args.seed, options, task, "async" in words)
    clock = measuring.RateClock(args.seconds)
    while not clock.tick(next(rounds)[0]):
        pass
    return clock.result()


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the seconds until CartPole-v1 is solved."""
    tuned = Options(envs=8, steps=64, epochs=8, minibatch=128, lr=2e-3, anneal_steps=150_000)
    rounds = ppo(args.seed, tuned)
    clock = measuring.GoalClock(args.seconds)
    while not clock.tick(*next(rounds)):
        pass
    return clock.result()


RATES = (
    "ppo-8",
    "ppo-16",
    "ppo-16-wide",
    *(
        f"{case}-{task}"
        for task in ("halfcheetah", "breakout")
        for case in ("ppo-16", "ppo-16-async")
    ),
)
CASES = {**dict.fromkeys(RATES, train), "learn": learn}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("torch", "gymnasium", "numpy"))
