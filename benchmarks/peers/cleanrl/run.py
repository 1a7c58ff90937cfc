"""PPO in a single file in the manner of CleanRL.

    python benchmarks/peers/cleanrl/run.py CASE [--seconds 5] [--seed 0]

CleanRL is not a library; this file is written like its `ppo.py`: one process, a `SyncVectorEnv`, an
agent of two MLPs of 64x64 tanh units, `torch.distributions`, minibatches of a shuffled batch, Adam.
One torch thread, Gymnasium's checker off.

- `ppo-8`, `ppo-16`: number of environments; 2,048 rows per batch, 4 epochs of minibatches of 256.
  16 is the total of polopt's two workers; the faster case counts.
- `learn`: tuned for CartPole-v1: 8 environments x 64 steps, 8 epochs of minibatches of 128, a
  learning rate that falls from 2e-3 within 150,000 steps.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical


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


def linear(size_in: int, size_out: int, gain: float = 2.0**0.5) -> nn.Linear:
    """An orthogonally initialised layer."""
    layer = nn.Linear(size_in, size_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    """Actor and critic."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()

        def mlp(outputs: int, gain: float) -> nn.Sequential:
            hidden = (linear(inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh())
            return nn.Sequential(*hidden, linear(64, outputs, gain))

        self.critic = mlp(1, 1.0)
        self.actor = mlp(actions, 0.01)

    def value(self, obs: Tensor) -> Tensor:
        """Values `[B]`."""
        return self.critic(obs).flatten()

    def forward(
        self, obs: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Actions, their log probabilities, entropies and values, each `[B]`."""
        dist = Categorical(logits=self.actor(obs))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.value(obs)


def ppo(seed: int, options: Options) -> Iterator[tuple[int, float | None]]:
    """Trains without end; after each update yields the steps so far and the mean return of the last
    100 episodes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = RecordEpisodeStatistics(make_envs(options.envs))
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.lr, eps=1e-5)
    shape = (options.steps, options.envs)
    obs = torch.zeros((*shape, 4))
    actions, logps, rewards, dones, values = (torch.zeros(shape) for _ in range(5))
    next_obs = torch.tensor(envs.reset(seed=seed)[0])
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
                action, logps[t], _, values[t] = agent(next_obs)
            actions[t] = action
            raw, reward, terminated, truncated, infos = envs.step(action.numpy())
            rewards[t] = torch.tensor(reward)
            next_obs = torch.tensor(raw)
            next_done = torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
            if "episode" in infos:
                returns.extend(infos["episode"]["r"][infos["_episode"]])
        sampled += options.steps * options.envs
        with torch.no_grad():
            next_value = agent.value(next_obs)
        advantages = gae(rewards, values, dones, next_value, next_done, options)
        batch = (
            obs.reshape(-1, 4),
            actions.flatten().long(),
            logps.flatten(),
            advantages.flatten(),
            (advantages + values).flatten(),
        )
        learn_on(agent, optimizer, batch, rng, options)
        enough = len(returns) == measuring.EPISODES
        yield sampled, float(np.mean(returns)) if enough else None


def make_envs(number: int) -> SyncVectorEnv:
    """A SyncVectorEnv of CartPole-v1."""

    def make() -> Any:
        return gymnasium.make("CartPole-v1", disable_env_checker=True)

    return SyncVectorEnv([make] * number, autoreset_mode=AutoresetMode.SAME_STEP)


def gae(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    next_value: Tensor,
    next_done: Tensor,
    options: Options,
) -> Tensor:
    """Advantages `[T, N]`. Truncated episodes count as terminated, as in CleanRL."""
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
    """Epochs of minibatches over a batch of observations, actions, log probabilities, advantages
    and returns."""
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
    """Environment steps per second in training."""
    envs = int(args.case.split("-")[1])
    rounds = ppo(args.seed, Options(envs=envs, steps=2048 // envs))
    clock = measuring.RateClock(args.seconds)
    while not clock.tick(next(rounds)[0]):
        pass
    return clock.result()


def learn(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until CartPole-v1 is solved."""
    tuned = Options(envs=8, steps=64, epochs=8, minibatch=128, lr=2e-3, anneal_steps=150_000)
    rounds = ppo(args.seed, tuned)
    clock = measuring.GoalClock(args.seconds)
    while not clock.tick(*next(rounds)):
        pass
    return clock.result()


CASES = {"ppo-8": train, "ppo-16": train, "learn": learn}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("torch", "gymnasium", "numpy"))
