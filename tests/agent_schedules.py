"""Random environments with several agents that keep a log, and a slow reference of their
transitions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from polopt.rollouts.envs.agent_vector_env import AgentVectorEnv, FaultTolerantAgents, SlotGroup
from polopt.rollouts.envs.agents_env import agents_env
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace

AGENTS = ("red", "green", "blue")
Log = list[tuple[Any, ...]]


class Schedule(gymnasium.Env[Any, Any]):
    """Agents act together, in turns, or in a random subset. They leave, end, join and come back at
    random, and get rewards at any time. Every observation is new.

    Args:
        seed: decides everything.
        log: receives `(event, agent, value, ...)`.
        mode: `together`, `turns` or `random`.
        faults: probability that a step raises.
    """

    def __init__(
        self, seed: Any, log: Log, mode: str, faults: float = 0.0, longest: int = 12
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.log, self.mode, self.faults, self.longest = log, mode, faults, longest
        self.possible_agents = list(AGENTS)
        self.observation_space = spaces.Dict(
            {agent: spaces.Box(-np.inf, np.inf, (3,), np.float32) for agent in AGENTS}
        )
        self.action_space = spaces.Dict({agent: spaces.Discrete(4) for agent in AGENTS})
        self.render_mode = None
        self.continued = None
        self.present: list[str] = []
        self.turn = 0

    def spaces_of(self, agent: Any) -> tuple[Any, Any]:
        return self.observation_space.spaces[agent], self.action_space.spaces[agent]

    def observe(self, agent: str) -> np.ndarray:
        place = AGENTS.index(agent)
        return np.array([place, *self.rng.uniform(-1.0, 1.0, 2)], dtype=np.float32)

    def choose_acting(self) -> dict[str, np.ndarray]:
        if self.mode == "together":
            self.acting = list(self.present)
        elif self.mode == "turns":
            self.turn += 1
            self.acting = [self.present[self.turn % len(self.present)]]
        else:
            count = int(self.rng.integers(1, len(self.present) + 1))
            self.acting = [str(one) for one in self.rng.permutation(self.present)[:count]]
        observations = {agent: self.observe(agent) for agent in self.acting}
        for agent, observation in observations.items():
            self.log.append(("observe", agent, observation))
        return observations

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.log.append(("reset", None))
        self.steps, self.over = 0, False
        count = int(self.rng.integers(1, len(AGENTS) + 1))
        self.present = [str(one) for one in self.rng.permutation(AGENTS)[:count]]
        return self.choose_acting(), {}

    def step(self, actions: Mapping[str, Any]) -> Any:
        assert set(actions) == set(self.acting)
        if self.rng.random() < self.faults:
            self.log.append(("fault", None))
            raise RuntimeError("a random fault")
        for agent, action in actions.items():
            self.log.append(("act", agent, int(action)))
        rewards: dict[Any, float] = {}
        for agent in AGENTS:
            if self.rng.random() < 0.6 and agent in self.present:
                rewards[agent] = float(self.rng.integers(-5, 6))
                self.log.append(("reward", agent, rewards[agent]))
        self.steps += 1
        terminated, truncated, observations = {}, {}, {}
        for agent in list(self.present):
            draw = self.rng.random()
            if draw < 0.2 or self.steps == self.longest:
                ends = terminated if draw < 0.1 else truncated
                ends[agent] = True
                observations[agent] = self.observe(agent)
                self.log.append(("end", agent, observations[agent], ends is terminated))
                self.present.remove(agent)
        joins = [one for one in AGENTS if one not in self.present and one not in observations]
        self.present += [one for one in joins if self.rng.random() < 0.15]
        self.over = self.steps == self.longest or not self.present
        if self.over:
            self.log.append(("over", None))
            self.acting = []
        else:
            observations |= self.choose_acting()
        return observations, rewards, terminated, truncated, {}


class Calm:
    """A ParallelEnv in which agents act together and seldom end, join or come back. At times, it
    raises, rewards are not floats, observations have another dtype, or dicts have another order.

    Args:
        seed: decides everything.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as PettingZoo's environments declare it
    render_mode = None
    possible_agents = AGENTS

    def __init__(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def observe(self) -> dict[str, np.ndarray]:
        dtype = np.float64 if self.rng.random() < 0.02 else np.float32
        return {agent: self.rng.normal(size=3).astype(dtype) for agent in self.agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        absent = self.rng.integers(2 * len(AGENTS))
        self.agents = [agent for i, agent in enumerate(AGENTS) if i != absent]
        return self.observe(), {}

    def step(self, actions: Mapping[str, Any]) -> Any:
        assert list(actions) == self.agents
        if self.rng.random() < 0.005:
            raise RuntimeError("a random fault")
        kind = self.rng.choice([float, np.float64, np.float32, int])
        rewards = {agent: kind(int(action) - 1.1) for agent, action in actions.items()}
        observations, draws = self.observe(), self.rng.random(len(self.agents))
        terminated = dict(zip(self.agents, (draws < 0.01).tolist(), strict=True))
        truncated = dict(zip(self.agents, draws > 0.99, strict=True))
        self.agents = [one for one in self.agents if not (terminated[one] or truncated[one])]
        for agent in AGENTS:
            if self.agents and agent not in observations and self.rng.random() < 0.1:
                self.agents.append(agent)
                observations[agent] = self.rng.normal(size=3).astype(np.float32)
        if self.rng.random() < 0.2:
            observations = dict(reversed(observations.items()))
            rewards = dict(reversed(rewards.items()))
        return observations, rewards, terminated, truncated, {}


def calm_slots(seed: int, members: Mapping[str, tuple[str, ...]]) -> AgentVectorEnv:
    """Makes three copies of `Calm`, whose agents have slots in the groups of `members`."""
    made = [0, 0, 0]

    def make(k: int) -> Any:
        made[k] += 1
        return agents_env(Calm([seed, k, made[k]]))

    guards = [
        functools.partial(
            FaultTolerantAgents, functools.partial(make, k), EnvPlace("Calm", 0, k), 1000
        )
        for k in range(3)
    ]
    vector = AgentVectorEnv(guards)
    names = list(members)
    vector.divide(
        members, lambda agent, _: next(i for i, n in enumerate(names) if agent in members[n])
    )
    return vector


@dataclass
class Step:
    """A transition of one agent."""

    obs: np.ndarray
    action: int
    reward: float = 0.0
    next_obs: np.ndarray = field(default_factory=lambda: np.zeros(3, np.float32))
    terminated: bool = False
    truncated: bool = False
    begins: bool = False  # whether it is the first transition of an agent's life


def reference(log: Log) -> dict[str, list[Step]]:
    """Returns the closed transitions of each agent, in order, computed one event at a time."""
    closed: dict[str, list[Step]] = {agent: [] for agent in AGENTS}
    open_: dict[str, Step] = {}
    seen: dict[str, np.ndarray] = {}
    alive: set[str] = set()
    for event, agent, *values in log:
        if event in ("reset", "fault", "over"):
            open_.clear()
            seen.clear()
            alive.clear()
        elif event == "observe":
            if agent in open_:
                step = open_.pop(agent)
                step.next_obs = values[0]
                closed[agent].append(step)
            seen[agent] = values[0]
        elif event == "act":
            open_[agent] = Step(seen[agent], values[0], begins=agent not in alive)
            alive.add(agent)
        elif event == "reward":
            if agent in open_:
                open_[agent].reward += values[0]
        elif event == "end":
            alive.discard(agent)
            if agent in open_:
                step = open_.pop(agent)
                step.next_obs, step.terminated = values[0], values[1]
                step.truncated = not values[1]
                closed[agent].append(step)
    return closed


def schedule_slots(
    seed: int, copies: int, mode: str, faults: float = 0.0
) -> tuple[SlotGroup, list[Log]]:
    """Makes the slots of some schedules, and returns the log of each copy."""
    logs: list[Log] = [[] for _ in range(copies)]
    made = [0] * copies

    def make(k: int) -> Schedule:
        made[k] += 1
        return Schedule([seed, k, made[k]], logs[k], mode, faults)

    guards = [
        functools.partial(
            FaultTolerantAgents, functools.partial(make, k), EnvPlace("Schedule", 0, k), 1000
        )
        for k in range(copies)
    ]
    vector = AgentVectorEnv(guards)
    vector.divide({"default_policy": AGENTS})
    return vector.groups[0], logs
