"""`AgentsEnv`: one environment with several agents. `agents_env` adapts PettingZoo's environments
and RLlib's `MultiAgentEnv` to it.

The adapters recognise an environment by its methods and by the names of its classes. They import
neither PettingZoo nor RLlib.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from operator import countOf
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv

from polopt.rollouts.envs.env_api import (
    PLAIN_NUMBERS,
    check_flag,
    check_observation,
    described_value,
    reward_of,
    same_encoding,
)
from polopt.rollouts.envs.env_errors import APIViolation, innermost

#: The identifier of an agent. It is usually a string.
AgentID = Hashable
#: The key with which RLlib's environments end the episode for all agents.
_ALL = "__all__"
#: The number of consecutive steps without any agent that acts, at which an environment is refused.
_MOST_IDLE = 1000


class _Step(NamedTuple):
    """What an adapter reads from one step of its environment.

    Attributes:
        observations: the observations. Those of agents that neither act next nor have ended in this
            step are ignored.
        rewards: the rewards.
        ended: the agents that the environment calls ended. True means terminated, and False means
            truncated. Agents that have ended before are ignored.
        acting: the agents that act next.
        over: whether the episode is over for all agents.
        infos: the infos.
    """

    observations: Mapping[AgentID, Any]
    rewards: Mapping[AgentID, Any]
    ended: dict[AgentID, bool]
    acting: list[AgentID]
    over: bool
    infos: dict[AgentID, Any]


class AgentsEnv(gymnasium.Env[Any, Any], ABC):
    """One environment with several agents.

    An agent is in the episode from the first step in which it can act until the step in which it
    ends. It may come back later in the episode.

    Args:
        env: the user's environment.
        agents: all agents that can ever appear.

    Attributes:
        env: the user's environment.
        possible_agents: all agents that can ever appear.
        observation_space: a Dict with the observation space of each possible agent. Its keys are
            the agents as strings.
        action_space: a Dict with the action space of each possible agent.
        acting: the agents that must act in the next step. The list is empty if no agent can act
            now, or if the episode is over.
        over: whether the last step ended the episode for all agents.
        max_steps: the number of steps after which all agents are truncated, or None.
        continued: the observations and the rewards of the agents in `acting`, in this order, if in
            the last step the same agents went on: the agents that acted act next, no agent has
            ended, and each observation is an array of the dtype and the shape of its Box. None
            after all other steps, and also if it is not sure.

    Raises:
        APIViolation: from all methods, if the environment breaks the rules of its API.
    """

    def __init__(self, env: Any, agents: Iterable[AgentID]) -> None:
        self.env = env
        self.possible_agents: list[AgentID] = list(dict.fromkeys(agents))
        if not self.possible_agents:
            raise APIViolation(f"{_name(env)} must name its agents in possible_agents; got none")
        names: dict[str, AgentID] = {}
        for agent in self.possible_agents:
            other = names.setdefault(str(agent), agent)
            if other is not agent:
                raise APIViolation(f"the agents {other!r} and {agent!r} have the same name")
        self.metadata = dict(_attribute(env, "metadata") or {})
        self.render_mode = _attribute(env, "render_mode")
        self.acting: list[AgentID] = []
        self.over = False
        self.max_steps: int | None = None
        self.continued: tuple[list[Any], list[float]] | None = None
        self._spaces = {agent: self._own_spaces(agent) for agent in self.possible_agents}
        # The dtype and shape of the arrays that need no check, for each agent.
        self._plain = {
            agent: (space.dtype, space.shape)
            for agent, (space, _) in self._spaces.items()
            if isinstance(space, spaces.Box) and space.shape
        }
        self.observation_space = self._dict_space(0)
        self.action_space = self._dict_space(1)
        self._where = {agent: f"step(), for agent {agent!r}," for agent in self.possible_agents}
        self._takes = _keywords_of(env.reset)
        self._elapsed = 0
        self._idle = 0
        # A dict is used as a set with an order that is the same in all processes.
        self._there: dict[AgentID, None] = {}
        self._kinds: list[Any] = []  # the values of `_plain` of the agents in `acting`
        self._left: set[AgentID] = set()
        self._latest: dict[AgentID, Any] = {}

    # ---- for users of this class ----------------------------------------------------------------

    def spaces_of(self, agent: AgentID) -> tuple[Space[Any], Space[Any]]:
        """Returns the observation space and the action space of a possible agent."""
        return self._spaces[agent]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        """Begins an episode.

        Returns:
            the observation of each agent that acts next, and the infos of the environment.
        """
        self._elapsed = self._idle = 0
        self._there, self._left, self._latest = {}, set(), {}
        self.over, self.continued = False, None
        observations, infos = self._begin(seed, options)
        self._check_same_spaces()
        for agent in self.acting:
            self._join(agent)
        return {
            agent: self._observation(agent, observations, f"reset(), for agent {agent!r},")
            for agent in self.acting
        }, infos

    @abstractmethod
    def step(self, actions: dict[AgentID, Any]) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """Steps the environment.

        Args:
            actions: one action for each agent in `acting`.

        Returns:
            five dicts whose keys are agents:

            - the observation of each agent that acts next, and the last observation of each agent
              that ended in this step
            - the rewards of this step, also of agents that did not act. An agent without a reward
              may be missing.
            - True for each agent that terminated in this step
            - True for each agent that was truncated in this step. An agent that the environment
              calls both terminated and truncated counts as terminated.
            - the infos of the environment, which may have other keys
        """

    def _take(self, step: _Step) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """Takes a step of the environment, and returns the result of `step`."""
        self.continued = None
        self._elapsed += 1
        there = self._there
        ended = {agent: how for agent, how in step.ended.items() if agent in there}
        acting, over = step.acting, step.over
        for agent in acting:
            if agent not in there:
                self._join(agent)
        observations = {
            agent: self._observation(agent, step.observations, self._where[agent])
            for agent in acting
        }
        rewards = self._rewards(step.rewards)
        if not over and self.max_steps is not None and self._elapsed >= self.max_steps:
            over = True
            ended = {agent: ended.get(agent, False) for agent in there}
        if over:
            acting = []
        for agent in ended:
            last = observations.get(agent)
            if last is None and agent in step.observations:
                last = self._observation(agent, step.observations, self._where[agent])
            elif last is None:
                last = self._last_observation(agent)
            # The environment may overwrite its arrays in `reset`.
            observations[agent] = copy.deepcopy(last)
            del there[agent]
            self._left.add(agent)
        self._note_idle(idle=not acting and not over)
        self.acting, self.over = acting, over
        terminated = {agent: True for agent, how in ended.items() if how}
        truncated = {agent: True for agent, how in ended.items() if not how}
        return observations, rewards, terminated, truncated, step.infos

    def get_episode(self) -> dict[str, Any]:
        """Returns where the current episode is, without the state of the user's environment."""
        return {
            "elapsed": self._elapsed,
            "idle": self._idle,
            "there": list(self._there),
            "left": [agent for agent in self.possible_agents if agent in self._left],
            "latest": dict(self._latest),
            "acting": list(self.acting),
            "over": self.over,
        }

    def set_episode(self, episode: Mapping[str, Any]) -> None:
        """Continues an episode from what `get_episode` returned."""
        self._elapsed, self._idle = episode["elapsed"], episode["idle"]
        self._there, self._left = dict.fromkeys(episode["there"]), set(episode["left"])
        self._latest, self.acting = dict(episode["latest"]), list(episode["acting"])
        self.over, self.continued = episode["over"], None

    def render(self) -> Any:
        """Returns what the environment renders."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment, if it has a method for this."""
        close = _attribute(self.env, "close")
        if close is not None:
            close()

    @property
    def unwrapped(self) -> Any:
        """The user's environment without its wrappers."""
        return innermost(self.env)

    def has_wrapper_attr(self, name: str) -> bool:
        """Returns whether this object or the user's environment has an attribute."""
        return hasattr(self, name) or _attribute(self.env, name, self) is not self

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns an attribute of this object or of the user's environment."""
        if hasattr(self, name):
            return getattr(self, name)
        found = _attribute(self.env, name, self)
        if found is self:
            raise AttributeError(f"{_name(self.env)} has no attribute {name!r}")
        return found

    # ---- for adapters ---------------------------------------------------------------------------

    @abstractmethod
    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Mapping[AgentID, Any], dict[Any, Any]]:
        """Resets the environment and sets `acting`. Returns the observations and the infos."""

    @abstractmethod
    def _space_of(self, kind: str, agent: AgentID) -> Any:
        """Returns the space of an agent, or None. `kind` is `observation` or `action`."""

    def _last_observation(self, agent: AgentID) -> Any:
        """Returns the observation of an agent that has ended, if the step did not return one. This
        is the last observation that the environment returned for the agent."""
        return self._latest[agent]

    def _reset_env(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Calls `reset` with the arguments that it takes. If it takes no seed, calls the method
        `seed` of earlier APIs."""
        if seed is not None and "seed" not in self._takes:
            set_seed = _attribute(self.env, "seed")
            if callable(set_seed):
                set_seed(seed)
        given = {"seed": seed, "options": options}
        return self.env.reset(**{name: given[name] for name in self._takes})

    def _join(self, agent: AgentID) -> None:
        """Notes that an agent is in the episode."""
        self._check_known(agent, "must act")
        self._there[agent] = None
        self._left.discard(agent)

    def _ends(self, **flags: Mapping[AgentID, Any]) -> dict[AgentID, bool]:
        """Checks the flags of a step, and returns the agents that have one (see `_Step.ended`). An
        agent with several flags has the last of them."""
        ended: dict[AgentID, bool] = {}
        for name, of_agents in flags.items():
            for agent, flag in of_agents.items():
                if flag is False:
                    continue
                check_flag(f"{name} of agent {agent!r}", flag)
                if flag:
                    ended[agent] = name != "truncated"
        for agent in ended:
            if agent != _ALL:
                self._check_known(agent, "has ended")
        return ended

    def _check_known(self, agent: AgentID, what: str) -> None:
        if agent not in self._spaces:
            raise APIViolation(
                f"agent {agent!r} {what}, but it is not one of the possible agents "
                f"{_listed(self.possible_agents)}"
            )

    # ---- private --------------------------------------------------------------------------------

    def _own_spaces(self, agent: AgentID) -> tuple[Space[Any], Space[Any]]:
        found = []
        for kind in ("observation", "action"):
            space = self._space_of(kind, agent)
            if not isinstance(space, Space):
                if type(space).__module__.partition(".")[0] == "gym":
                    raise APIViolation(
                        f"agent {agent!r} has an {kind} space of the package gym, {space}; "
                        "allowed: a space of the package gymnasium"
                    )
                raise APIViolation(
                    f"agent {agent!r} must have an {kind} space; got {described_value(space)}"
                )
            found.append(space)
        return found[0], found[1]

    def _dict_space(self, place: int) -> spaces.Dict:
        # `spaces.Dict` would sort the keys of a dict.
        return spaces.Dict([(str(agent), of[place]) for agent, of in self._spaces.items()])

    def _check_same_spaces(self) -> None:
        for agent, (observations, actions) in self._spaces.items():
            for kind, old in (("observation", observations), ("action", actions)):
                new = self._space_of(kind, agent)
                if new is old or new == old:
                    continue
                if kind == "observation" and same_encoding(new, old):
                    continue
                raise APIViolation(
                    f"the {kind} space of agent {agent!r} changed from {old} to {new}"
                )

    def _observation(self, agent: AgentID, observations: Mapping[AgentID, Any], where: str) -> Any:
        if agent not in observations:
            raise APIViolation(f"{where} must return an observation, because the agent acts next")
        observation = self._latest[agent] = observations[agent]
        # A check would take several times as long as this comparison.
        if type(observation) is not np.ndarray or (
            (observation.dtype, observation.shape) != self._plain.get(agent)
        ):
            check_observation(observation, self._spaces[agent][0], where)
        return observation

    def _rewards(self, rewards: Mapping[AgentID, Any]) -> dict[AgentID, float]:
        found = {}
        for agent, reward in rewards.items():
            if agent not in self._spaces:
                self._check_known(agent, "got a reward")
            value = reward if type(reward) is float else self._reward(agent, reward)
            if agent not in self._left:
                found[agent] = value
            elif value != 0:
                raise APIViolation(f"agent {agent!r} got the reward {value}, but it has left")
        return found

    def _reward(self, agent: AgentID, reward: Any) -> float:
        try:
            return reward_of(reward)
        except APIViolation as error:
            raise APIViolation(f"for agent {agent!r}, {error}") from None

    def _note_idle(self, idle: bool) -> None:
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= _MOST_IDLE:
            raise APIViolation(
                f"no agent could act in {_MOST_IDLE} steps in a row, and the episode is not over"
            )


class _DictAgents(AgentsEnv):
    """An environment whose `step` takes the actions of all agents that act, and returns dicts.

    In most steps, the same agents go on. `_continue` recognises these steps with few calls. All
    other steps, and the first step of each episode, run all checks.
    """

    def step(self, actions: dict[AgentID, Any]) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """See `AgentsEnv.step`."""
        result = self.env.step(actions)
        return self._continue(result) or self._take(self._read(result, actions))

    @abstractmethod
    def _read(self, result: Any, actions: dict[AgentID, Any]) -> _Step:
        """Checks a result of the environment's `step`, and reads it."""

    def _same_act(self) -> bool:
        """Returns whether the agents in `acting` act next, if they have the observations."""
        return True

    def _continue(self, result: Any) -> tuple[Any, Any, Any, Any, dict[Any, Any]] | None:
        """Sets `continued`, and returns the result of `step` if it is not None."""
        acting, num = self.acting, len(self.acting)
        if self.continued is None:
            self._kinds = [self._plain.get(agent) for agent in acting]
        self.continued = None
        if not acting or not self._elapsed or self._elapsed + 1 == self.max_steps:
            return None
        try:
            observations, rewards, terminated, truncated, infos = result
            found, values = [*map(observations.get, acting)], [*map(rewards.get, acting)]
            types = {*map(type, values)}
            if not (
                len(observations) == len(rewards) == num
                and countOf(terminated.values(), False) == len(terminated)
                and countOf(truncated.values(), False) == len(truncated)
                and types <= PLAIN_NUMBERS
                and isinstance(infos, dict)
                and self._same_act()
            ):
                return None
            for one, kind in zip(found, self._kinds, strict=True):
                if kind is None or one.dtype != kind[0] or one.shape != kind[1]:
                    return None
        except (AttributeError, TypeError, ValueError):
            return None  # `_read` says what is wrong
        if types != {float}:
            values = [*map(float, values)]
            rewards = dict(zip(acting, values, strict=True))
        self._latest.update(observations)
        self._elapsed += 1
        self._idle = 0
        self.continued = found, values
        return observations, rewards, {}, {}, infos


class _PettingZooAgents(AgentsEnv):
    """An environment of PettingZoo. `env.agents` names the agents that are in the episode."""

    def __init__(self, env: Any) -> None:
        agents = _attribute(env, "possible_agents")
        if agents is None:
            raise APIViolation(
                f"{_name(env)} must name all agents that can appear in possible_agents; there is "
                "no such attribute"
            )
        super().__init__(env, list(agents))

    def _space_of(self, kind: str, agent: AgentID) -> Any:
        return getattr(self.env, f"{kind}_space")(agent)

    def _not_named(self, agent: AgentID) -> APIViolation:
        """The error for an agent that `env.agents` does not name, although it has not ended."""
        return APIViolation(
            f"agent {agent!r} is missing in agents, but it is neither terminated nor truncated"
        )


class _ParallelAgents(_PettingZooAgents, _DictAgents):
    """Adapts PettingZoo's ParallelEnv. The agents in `env.agents` act next."""

    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Mapping[AgentID, Any], dict[Any, Any]]:
        observations, infos = _dicts(self._reset_env(seed, options), "reset()", 2)
        self.acting = list(self._agents())
        if not self.acting:
            raise APIViolation("agents must name at least one agent after reset(); got []")
        return observations, infos

    def _same_act(self) -> bool:
        return [*self.env.agents] == self.acting

    def _read(self, result: Any, actions: dict[AgentID, Any]) -> _Step:
        observations, rewards, terminated, truncated, infos = _dicts(result, "step()", 5)
        ended = self._ends(truncated=truncated, terminated=terminated)
        agents = self._agents()
        for agent in self._there:
            if agent in ended:
                if not ended[agent] and agent not in observations:
                    raise APIViolation(
                        f"step() must return the last observation of agent {agent!r}, which is "
                        "truncated"
                    )
            elif agent not in agents:
                raise self._not_named(agent)
        for agent in observations:
            if agent not in ended and agent not in agents:
                self._check_known(agent, "got an observation")
                raise APIViolation(f"agent {agent!r} got an observation, but it has left")
        for agent in actions:
            if agent not in rewards:
                raise APIViolation(f"step() must return a reward for agent {agent!r}, which acted")
        acting = [agent for agent in agents if agent not in ended]
        return _Step(observations, rewards, ended, acting, not acting, infos)

    def _agents(self) -> dict[AgentID, None]:
        return dict.fromkeys(self.env.agents)


class _TurnAgents(_PettingZooAgents):
    """Adapts PettingZoo's AECEnv. The agent `env.agent_selection` acts next."""

    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Mapping[AgentID, Any], dict[Any, Any]]:
        self._reset_env(seed, options)
        env = self.env
        if not env.agents:
            raise APIViolation("agents must name at least one agent after reset(); got []")
        for agent in env.agents:
            self._join(agent)
        chosen = env.agent_selection
        self._check_known(chosen, "must act")
        self.acting = [chosen]
        return {chosen: env.observe(chosen)}, env.infos

    def step(self, actions: dict[AgentID, Any]) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """See `AgentsEnv.step`."""
        return self._take(self._advance(actions))

    def _advance(self, actions: dict[AgentID, Any]) -> _Step:
        env = self.env
        observations: dict[AgentID, Any] = {}
        rewards: dict[AgentID, float] = {}
        ended: dict[AgentID, bool] = {}
        # An agent that has ended may get rewards until `agents` does not name it any more.
        self._left.difference_update(env.agents)
        env.step(actions[self.acting[0]])
        flagged = self._read(observations, rewards, ended)
        while env.agents and env.agent_selection in flagged:
            dead = env.agent_selection
            env.step(None)
            flagged = self._read(observations, rewards, ended)
            if dead in flagged and dead in env.agents:
                raise APIViolation(
                    f"agent {dead!r} has ended, but agents names it still after step(None)"
                )
        acting: list[AgentID] = []
        if env.agents:
            chosen = env.agent_selection
            self._check_known(chosen, "must act")
            acting, observations[chosen] = [chosen], env.observe(chosen)
        return _Step(observations, rewards, ended, acting, not acting, env.infos)

    def _read(
        self,
        observations: dict[AgentID, Any],
        rewards: dict[AgentID, float],
        ended: dict[AgentID, bool],
    ) -> dict[AgentID, bool]:
        """Adds what one step of the environment changed. Returns the agents that have a flag."""
        env = self.env
        for agent, reward in env.rewards.items():
            value = reward if type(reward) is float else self._reward(agent, reward)
            rewards[agent] = rewards.get(agent, 0.0) + value
        flagged = self._ends(truncated=env.truncations, terminated=env.terminations)
        agents = dict.fromkeys(env.agents)
        for agent in agents:
            if agent not in self._there and agent not in flagged:
                self._join(agent)
        for agent in self._there:
            if agent in ended:
                continue
            if agent in flagged:
                ended[agent] = flagged[agent]
                observations[agent] = env.observe(agent)
            elif agent not in agents:
                raise self._not_named(agent)
        return flagged

    def _last_observation(self, agent: AgentID) -> Any:
        observation = self.env.observe(agent)
        check_observation(observation, self._spaces[agent][0], self._where[agent])
        return observation


class _RLlibAgents(_DictAgents):
    """Adapts RLlib's `MultiAgentEnv`, in its new form and in the form of Ray 0.8 to 2.2. The agents
    that have an observation act next. The first result of `reset` shows which form it is: a pair of
    dicts in the new form, and one dict in the old form.

    An agent may end without an observation, for example while it waits for its turn. Its last
    observation is then the last one that it received.
    """

    def __init__(self, env: Any) -> None:
        agents = _agents_of_rllib(env)
        if not agents:
            # Only the observations show which agents there are.
            result = env.reset()
            observations = result[0] if isinstance(result, tuple) and result else result
            [agents] = _dicts((observations,), "reset()", 1)
        super().__init__(env, agents)
        self._is_new = True

    def _begin(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Mapping[AgentID, Any], dict[Any, Any]]:
        result = self._reset_env(seed, options)
        self._is_new = not isinstance(result, dict)
        if self._is_new:
            observations, infos = _dicts(result, "reset()", 2)
        else:
            observations, infos = result, {}
        self.acting = list(observations)
        return observations, infos

    def _read(self, result: Any, actions: dict[AgentID, Any]) -> _Step:
        if self._is_new:
            observations, rewards, terminated, truncated, infos = _dicts(result, "step()", 5)
            ended = self._ends(truncated=truncated, terminated=terminated)
            names_all = _ALL in terminated or _ALL in truncated
        else:
            observations, rewards, dones, infos = _dicts(result, "step()", 4)
            ended = self._ends(done=dones)
            names_all = _ALL in dones
        over = _ALL in ended
        if over:
            how = ended.pop(_ALL)
            for agent in (*self._there, *observations):
                ended.setdefault(agent, how)
        if not self._is_new:
            for agent in ended:
                info = infos.get(agent)
                if isinstance(info, dict) and info.get("TimeLimit.truncated"):
                    ended[agent] = False
        acting = [agent for agent in observations if agent not in ended]
        if not over and not acting and not names_all:
            # Some environments do not return the key at the end of the episode.
            over = all(agent in ended for agent in self._there)
        for agent in observations:
            self._check_known(agent, "got an observation")
        return _Step(observations, rewards, ended, acting, over, infos)

    def _space_of(self, kind: str, agent: AgentID) -> Any:
        get = _attribute(self.env, f"get_{kind}_space")
        if callable(get):
            try:
                return get(agent)
            except KeyError:
                return None
        for name in (f"{kind}_spaces", f"{kind}_space"):
            found = _attribute(self.env, name)
            of_agents: Any = found.spaces if isinstance(found, spaces.Dict) else found
            if isinstance(of_agents, Mapping) and agent in of_agents:
                return of_agents[agent]
        return found


def agents_env(made: Any) -> AgentsEnv | None:
    """Returns an environment with several agents as an `AgentsEnv`. Returns None for any other
    object.

    Args:
        made: what a user's callable has made: a ParallelEnv or AECEnv of PettingZoo, RLlib's
            `MultiAgentEnv`, or an `AgentsEnv`.

    Raises:
        APIViolation: if the agents or their spaces are missing.
    """
    if isinstance(made, AgentsEnv):
        return made
    adapter = _adapter_of(made)
    return None if adapter is None else adapter(made)


def has_agents(made: Any) -> bool:
    """Returns whether an object is an environment with several agents."""
    return isinstance(made, AgentsEnv) or _adapter_of(made) is not None


def _adapter_of(made: Any) -> Any:
    if inspect.isclass(made) or inspect.ismodule(made) or isinstance(made, VectorEnv):
        return None
    if not _has_methods(made, "reset", "step"):
        return None
    if _has_methods(made, "observation_space", "action_space"):
        return _TurnAgents if _has_methods(made, "observe", "last") else _ParallelAgents
    classes = (*type(made).__mro__, *type(innermost(made)).__mro__)
    if any(one.__name__ == "MultiAgentEnv" for one in classes):
        return _RLlibAgents
    # An environment may be a proxy that has each attribute that it is asked for.
    if callable(inspect.getattr_static(made, "get_agent_ids", None)):
        return _RLlibAgents
    if _found(made, "possible_agents") and isinstance(_found(made, "observation_spaces"), Mapping):
        return _RLlibAgents
    return None


def _has_methods(made: Any, *names: str) -> bool:
    return all(callable(_found(made, name)) for name in names)


def _found(made: Any, name: str) -> Any:
    """Returns an attribute, or None if there is none or if it raises."""
    try:
        return getattr(made, name, None)
    except Exception:  # a user's property may raise anything
        return None


def _agents_of_rllib(env: Any) -> list[AgentID]:
    """Returns the agents that an environment of RLlib names. The order of a set differs from
    process to process, so it is sorted."""
    ids = _attribute(env, "_agent_ids") or ()
    get = _attribute(env, "get_agent_ids")
    if not ids and callable(get):
        ids = get() or ()
    named: list[AgentID] = list(_attribute(env, "possible_agents") or ())
    if named and not (isinstance(ids, set | frozenset) and named == list(ids)):
        return named
    if ids:
        return _sorted(ids) if isinstance(ids, set | frozenset) else list(ids)
    # In some environments, `agents` holds other objects, or the number of agents.
    agents = _attribute(env, "agents")
    if not isinstance(agents, list | tuple | dict | set | frozenset):
        return []
    if not all(isinstance(agent, str | int | np.integer) for agent in agents):
        return []
    return _sorted(agents) if isinstance(agents, set | frozenset) else list(agents)


def _sorted(agents: Iterable[Any]) -> list[AgentID]:
    try:
        return sorted(agents)
    except TypeError:  # agents of several types
        return sorted(agents, key=str)


def _attribute(env: Any, name: str, default: Any = None) -> Any:
    """Returns an attribute of an environment, or of an environment in its Gymnasium wrappers."""
    if isinstance(env, gymnasium.Wrapper):
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default
    return getattr(env, name, default)


def _keywords_of(reset: Any) -> list[str]:
    """Returns which of the keywords `seed` and `options` a method `reset` takes."""
    parameters = inspect.signature(reset).parameters
    has_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return [name for name in ("seed", "options") if has_any or name in parameters]


#: What a method returns, by the number of its dicts.
_RESULTS = {
    1: ["observations"],
    2: ["observations", "infos"],
    4: ["observations", "rewards", "dones", "infos"],
    5: ["observations", "rewards", "terminated", "truncated", "infos"],
}


def _dicts(result: Any, method: str, count: int) -> Any:
    """Checks that a method returned `count` dicts, and returns them."""
    names = _RESULTS[count]
    if not isinstance(result, tuple) or len(result) != count:
        raise APIViolation(
            f"{method} must return {count} dicts ({', '.join(names)}); "
            f"got {described_value(result)}"
        )
    for name, part in zip(names, result, strict=True):
        if type(part) is not dict and not isinstance(part, Mapping):
            raise APIViolation(
                f"{method} must return a dict of agents as {name}; got {described_value(part)}"
            )
    return result


def _listed(agents: Iterable[AgentID]) -> str:
    names = [repr(agent) for agent in agents]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _name(env: Any) -> str:
    return type(innermost(env)).__name__
