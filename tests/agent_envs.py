"""Small environments with several agents, in PettingZoo's form."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class OneAgent:
    """A Gymnasium environment as an environment with one agent."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None

    def __init__(self, env_id: str = "CartPole-v1", agent: str = "cart") -> None:
        self.env = gymnasium.make(env_id)
        self.agent = agent
        self.possible_agents = [agent]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = [self.agent]
        obs, info = self.env.reset(seed=seed)
        return {self.agent: obs}, {self.agent: info}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions[self.agent])
        if terminated or truncated:
            self.agents = []
        given = (obs, reward, terminated, truncated, info)
        return tuple({self.agent: one} for one in given)

    def close(self) -> None:
        self.env.close()


class Matrix:
    """A game of two players that is repeated `rounds` times. Both act at the same time.

    Args:
        payoffs: `[2, 2, 2]`, the rewards of both players for the action of each.
        rounds: the length of an episode.
        absent: an agent that takes no part.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None
    possible_agents = ("row", "column")

    def __init__(
        self,
        payoffs: Any = (((3, 3), (0, 5)), ((5, 0), (1, 1))),
        rounds: int = 10,
        absent: str = "",
    ) -> None:
        self.payoffs, self.rounds = np.array(payoffs, dtype=float), rounds
        self.absent = absent
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def _all(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = [one for one in self.possible_agents if one != self.absent]
        self.round = 0
        return self._all(np.zeros(1, np.float32)), self._all({})

    def step(self, actions: dict[str, Any]) -> Any:
        self.round += 1
        chosen = tuple(int(actions.get(agent, 0)) for agent in self.possible_agents)
        rewards = dict(zip(self.possible_agents, self.payoffs[chosen].tolist(), strict=True))
        rewards = {agent: rewards[agent] for agent in self.agents}
        over = self.round == self.rounds
        obs, no, ends = self._all(np.zeros(1, np.float32)), self._all(False), self._all(over)
        infos = self._all({})
        if over:
            self.agents = []
        return obs, rewards, no, ends, infos


class Race:
    """A turn-based game whose values are easy to compute. Two players alternately move 1 or 2
    steps forward on a track of `length` fields. Whoever reaches the end first gets 1, the other
    gets -1. The observation is a one-hot vector of the fields that are left."""

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None
    possible_agents = ("first", "second")

    def __init__(self, length: int = 4) -> None:
        self.length = length
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0.0, 1.0, (self.length + 1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> np.ndarray:
        return np.eye(self.length + 1, dtype=np.float32)[max(self.left, 0)]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.left, self.agent_selection = self.length, "first"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict(self.rewards)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        return (
            self.observe(agent),
            self._cumulative_rewards[agent],
            self.terminations[agent],
            self.truncations[agent],
            self.infos[agent],
        )

    def agent_iter(self, max_iter: int = 2**63) -> Any:
        while self.agents:
            yield self.agent_selection

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        other = self.possible_agents[agent == "first"]
        if self.terminations[agent]:
            self.agents.remove(agent)
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self.agent_selection = other
            return
        self.left -= int(action) + 1
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.left <= 0:
            self.rewards = {agent: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self._cumulative_rewards[agent] = 0.0
        for one, reward in self.rewards.items():
            self._cumulative_rewards[one] += reward
        self.agent_selection = other

    def close(self) -> None:
        pass


def by_name(agent_id: str) -> str:
    """A mapping for `policy_mapping_fn: agent_envs:by_name`."""
    return "a" if agent_id == "row" else "b"
