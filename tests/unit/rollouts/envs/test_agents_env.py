"""Environments with several agents in all forms, as different people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from sampling_helpers import rollout
from toy_envs import Drift

from polopt.rollouts.envs.agents_env import AgentsEnv, agents_env
from polopt.rollouts.envs.env_errors import innermost
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
    assert adapted(made).possible_agents == agents


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
