"""Environments with several agents in all forms, as different people write them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from ray import cloudpickle
from sampling_helpers import rollout
from toy_envs import Drift

from polopt.common.action_mask import find_action_mask
from polopt.common.config import ConfigError
from polopt.rollouts.envs import env_sources
from polopt.rollouts.envs.agents_env import AgentsEnv, agents_env
from polopt.rollouts.envs.env_errors import APIViolation, innermost
from polopt.rollouts.envs.env_sources import EnvContext, make_env, resolve_env
from polopt.rollouts.envs.vector_env import make_one_env

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
MOVES = spaces.Discrete(3)


def obs(value: float) -> np.ndarray:
    return np.full(2, value, np.float32)


def adapted(env: Any) -> AgentsEnv:
    found = agents_env(env)
    assert found is not None
    return found


def ended(results: Any) -> dict[Any, str]:
    """Returns how agents ended in a step."""
    _, _, terminated, truncated, _ = results
    assert not terminated.keys() & truncated.keys()
    assert all(flag is True for flag in (*terminated.values(), *truncated.values()))
    return dict.fromkeys(terminated, "terminated") | dict.fromkeys(truncated, "truncated")


def act(env: AgentsEnv, choose: Callable[[Any, Any], Any] | None = None, seen: Any = None) -> Any:
    """Steps an environment, and checks what is true for each step of each environment.

    Args:
        env: the environment.
        choose: a function that returns the action for a space and an observation. None means 0.
        seen: the observations of the step before.
    """
    actions = {
        agent: 0 if choose is None else choose(env.spaces_of(agent)[1], seen[agent])
        for agent in env.acting
    }
    results = env.step(actions)
    observations, rewards, terminated, truncated, _ = results
    gone = {*terminated, *truncated}
    assert {*observations} == {*env.acting, *gone}
    assert {*observations, *rewards} <= {*env.possible_agents}
    assert all(type(reward) is float for reward in rewards.values())
    assert not gone & {*env.acting}
    assert not (env.over and env.acting)
    for agent, observation in observations.items():
        assert env.spaces_of(agent)[0].contains(observation)
    return results


def play(env: AgentsEnv, seed: int = 0) -> tuple[int, dict[Any, float], dict[Any, str]]:
    """Plays an episode with random actions that the masks allow. Returns the number of steps, the
    returns of the agents and how they ended."""
    for agent in env.possible_agents:
        env.spaces_of(agent)[1].seed(seed)
    seen, _ = env.reset(seed=seed)
    count, returns, ends = 0, dict.fromkeys(env.possible_agents, 0.0), {}

    def choose(space: Any, observation: Any) -> Any:
        masked = isinstance(observation, dict) and "action_mask" in observation
        return space.sample(observation["action_mask"]) if masked else space.sample()

    while not env.over:
        results = act(env, choose, seen)
        seen = results[0]
        count += 1
        for agent, reward in results[1].items():
            returns[agent] += reward
        ends |= ended(results)
    return count, returns, ends


# ---- PettingZoo's ParallelEnv --------------------------------------------------------------------


class Hotel:
    """A ParallelEnv without base class, whose guests are numbers.

    Guest 2 arrives at time 2. Guest 0 leaves at time 3 (truncated), and comes back at time 5. Guest
    1 dies at time 6. The hotel closes at time 7. Rewards and flags are NumPy's.
    """

    possible_agents = (0, 1, 2)
    metadata = {"name": "hotel"}  # noqa: RUF012 - as PettingZoo's environments

    def __init__(self) -> None:
        self.seeds: list[Any] = []
        self.board = np.zeros(2, np.float32)  # the observation of all guests, used again and again

    def observation_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (2,), np.float32)

    def action_space(self, agent: int) -> spaces.Space[Any]:
        return MOVES

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.time, self.agents = 0, [0, 1]
        self.board[:] = 0
        return dict.fromkeys(self.agents, self.board), {}

    def step(self, actions: dict[int, Any]) -> Any:
        assert set(actions) == set(self.agents)
        self.time += 1
        self.board[:] = self.time / 10
        dies = {agent: np.bool_(agent == 1 and self.time == 6) for agent in self.agents}
        leaves = {
            agent: np.bool_((agent == 0 and self.time == 3) or self.time == 7)
            for agent in self.agents
        }
        rewards = {agent: np.float32(agent + self.time) for agent in self.agents}
        before = list(self.agents)
        self.agents = [agent for agent in before if not (dies[agent] or leaves[agent])]
        arrived = {2: 2, 5: 0}.get(self.time)
        if arrived is not None:
            self.agents.append(arrived)
        told = dict.fromkeys([*before, *self.agents], self.board)
        return told, rewards, dies, leaves, {"door": "open"}


def test_agents_of_a_parallel_environment_leave_join_and_come_back() -> None:
    env = adapted(Hotel())
    assert env.possible_agents == [0, 1, 2]
    assert list(env.observation_space.spaces) == list(env.action_space.spaces) == ["0", "1", "2"]
    assert env.spaces_of(2) == (BOX, MOVES)
    first, _ = env.reset(seed=5)
    assert env.unwrapped.seeds == [5]
    assert list(first) == env.acting == [0, 1]
    acting, ends, rewards = [], [], []
    while not env.over:
        results = act(env)
        acting.append(env.acting)
        ends.append(ended(results))
        rewards.append(results[1])
    assert acting == [[0, 1], [0, 1, 2], [1, 2], [1, 2], [1, 2, 0], [2, 0], []]
    left, died = {0: "truncated"}, {1: "terminated"}
    assert ends == [{}, {}, left, {}, {}, died, {0: "truncated", 2: "truncated"}]
    assert rewards[2] == {0: 3.0, 1: 4.0, 2: 5.0}
    assert results[4] == {"door": "open"}
    env.reset()
    assert env.acting == [0, 1]
    assert not env.over


def test_last_observations_are_copies() -> None:
    env = adapted(Hotel())
    env.reset()
    for _ in range(3):
        last, *_ = act(env)
    act(env)
    assert last[0].tolist() == obs(0.3).tolist()
    assert last[1].tolist() == obs(0.4).tolist()  # agent 1 goes on


def test_agents_that_environments_do_not_remove() -> None:
    """Some environments never change `agents`, and repeat the flag in each later step."""

    class Keeps(Hotel):
        def step(self, actions: dict[int, Any]) -> Any:
            self.time += 1
            told = {agent: obs(0) for agent in (0, 1)}
            over = {0: self.time >= 2, 1: self.time >= 4}
            return told, dict.fromkeys(told, 1), over, dict.fromkeys(told, False), {}

    env = adapted(Keeps())
    env.reset()
    assert ended(act(env)) == {}
    assert ended(act(env)) == {0: "terminated"}
    env.env.step({})
    assert env.acting == [1]


def test_flags_that_are_both_true_mean_terminated() -> None:
    class Both(Hotel):
        def step(self, actions: dict[int, Any]) -> Any:
            self.agents = []
            told = {0: obs(0), 1: obs(0)}
            return told, {0: 1, 1: 1}, {0: True, 1: 0}, {0: True, 1: 1}, {}

    env = adapted(Both())
    env.reset()
    assert ended(act(env)) == {0: "terminated", 1: "truncated"}
    assert env.over


def test_reset_of_a_parallel_environment_without_seed() -> None:
    class Simple(Hotel):
        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()

        def seed(self, seed: int) -> None:
            self.seeds.append(("seed", seed))

    env = adapted(Simple())
    env.reset(seed=3, options={"a": 1})
    assert env.unwrapped.seeds == [("seed", 3), None]


# ---- PettingZoo's AECEnv -------------------------------------------------------------------------


class Duel:
    """An AECEnv without base class: `ann`, `bob` and `cat` act in turn. The action is a number of
    points, which the others get. `bob` dies when `cat` acts for the first time, with a last reward
    of 7. The episode is over for the others when `ann` has acted three times."""

    possible_agents = ["ann", "bob", "cat"]  # noqa: RUF012 - as PettingZoo's environments
    render_mode = "ansi"

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return BOX

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return MOVES

    def agent_iter(self) -> Any:
        raise NotImplementedError

    def last(self) -> Any:
        raise NotImplementedError

    def observe(self, agent: str) -> np.ndarray:
        assert agent in self.agents
        return obs(self.count / 10)

    def render(self) -> str:
        return f"{self.agent_selection} has the next turn"

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.count = self.of_ann = 0
        self.rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = "ann"

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        place = self.agents.index(agent)
        self.agent_selection = self.agents[(place + 1) % len(self.agents)]
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            self.agents.remove(agent)
            for of_agents in (self.rewards, self.terminations, self.truncations, self.infos):
                del of_agents[agent]
            self.rewards = dict.fromkeys(self.agents, 0)
            return
        self.count += 1
        self.rewards = {one: np.float64(action) * (one != agent) for one in self.agents}
        if agent == "cat" and "bob" in self.agents:
            self.terminations["bob"] = True
            self.rewards["bob"] = 7
        if agent == "ann":
            self.of_ann += 1
            if self.of_ann == 3:
                self.truncations = dict.fromkeys(self.agents, True)


def test_turns_of_an_aec_environment() -> None:
    env = adapted(Duel())
    assert env.render_mode == "ansi"
    first, infos = env.reset()
    assert list(first) == env.acting == ["ann"]
    assert infos == {"ann": {}, "bob": {}, "cat": {}}
    assert env.render() == "ann has the next turn"
    turns = []
    while not env.over:
        [agent] = env.acting
        results = env.step({agent: 2})
        rewards = {one: reward for one, reward in results[1].items() if reward}
        turns.append((agent, rewards, ended(results), list(results[0])))
    assert turns == [
        ("ann", {"bob": 2.0, "cat": 2.0}, {}, ["bob"]),
        ("bob", {"ann": 2.0, "cat": 2.0}, {}, ["cat"]),
        # `bob` ends at once, and not when it would have its next turn.
        ("cat", {"ann": 2.0, "bob": 7.0}, {"bob": "terminated"}, ["ann", "bob"]),
        # Until `bob` has stepped once more, it gets rewards.
        ("ann", {"bob": 2.0, "cat": 2.0}, {}, ["cat"]),
        ("cat", {"ann": 2.0}, {}, ["ann"]),
        ("ann", {"cat": 2.0}, {"ann": "truncated", "cat": "truncated"}, ["ann", "cat"]),
    ]
    assert results[0]["cat"].tolist() == obs(0.6).tolist()


def test_rewards_that_an_aec_environment_gives_when_a_dead_agent_steps() -> None:
    class Inherits(Duel):
        def step(self, action: Any) -> None:
            super().step(action)
            if action is None and self.agents:
                self.rewards["cat"] = 5  # the heir

    env = adapted(Inherits())
    env.reset()
    gained = [env.step({env.acting[0]: 0})[1].get("cat", 0.0) for _ in range(4)]
    assert gained == [0.0, 0.0, 0.0, 5.0]


def test_agent_of_an_aec_environment_comes_back() -> None:
    class Returns(Duel):
        def step(self, action: Any) -> None:
            super().step(action)
            if self.count == 5 and "bob" not in self.agents:
                self.agents.append("bob")
                for of_agents in (self.terminations, self.truncations):
                    of_agents["bob"] = False
                self.rewards["bob"], self.infos["bob"] = 0, {}
                self.agent_selection = "bob"

    env = adapted(Returns())
    env.reset()
    acted = []
    while not env.over:
        acted += env.acting
        results = act(env)
    assert acted == ["ann", "bob", "cat", "ann", "cat", "bob", "ann"]
    assert ended(results) == dict.fromkeys(["ann", "bob", "cat"], "truncated")


# ---- RLlib's MultiAgentEnv -----------------------------------------------------------------------


class MultiAgentEnv(gymnasium.Env[Any, Any]):
    """Stands in for the class of RLlib, which has the same name."""


class Market(MultiAgentEnv):
    """The new form: two buyers, and a seller who acts in each third step only, waits for rewards,
    and ends with the episode. One buyer leaves, and comes back."""

    possible_agents = ["buyer_1", "buyer_2", "seller"]  # noqa: RUF012 - as RLlib's environments
    observation_spaces = dict.fromkeys(possible_agents, BOX)
    action_spaces = dict.fromkeys(possible_agents, MOVES)
    end = ({"__all__": True}, {"__all__": False})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        return {agent: obs(0) for agent in self.possible_agents}, {"__common__": {"price": 1}}

    def step(self, action_dict: dict[str, Any]) -> Any:
        self.time += 1
        told = {"buyer_1": obs(self.time / 10)}
        if self.time not in (3, 4):
            told["buyer_2"] = obs(self.time / 10)
        if self.time % 3 == 0:
            told["seller"] = obs(self.time / 10)
        rewards = {"buyer_1": 1, "seller": np.array([0.5])}
        flags: tuple[dict, dict] = ({"__all__": False}, {"__all__": False})
        if self.time == 2:
            flags[1]["buyer_2"] = np.True_
        if self.time == 7:
            flags = self.end
        return told, rewards, *flags, {"__common__": {"price": self.time}}


def test_new_form_of_rllib() -> None:
    env = adapted(Market())
    _, infos = env.reset(seed=1)
    assert infos == {"__common__": {"price": 1}}
    acting, ends = [env.acting], []
    while not env.over:
        results = act(env)
        acting.append(env.acting)
        ends.append(ended(results))
        assert results[1] == {"buyer_1": 1.0, "seller": 0.5}
    everyone = ["buyer_1", "buyer_2", "seller"]
    one, both = ["buyer_1"], ["buyer_1", "buyer_2"]
    assert acting == [everyone, both, one, ["buyer_1", "seller"], one, both, everyone, []]
    assert ends == [
        {},
        {"buyer_2": "truncated"},
        {},
        {},
        {},
        {},
        dict.fromkeys(everyone, "terminated"),
    ]
    assert results[4] == {"__common__": {"price": 7}}
    # The seller has no observation in the last step, and its last one is of time 6.
    assert results[0]["seller"].tolist() == obs(0.6).tolist()
    assert results[0]["buyer_1"].tolist() == obs(0.7).tolist()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (({"__all__": True}, {"__all__": True}), ["terminated"] * 3),
        (({"__all__": False}, {"__all__": True}), ["truncated"] * 3),
        (({}, {"__all__": True}), ["truncated"] * 3),
        # An own flag counts more than the flag for all.
        (
            ({"__all__": True}, {"buyer_1": True, "__all__": False}),
            ["truncated", "terminated", "terminated"],
        ),
        # Without the key, the episode is over when all agents have ended.
        (
            ({"buyer_1": True, "seller": True}, {"buyer_2": True}),
            ["terminated", "truncated", "terminated"],
        ),
    ],
)
def test_end_for_all_agents_of_rllib(flags: Any, expected: list[str]) -> None:
    made = Market()
    made.end = flags
    env = adapted(made)
    env.reset()
    while not env.over:
        results = act(env)
    assert made.time == 7
    found = ended(results)
    assert [found[agent] for agent in made.possible_agents] == expected


class OldMarket:
    """The old form, as for Ray 0.8: no Gymnasium class, `reset` without seed, and four results."""

    observation_space = BOX
    action_space = MOVES
    seeded = None

    def __init__(self) -> None:
        self.agents = [object(), object()]  # as in RLlib's own examples of that time

    def seed(self, seed: int) -> None:
        self.seeded = seed

    def reset(self) -> Any:
        self.time = 0
        return {0: obs(0), 1: obs(0)}

    def step(self, action_dict: dict[int, Any]) -> Any:
        self.time += 1
        told = {agent: obs(self.time / 10) for agent in action_dict}
        dones = {0: self.time == 2, "__all__": self.time == 4}
        infos = {1: {"TimeLimit.truncated": self.time == 4}}
        return told, dict.fromkeys(action_dict, self.time), dones, infos


OldMulti = type("OldMulti", (OldMarket, type("MultiAgentEnv", (), {})), {})


def test_old_form_of_rllib() -> None:
    env = adapted(OldMulti())
    assert env.possible_agents == [0, 1]  # the keys of the first `reset`
    assert env.spaces_of(1) == (BOX, MOVES)
    first, infos = env.reset(seed=4)
    assert env.unwrapped.seeded == 4
    assert (list(first), infos) == ([0, 1], {})
    ends = []
    while not env.over:
        results = act(env)
        ends.append(ended(results))
    assert ends == [{}, {0: "terminated"}, {}, {1: "truncated"}]
    assert results[1] == {1: 4.0}
    env.close()  # this form has no method for it


@pytest.mark.parametrize(
    ("attributes", "agents"),
    [
        ({"_agent_ids": {10, 9}}, [9, 10]),
        ({"_agent_ids": {"b", 1, "a"}}, [1, "a", "b"]),
        ({"get_agent_ids": lambda self: {"b", "a"}}, ["a", "b"]),
        ({"agents": ["b", "a"]}, ["b", "a"]),
        ({"agents": 2}, [0, 1]),
        ({"possible_agents": ["z", "a"], "_agent_ids": {"a"}}, ["z", "a"]),
    ],
)
def test_agents_of_rllib(attributes: dict[str, Any], agents: list[Any]) -> None:
    class Named(OldMulti):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            pass

    made = type("Made", (Named,), attributes)()
    env = adapted(made)
    assert env.possible_agents == agents
    assert list(env.observation_space.spaces) == list(map(str, agents))


def test_order_of_agents_that_come_from_a_set() -> None:
    """RLlib lists `_agent_ids`, whose order differs from process to process."""
    ids = {f"agent_{number}" for number in range(8)}

    class Lists(Market):
        _agent_ids = ids
        possible_agents = list(ids)  # noqa: RUF012
        observation_spaces = dict.fromkeys(ids, BOX)
        action_spaces = dict.fromkeys(ids, MOVES)

    assert adapted(Lists()).possible_agents == sorted(ids)


OTHER = spaces.Discrete(9)


@pytest.mark.parametrize(
    "attributes",
    [
        {"observation_spaces": {"a": BOX, "b": OTHER}},
        {"observation_space": spaces.Dict({"a": BOX, "b": OTHER})},
        {"get_observation_space": lambda self, agent: {"a": BOX, "b": OTHER}[agent]},
        # The base class of RLlib has attributes that are None.
        {"observation_spaces": None, "observation_space": {"a": BOX, "b": OTHER}},
    ],
)
def test_spaces_of_rllib(attributes: dict[str, Any]) -> None:
    kind = type("Spaces", (MultiAgentEnv,), {"possible_agents": ["a", "b"], **attributes})
    kind.action_space = MOVES  # type: ignore[attr-defined]
    env = adapted(kind())
    assert env.spaces_of("a") == (BOX, MOVES)
    assert env.spaces_of("b") == (OTHER, MOVES)


def test_multi_agent_environment_in_a_wrapper_of_gymnasium() -> None:
    class Doubles(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            told, rewards, *rest = self.env.step(action)
            return told, {agent: 2 * reward for agent, reward in rewards.items()}, *rest

    env = adapted(Doubles(Market()))
    env.reset()
    assert act(env)[1] == {"buyer_1": 2.0, "seller": 1.0}
    assert isinstance(env.unwrapped, Market)
    assert innermost(env) is env.unwrapped
    assert env.get_wrapper_attr("time") == 1
    assert not env.has_wrapper_attr("nothing")
    with pytest.raises(AttributeError, match="Market has no attribute 'nothing'"):
        env.get_wrapper_attr("nothing")


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "there", "observed"),
    [(Hotel, [1, 2], 0.4), (Duel, ["ann", "cat"], 0.4), (Market, ["buyer_1", "seller"], None)],
)
def test_limit_truncates_all_agents(make: Any, there: list[Any], observed: float | None) -> None:
    env = make_one_env(make, rollout(make, max_frames_per_traj=4), 0)
    for _ in range(2):
        env.reset()
        results = [act(env) for _ in range(4)]
        assert env.over
        # An agent that has ended before does not end again.
        assert any(map(ended, results[:3]))
        assert ended(results[3]) == dict.fromkeys(there, "truncated")
        if observed:
            assert {float(one[0]) for one in results[3][0].values()} == {np.float32(observed)}


def test_end_at_the_limit_stays_an_end() -> None:
    env = make_one_env(Hotel, rollout(Hotel, max_frames_per_traj=6), 0)
    env.reset()
    results = [act(env) for _ in range(6)]
    assert ended(results[5]) == {1: "terminated", 0: "truncated", 2: "truncated"}
    assert env.over


def test_environment_with_one_agent_has_its_limit_as_before() -> None:
    assert agents_env(Drift()) is None
    assert isinstance(make_one_env(Drift, rollout(Drift, max_frames_per_traj=4), 0), TimeLimit)


# ---- violations ----------------------------------------------------------------------------------


class Two(Hotel):
    """A ParallelEnv whose next result can be changed. Agent `c` joins later or never."""

    possible_agents = ["a", "b", "c"]  # type: ignore[assignment] # noqa: RUF012

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents: list[Any] = ["a", "b"]
        self.told: Any = {"a": obs(0), "b": obs(0)}
        self.rewards: Any = {"a": 1.0, "b": 1.0}
        self.dies: Any = {"a": False, "b": False}
        self.leaves: Any = {"a": False, "b": False}
        return dict(self.told), {}

    def step(self, actions: Any) -> Any:
        return self.told, self.rewards, self.dies, self.leaves, {}


def b_has_left(env: AgentsEnv) -> None:
    made = env.unwrapped
    made.agents, made.dies = ["a"], {"a": False, "b": True}
    act(env)
    made.told, made.rewards, made.dies = {"a": obs(0)}, {"a": 1.0}, {}


KNOWN = "but it is not one of the possible agents 'a', 'b', 'c'"


@pytest.mark.parametrize(
    ("left", "changes", "message"),
    [
        (
            False,
            {"told": [1]},
            "step() must return a dict of agents as observations; got [1] (list)",
        ),
        (False, {"dies": None}, "step() must return a dict of agents as terminated; got None (Non"),
        (False, {"agents": ["a", "b", "x"]}, f"agent 'x' must act, {KNOWN}"),
        (
            False,
            {"told": {"a": obs(0), "b": obs(0), "x": 1}},
            f"agent 'x' got an observation, {KNOWN}",
        ),
        (False, {"rewards": {"a": 0, "b": 0, "x": 0}}, f"agent 'x' got a reward, {KNOWN}"),
        (False, {"dies": {"x": True}}, f"agent 'x' has ended, {KNOWN}"),
        (
            True,
            {"told": {"a": obs(0), "b": obs(0)}},
            "agent 'b' got an observation, but it has left",
        ),
        (True, {"rewards": {"a": 0, "b": 2}}, "agent 'b' got the reward 2.0, but it has left"),
        (False, {"rewards": {"a": 1}}, "step() must return a reward for agent 'b', which acted"),
        (
            False,
            {"rewards": {"a": "much", "b": 0}},
            "for agent 'a', step() must return a number as reward; got 'much' (str)",
        ),
        (
            False,
            {"rewards": {"a": np.ones(2), "b": 0}},
            "for agent 'a', step() must return a number",
        ),
        (
            False,
            {"dies": {"a": "no"}},
            "step() must return a boolean as terminated of agent 'a'; got 'no' (str)",
        ),
        (
            False,
            {"leaves": {"b": 0.5}},
            "step() must return a boolean as truncated of agent 'b'; got",
        ),
        (
            False,
            {"agents": ["a"]},
            "agent 'b' is missing in agents, but it is neither terminated nor truncated",
        ),
        (
            False,
            {"agents": ["a"], "leaves": {"b": True}, "told": {"a": obs(0)}},
            "step() must return the last observation of agent 'b', which is truncated",
        ),
        (
            False,
            {"told": {"a": obs(0)}},
            "step(), for agent 'b', must return an observation, because the agent acts next",
        ),
        (
            False,
            {"agents": ["a", "b", "c"]},
            "step(), for agent 'c', must return an observation, because the agent acts next",
        ),
        (
            False,
            {"told": {"a": obs(0), "b": np.zeros(3)}},
            "step(), for agent 'b', must return an observation of shape (2,); got shape (3,)",
        ),
    ],
)
def test_step_that_breaks_the_rules(left: bool, changes: dict[str, Any], message: str) -> None:
    env = adapted(Two())
    env.reset()
    act(env)
    act(env)
    assert env.continued is not None
    if left:
        b_has_left(env)
        act(env)
    vars(env.unwrapped).update(changes)
    with pytest.raises(APIViolation, match=re.escape(message)):
        act(env)


def test_what_an_agent_that_has_left_may_still_get() -> None:
    env = adapted(Two())
    env.reset()
    b_has_left(env)
    made = env.unwrapped
    # Some environments repeat the flag, the observation and a reward of 0.
    made.dies, made.rewards = {"b": True}, {"a": 1.0, "b": 0}
    made.told = {"a": obs(0), "b": obs(0)}
    results = act(env)
    assert list(results[0]) == ["a"]
    assert results[1] == {"a": 1.0}
    assert ended(results) == {}


def test_terminated_agent_without_last_observation() -> None:
    env = adapted(Two())
    env.reset()
    made = env.unwrapped
    made.agents, made.dies, made.told = ["a"], {"b": True}, {"a": obs(0.5)}
    results = act(env)
    assert ended(results) == {"b": "terminated"}
    assert results[0]["b"].tolist() == obs(0).tolist()  # it is not learned from


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"a": obs(0)}, "reset() must return 2 dicts (observations, infos); got {'a': "),
        (
            ({"a": obs(0)}, None),
            "reset() must return a dict of agents as infos; got None (NoneType)",
        ),
        (({"a": obs(0)}, {}), "reset(), for agent 'b', must return an observation, because the a"),
        (
            ({"a": 1, "b": 2}, {}),
            "reset(), for agent 'a', must return an observation of shape (2,)",
        ),
    ],
)
def test_reset_that_breaks_the_rules(result: Any, message: str) -> None:
    class Starts(Two):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            super().reset()
            return result

    with pytest.raises(APIViolation, match=re.escape(message)):
        adapted(Starts()).reset()


@pytest.mark.parametrize("kind", [Two, Duel])
def test_reset_without_agents(kind: Any) -> None:
    class Empty(kind):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            result = super().reset()
            self.agents = []
            return result

    with pytest.raises(APIViolation, match="agents must name at least one agent after reset"):
        adapted(Empty()).reset()


@pytest.mark.parametrize(
    ("kind", "space", "message"),
    [
        ("action", spaces.Discrete(4), r" changed from Discrete\(3\) to Discrete\(4\)"),
        (
            "observation",
            spaces.Box(0, 1, (3,)),
            " changed from Box",
        ),
    ],
)
@pytest.mark.parametrize("form", [Two, Duel])
def test_space_that_changes(kind: str, space: Any, message: str, form: Any) -> None:
    made = form()
    env = adapted(made)
    env.reset()
    setattr(made, f"{kind}_space", lambda agent: space)
    said = f"the {kind} space of agent {made.possible_agents[0]!r}{message}"
    with pytest.raises(APIViolation, match=said):
        env.reset()


def test_bounds_of_observations_may_change() -> None:
    made = Two()
    env = adapted(made)
    made.observation_space = lambda agent: spaces.Box(-9, 9, (2,))  # type: ignore[method-assign]
    env.reset()


def old_space(*args: Any) -> Any:
    kind = type("Box", (), {"__module__": "gym.spaces.box", "__repr__": lambda self: "Box()"})
    return kind()


@pytest.mark.parametrize(
    ("form", "attributes", "message"),
    [
        (Two, {"possible_agents": None}, "Made must name all agents that can appear in possible_a"),
        (Duel, {"possible_agents": []}, "Made must name its agents in possible_agents; got none"),
        (Two, {"possible_agents": [1, "1"]}, "the agents 1 and '1' have the same name"),
        (
            Duel,
            {"action_space": lambda *_: None},
            "agent 'ann' must have an action space; got None (NoneType)",
        ),
        (
            Two,
            {"observation_space": old_space},
            "agent 'a' has an observation space of the package gym, Box(); allowed: a space of the "
            "package gymnasium",
        ),
        (OldMulti, {"action_space": old_space()}, "agent 0 has an action space of the package gym"),
        (
            Market,
            {"observation_spaces": {}},
            "agent 'buyer_1' must have an observation space; got No",
        ),
        (
            Market,
            {"get_action_space": lambda self, agent: {}[agent]},
            "agent 'buyer_1' must have an action space; got None (NoneType)",
        ),
        (
            OldMulti,
            {"reset": lambda self: None},
            "reset() must return a dict of agents as observati",
        ),
        (
            OldMulti,
            {"reset": lambda self: {}},
            "Made must name its agents in possible_agents; got n",
        ),
    ],
)
def test_agents_or_spaces_that_are_missing(
    form: Any, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(APIViolation, match=re.escape(message)):
        agents_env(type("Made", (form,), attributes)())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"agent_selection": "dan"},
            "agent 'dan' must act, but it is not one of the possible agents",
        ),
        ({"agents": ["ann", "bob", "cat", "dan"]}, "agent 'dan' must act, but it is not one"),
        ({"agents": ["ann", "bob"]}, "agent 'cat' is missing in agents, but it is neither termi"),
        ({"rewards": {"dan": 0}}, "agent 'dan' got a reward, but it is not one of the possible"),
        ({"rewards": {"bob": None}}, "for agent 'bob', step() must return a number as reward; got"),
        (
            {"terminations": {"bob": "no"}},
            "must return a boolean as terminated of agent 'bob'; got",
        ),
        (
            {"truncations": {"dan": True}},
            "agent 'dan' has ended, but it is not one of the possible",
        ),
        # `bob` would have to act again and again without an action.
        ({"terminations": {"bob": True}}, "agent 'bob' has ended, but agents names it still after"),
        ({"observe": lambda agent: obs(0)[:1]}, "step(), for agent 'bob', must return an observat"),
    ],
)
def test_turn_that_breaks_the_rules(changes: dict[str, Any], message: str) -> None:
    class Rigged(Duel):
        def step(self, action: Any) -> None:
            if action is not None:
                super().step(action)
            vars(self).update(changes)

    env = adapted(Rigged())
    env.reset()
    with pytest.raises(APIViolation, match=re.escape(message)):
        act(env)


def end_of_rllib(*parts: Any) -> Any:
    return lambda self, action_dict: parts


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            ({}, {}, {"__all__": True}, {}),
            "step() must return 5 dicts (observations, rewards, terminated, truncated, infos); got",
        ),
        (({"x": obs(0)}, {}, {}, {}, {}), "agent 'x' got an observation, but it is not one of the"),
        (({"x": obs(0)}, {}, {"__all__": True}, {}, {}), "agent 'x' got an observation, but it is"),
        (
            ({}, {"x": 1}, {"__all__": False}, {}, {}),
            "agent 'x' got a reward, but it is not one of",
        ),
        (
            ({"seller": None}, {}, {}, {}, {}),
            "step(), for agent 'seller', must return an observation",
        ),
        (
            ({}, {}, {"__all__": "no"}, {}, {}),
            "must return a boolean as terminated of agent '__all__",
        ),
        (
            ({}, {}, {}, {"seller": None}, {}),
            "must return a boolean as truncated of agent 'seller'; g",
        ),
        # Nobody acts, and the episode goes on.
        (
            ({}, {}, {"__all__": False}, {}, {}),
            "no agent could act in 1000 steps in a row, and the",
        ),
    ],
)
def test_step_of_rllib_that_breaks_the_rules(result: Any, message: str) -> None:
    env = adapted(type("Rigged", (Market,), {"step": end_of_rllib(*result)})())
    env.reset()
    for _ in range(999 * ("1000" in message)):
        act(env)
    with pytest.raises(APIViolation, match=re.escape(message)):
        act(env)


def test_step_of_the_old_form_that_breaks_the_rules() -> None:
    env = adapted(type("Rigged", (OldMulti,), {"step": end_of_rllib({}, {}, {}, {}, {})})())
    env.reset()
    said = re.escape(
        "step() must return 4 dicts (observations, rewards, dones, infos); got a tuple of"
    )
    with pytest.raises(APIViolation, match=said):
        act(env)


def test_reward_of_rllib_for_an_agent_that_has_left() -> None:
    class Pays(Market):
        def step(self, action_dict: Any) -> Any:
            told, rewards, *rest = super().step(action_dict)
            return told, rewards | {"buyer_2": self.time == 4}, *rest

    env = adapted(Pays())
    env.reset()
    for _ in range(3):
        act(env)
    with pytest.raises(APIViolation, match=r"agent 'buyer_2' got the reward 1\.0, but it has left"):
        act(env)


def test_steps_without_an_agent_that_acts() -> None:
    """An environment of RLlib may have such steps, but not too many of them in a row."""

    class Sleeps(Market):
        def step(self, action_dict: Any) -> Any:
            self.time += 1
            told = {"seller": obs(0)} if self.time % 900 == 0 else {}
            over = {"__all__": self.time == 1800}
            return told, {}, over, {}, {}

    env = adapted(Sleeps())
    env.reset()
    for _ in range(1800):
        act(env)
    assert env.over


def test_agents_that_come_after_all_have_left() -> None:
    class Waits(Market):
        def step(self, action_dict: Any) -> Any:
            self.time += 1
            told = {"seller": obs(0)} if self.time > 2 else {}
            ends = dict.fromkeys(action_dict, True) if self.time == 1 else {}
            return told, {}, ends | {"__all__": False}, {}, {}

    env = adapted(Waits())
    env.reset()
    acting = []
    for _ in range(4):
        act(env)
        acting.append(env.acting)
        assert not env.over
    assert acting == [[], [], ["seller"], ["seller"]]


# ---- sources -------------------------------------------------------------------------------------


def make_hotel(config: Any) -> Hotel:
    made = Hotel()
    made.seeds.append(dict(config))
    return made


@pytest.mark.parametrize("source", [Hotel, Duel, Market, OldMulti, lambda: TimeLimit(Market(), 9)])
def test_callable_that_makes_agents(source: Any) -> None:
    assert isinstance(make_env(source, EnvContext({}, 0, 0, 0)), AgentsEnv)


def test_forms_without_a_class_of_rllib() -> None:
    class Old(OldMarket):
        def get_agent_ids(self) -> set[int]:
            return {1, 0}

    class New(gymnasium.Env[Any, Any]):
        possible_agents = Market.possible_agents
        observation_spaces = Market.observation_spaces
        action_spaces = Market.action_spaces
        end = Market.end
        reset, step = Market.reset, Market.step

    for kind in (Old, New):
        assert all(one.__name__ != "MultiAgentEnv" for one in kind.__mro__)
        env = adapted(kind())
        env.reset()
        act(env)


def test_creator_of_agents_gets_the_config() -> None:
    env = make_env(make_hotel, EnvContext({"stars": 4}, 0, 0, 0))
    assert env.unwrapped.seeds == [{"stars": 4}]
    ready = adapted(Hotel())
    assert make_env(lambda: ready, EnvContext({}, 0, 0, 0)) is ready


def test_gymnasium_id_of_a_multi_agent_environment() -> None:
    gymnasium.register("polopt-tests/Market-v0", entry_point=Market)
    try:
        source = resolve_env("polopt-tests/Market-v0")
        config = rollout("unused", env_config={"disable_env_checker": True})
        env = make_one_env(source, config, 0)
    finally:
        del gymnasium.registry["polopt-tests/Market-v0"]
    assert isinstance(env, AgentsEnv)
    env.reset()
    act(env)


@pytest.mark.parametrize("made", [Hotel(), Duel(), Market(), OldMulti(), adapted(Hotel())])
def test_made_environment_with_agents_is_refused(made: Any) -> None:
    name = type(innermost(made)).__name__
    said = (
        rf"got an environment that is made already, .*as in 'env': lambda config: {name}\(\.\.\.\)"
    )
    with pytest.raises(ConfigError, match=said):
        resolve_env(made)


def test_error_for_another_object_names_what_is_allowed() -> None:
    class Controls:
        """Has agents, but is not an environment."""

        possible_agents = agents = ("a", "b")

    said = "PettingZoo's ParallelEnv or AECEnv, or RLlib's MultiAgentEnv; got <"
    with pytest.raises(TypeError, match=said):
        make_env(Controls, EnvContext({}, 0, 0, 0))


def test_environment_with_one_agent_that_has_lists_of_agents() -> None:
    class Traffic(Drift):
        agents = ("car", "bus")
        get_agents = None

    class Proxy(Drift):
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

    class Raises(Drift):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    for kind in (Traffic, Proxy, Raises):
        assert agents_env(kind()) is None
    assert agents_env(Market) is None  # a class


# ---- real environments ---------------------------------------------------------------------------

#: The modules of environments, and the package that each one needs in addition to PettingZoo.
MODULES = {
    "mpe2:simple_spread_v3": "mpe2",
    "mpe2:simple_tag_v3": "mpe2",
    "pettingzoo.classic:connect_four_v3": "pygame",
    "pettingzoo.butterfly:knights_archers_zombies_v11": "pygame",
    "pettingzoo.butterfly:pistonball_v6": "pymunk",
}


def need(*packages: str) -> None:
    for package in ("pettingzoo", *packages):
        pytest.importorskip(package, reason=f'needs {package}: pip install "polopt[agents]"')


def made_by_id(name: str, **options: Any) -> AgentsEnv:
    # The creator reaches workers with Ray's pickle.
    source = cloudpickle.loads(cloudpickle.dumps(resolve_env(name)))
    assert source.__name__ == name.rpartition(":")[2]
    return make_env(source, EnvContext(options, 0, 0, 0))


@pytest.mark.parametrize(("name", "package"), MODULES.items())
def test_module_of_pettingzoo(name: str, package: str) -> None:
    need(package)
    env = made_by_id(name, **({} if "classic" in name else {"max_cycles": 20}))
    assert play(env, 3) == play(env, 3)
    count, _, ends = play(env, 4)
    assert set(ends) == set(env.possible_agents)
    if "classic" not in name:
        assert count == 20
        assert set(ends.values()) == {"truncated"}
    env.close()


@pytest.mark.parametrize(
    ("name", "package", "kept"),
    [
        ("mpe2:simple_spread_v3", "mpe2", ["raw_env"]),
        ("pettingzoo.classic:connect_four_v3", "pygame", ["TerminateIllegalWrapper", "raw_env"]),
    ],
)
def test_wrappers_of_pettingzoo_that_only_check_are_left_out(
    name: str, package: str, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need(package)
    env = made_by_id(name)
    monkeypatch.setattr(env_sources, "_without_checks", lambda made: made)
    whole = make_env(resolve_env(name), EnvContext({}, 0, 0, 0))
    assert classes_of(env) == kept
    assert classes_of(whole) == ["OrderEnforcingWrapper", "AssertOutOfBoundsWrapper", *kept]
    assert play(env, 3) == play(whole, 3)


def classes_of(env: AgentsEnv) -> list[str]:
    """The classes of an AECEnv of PettingZoo and its wrappers."""
    inner: Any = getattr(env.env, "aec_env", env.env)
    names = [type(inner).__name__]
    while "env" in vars(inner):
        inner = inner.env
        names.append(type(inner).__name__)
    return names


def test_options_reach_a_module_of_pettingzoo() -> None:
    need("mpe2")
    env = made_by_id("mpe2:simple_spread_v3", N=5, max_cycles=7)
    assert env.possible_agents == [f"agent_{number}" for number in range(5)]
    assert play(env)[0] == 7
    with pytest.raises(TypeError, match="unexpected keyword argument 'M'"):
        made_by_id("mpe2:simple_spread_v3", M=5)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("classic/connect_four-v3", "_TurnAgents"), ("butterfly/pistonball-v6", "_ParallelAgents")],
)
def test_id_of_pettingzoo(name: str, adapter: str) -> None:
    need("pygame", "pymunk")
    if not hasattr(pytest.importorskip("pettingzoo"), "make"):
        pytest.skip("this version of PettingZoo has no ids")
    for id_ in (name, f"pettingzoo:{name}"):
        assert type(made_by_id(id_)).__name__ == adapter


def test_id_that_the_driver_registers_with_pettingzoo() -> None:
    pettingzoo = pytest.importorskip("pettingzoo")
    if not hasattr(pettingzoo, "make"):
        pytest.skip("this version of PettingZoo has no ids")
    pettingzoo.register("parallel", "polopt-tests/Hotel-v0", Hotel)
    source = cloudpickle.dumps(resolve_env("polopt-tests/Hotel-v0"))
    del pettingzoo.parallel_registry["polopt-tests/Hotel-v0"]  # as in a worker
    with pytest.warns(UserWarning, match="expected to be an instance of ParallelEnv"):
        env = make_env(cloudpickle.loads(source), EnvContext({}, 0, 0, 0))
    assert env.possible_agents == [0, 1, 2]


def test_unknown_module_of_mpe2_names_the_nearest() -> None:
    need("mpe2")
    said = "'mpe2:simple_spred_v3'; mpe2 defines no .*; did you mean 'mpe2:simple_spread_v3'"
    with pytest.raises(ConfigError, match=said):
        resolve_env("mpe2:simple_spred_v3")


def test_module_of_pettingzoo_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need("pygame")
    for module in list(sys.modules):
        if module.startswith("pettingzoo.classic.connect_four"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pygame", None)  # an import raises ModuleNotFoundError
    with pytest.raises(ConfigError, match="connect_four_v3 needs pygame: pip install"):
        resolve_env("pettingzoo.classic:connect_four_v3")


def test_both_forms_of_an_environment_have_the_same_returns() -> None:
    """Each reward of an AECEnv arrives once."""
    need("mpe2")
    from mpe2 import simple_spread_v3

    forms = [adapted(simple_spread_v3.parallel_env()), adapted(simple_spread_v3.env())]
    count, returns, ends = play(forms[0])
    assert (count, set(ends.values())) == (25, {"truncated"})
    in_turn, same, same_ends = play(forms[1])
    assert in_turn == 75
    assert same == pytest.approx(returns)
    assert same_ends == ends


def test_connect_four() -> None:
    need("pygame")
    env = made_by_id("pettingzoo.classic:connect_four_v3")
    space, actions = env.spaces_of("player_0")
    mask = find_action_mask(space, actions)
    assert mask is not None
    assert mask.sizes == (7,)
    assert list(mask.rest.spaces) == ["observation"]
    seen, _ = env.reset(seed=0)
    turns = []
    for column in (0, 1, 0, 1, 0, 1):
        turns += env.acting
        encoded = spaces.flatten(space, seen[env.acting[0]])[None]
        mask.check(encoded[:, mask.place])
        seen, rewards, *_ = act(env, lambda *_, column=column: column, seen)
        assert not any(rewards.values())
    assert turns == ["player_0", "player_1"] * 3
    assert seen["player_0"]["observation"].dtype == seen["player_0"]["action_mask"].dtype == np.int8
    results = act(env, lambda *_: 0, seen)
    assert results[1] == {"player_0": 1.0, "player_1": -1.0}
    assert ended(results) == {"player_0": "terminated", "player_1": "terminated"}
    assert results[0]["player_1"]["observation"][:, 0, 1].sum() == 4  # sees the winner's column


def test_illegal_move_in_connect_four_ends_the_game() -> None:
    need("pygame")
    env = made_by_id("pettingzoo.classic:connect_four_v3")
    env.reset(seed=0)
    for _ in range(7):
        results = act(env)
    assert env.over
    assert results[1] == {"player_0": -1.0, "player_1": 0.0}


def test_wrappers_of_supersuit() -> None:
    need("mpe2", "supersuit")
    import supersuit
    from mpe2 import simple_spread_v3, simple_tag_v3

    padded = adapted(supersuit.pad_observations_v0(simple_tag_v3.parallel_env()))
    assert len({str(padded.spaces_of(agent)) for agent in padded.possible_agents}) == 1
    assert play(padded)[0] == 25
    plain = play(adapted(simple_spread_v3.env()))
    tenfold = adapted(
        supersuit.reward_lambda_v0(simple_spread_v3.env(), lambda reward: 10 * reward)
    )
    count, returns, ends = play(tenfold)
    assert (count, ends) == (plain[0], plain[2])
    assert returns == pytest.approx({agent: 10 * one for agent, one in plain[1].items()})
    assert type(tenfold.unwrapped).__name__ == "raw_env"
    assert tenfold.get_wrapper_attr("max_cycles") == 25


RLLIB = "ray.rllib.examples.envs.classes.multi_agent"


@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("tic_tac_toe:TicTacToe", {}, {"player1", "player2"}),
        ("guess_the_number_game:GuessTheNumberGame", {}, {0, 1}),
        ("rock_paper_scissors:RockPaperScissors", {}, {"player1", "player2"}),
        ("double_row_corridor_env:DoubleRowCorridorEnv", {}, {"agent_0", "agent_1"}),
        ("MultiAgentCartPole", {"num_agents": 3}, {0, 1, 2}),
    ],
)
def test_examples_of_rllib(name: str, options: dict[str, Any], ends: set[Any]) -> None:
    pytest.importorskip("ray.rllib", reason='needs RLlib: pip install "polopt[rllib]"')
    where = f"{RLLIB}.{name}" if ":" in name else f"{RLLIB}:{name}"
    source = resolve_env(where)
    env = make_env(source, EnvContext(options, 0, 0, 0))
    for seed in range(3):
        _, _, found = play(env, seed)
        assert set(found) == ends


def test_environments_of_pettingzoo_in_classes_of_rllib() -> None:
    need("mpe2")
    wrappers = pytest.importorskip("ray.rllib.env.wrappers.pettingzoo_env")
    from mpe2 import simple_spread_v3

    env = adapted(wrappers.ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
    assert env.possible_agents == ["agent_0", "agent_1", "agent_2"]  # sorted
    assert play(env)[1] == pytest.approx(play(adapted(simple_spread_v3.parallel_env()))[1])
    in_turn = adapted(wrappers.PettingZooEnv(simple_spread_v3.env()))
    assert play(in_turn)[0] == 75
