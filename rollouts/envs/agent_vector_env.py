"""`AgentVectorEnv`: copies of an environment with several agents, as slots of agents."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import add
from time import monotonic
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from polopt.common.action_mask import MASK_KEY, ActionMask, find_action_mask
from polopt.common.episodes import Episode
from polopt.common.faults import Fault
from polopt.common.plain_data import plain
from polopt.common.progress import PROGRESS
from polopt.rollouts.envs.env_api import ARRAY_SPACES, same_encoding
from polopt.rollouts.envs.env_state import get_states, set_states
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY, FaultTolerantEnv, cast_floats

AgentID = Hashable


class FaultTolerantAgents(FaultTolerantEnv):
    """A `FaultTolerantEnv` for an `AgentsEnv`. Observations, rewards and ends are dicts with one
    entry for each agent. If the environment raises, `step` returns the first observations of the
    next episode, and empty dicts."""

    _api = "the rules of its API"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kinds: dict[AgentID, tuple[Any, Space[Any], ActionMask | None]] = {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environment. See `AgentsEnv.step` and `FaultTolerantEnv`."""
        try:
            observations, rewards, terminated, truncated, infos = self.env.step(action)
            if self.env.continued is None:  # type: ignore[attr-defined]
                observations = self._fit(observations)
        except Exception as error:
            raised = error
        else:
            self._steps += 1
            PROGRESS.at_s[0] = monotonic()  # a call of `PROGRESS.note` takes twice as long
            return observations, rewards, terminated, truncated, infos
        fault, observations = self._replace(raised)
        return observations, {}, {}, {}, {FAULT_KEY: fault}

    def _first_observation(self, result: Any) -> Any:
        return self._fit(result[0])

    def _fit(self, observations: Mapping[AgentID, Any]) -> dict[AgentID, Any]:
        """Converts floats to the dtypes of the spaces, and checks the action masks."""
        fitted = {}
        for agent, observation in observations.items():
            if agent not in self._kinds:
                self._kinds[agent] = self._kind_of(agent)
            dtype, space, mask = self._kinds[agent]
            if mask is not None:
                acts = agent in self.env.acting  # type: ignore[attr-defined]
                mask.check(np.asarray(observation[MASK_KEY])[None], acts)
            if type(observation) is np.ndarray and observation.dtype == dtype:
                fitted[agent] = observation
            else:
                fitted[agent] = cast_floats(observation, space)
        return fitted

    def _kind_of(self, agent: AgentID) -> tuple[Any, Space[Any], ActionMask | None]:
        """The dtype of arrays that need no conversion, the space, and the mask of an agent."""
        space, action_space = self.env.spaces_of(agent)  # type: ignore[attr-defined]
        dtype = space.dtype if isinstance(space, ARRAY_SPACES) else None
        return dtype, space, find_action_mask(space, action_space)


class MappedEpisode(NamedTuple):
    """The episode in which an agent appears, for the choice of its policy.

    Attributes:
        number: how many episodes the vector has begun before, in all its copies.
        env_index: the index of the copy.
        id_, episode_id: the same as `number`. Other libraries use these names.
    """

    number: int
    env_index: int

    @property
    def id_(self) -> int:
        """The same as `number`."""
        return self.number

    @property
    def episode_id(self) -> int:
        """The same as `number`."""
        return self.number


class AgentVectorEnv:
    """Steps K copies of an environment with several agents. The agents have slots in `groups`, one
    group for each policy.

    A transition of a slot begins when its agent acts. It closes when the agent acts again or ends.
    Its reward is the sum of the agent's rewards in between. In an environment in which all agents
    act in each step, every transition takes one step. In a turn-based environment, it takes as
    many steps as there are turns in between. Rewards before an agent's first action belong to no
    transition.

    Args:
        guards: functions that make the K `FaultTolerantAgents`.

    Attributes:
        envs: the K `FaultTolerantAgents`.
        groups: the slots of each policy. `divide` makes them.
        steps: an object whose functions `start`, `step` and `end` are called before the first step
            of each episode, after each step of a copy, and at the end of each episode, before the
            reset. See `EpisodeSteps`. None means that no function is called.
        rng: the generator from which a user's mapping of agents to policies draws.
        data: the `data` of the current episode of each copy.
        episodes: the episodes that have ended. The sampler takes them out of this list.
        num_steps: the number of environment steps so far. A step in which a copy raised does not
            count.
    """

    def __init__(self, guards: Sequence[Callable[[], FaultTolerantAgents]]) -> None:
        self.envs = [make() for make in guards]
        self.groups: list[SlotGroup] = []
        self.rng = np.random.default_rng(0)
        self.episodes: list[Episode] = []
        self.steps: Any = None
        self.data: list[dict[str, Any]] = [{} for _ in self.envs]
        self.num_steps = 0
        self._choose: Callable[[AgentID, MappedEpisode], int] = lambda agent, episode: 0
        self._begun = 0  # episodes
        self._numbers = [0] * len(self.envs)
        # For each copy: the slot of each agent of the episode, and the agents that act next.
        self._slots: list[dict[AgentID, tuple[SlotGroup, int]]] = [{} for _ in self.envs]
        self._acting: list[list[AgentID]] = [[] for _ in self.envs]
        self._lengths = [0] * len(self.envs)
        self._first: list[Mapping[AgentID, Any]] = [{} for _ in self.envs]  # observations
        self._truncated = [False] * len(self.envs)
        # What `_order_of_slots` returns for the agents that act, or None if not known.
        self._order: list[list[int]] | None = None

    def divide(
        self,
        members: Mapping[str, Sequence[AgentID]],
        choose: Callable[[AgentID, MappedEpisode], int] = lambda agent, episode: 0,
    ) -> None:
        """Makes `groups`.

        Args:
            members: for each policy, the agents that may have a slot in its group.
            choose: a function that returns the index of the group of an agent. It is called when
                the agent appears in an episode, and receives this episode.

        Raises:
            ValueError: the agents of a group have different spaces.
        """
        first: Any = self.envs[0].env
        self.groups = [
            SlotGroup(self, name, agents, shared_spaces(first, agents), first.render_mode)
            for name, agents in members.items()
        ]
        self._choose = choose

    def reset(self, copies: Iterable[int], seeds: Sequence[int] | None) -> None:
        """Begins new episodes in some copies. `seeds` has one seed for each of the K copies."""
        for group in self.groups:
            group.begin_step()
        for k in copies:
            self._reset_copy(k, None if seeds is None else seeds[k])
        for group in self.groups:
            group.end_step()

    def step(self, actions: Sequence[Any]) -> None:
        """Steps each copy, and resets the copies whose episodes end. Each group then has the
        results.

        Args:
            actions: for each group, the actions `[N, ...]` of its slots. Only the actions of the
                slots in `SlotGroup.acts` are used.
        """
        for group, of_group in zip(self.groups, actions, strict=True):
            group.begin_step()
            group.actions = of_group
        # The copies in which the same agents go on, with the observations and rewards.
        going: list[tuple[int, dict[AgentID, Any], dict[AgentID, float]]] = []
        rows: list[Any] = []
        values: list[float] = []
        for k, env in enumerate(self.envs):
            if self.steps is not None and self.steps.start is not None and not self._lengths[k]:
                data, first = self.data[k], self._first[k]
                self.steps.start(Episode(k, 0.0, 0, False, {}, data, False, observation=first))
            chosen, slots = {}, self._slots[k]
            for agent in self._acting[k]:
                group, slot = slots[agent]
                chosen[agent] = group.actions[slot]
            observations, rewards, terminated, truncated, info = env.step(chosen)
            adapter: Any = env.env
            if FAULT_KEY in info:
                self._note_fault(k, info[FAULT_KEY])
                self._begin_episode(k, observations)
                continue
            if adapter.continued is not None and self.steps is None:
                going.append((k, observations, rewards))
                rows += adapter.continued[0]
                values += adapter.continued[1]
                continue
            self._take_step(k, observations, rewards, terminated, truncated)
            over: bool = adapter.over
            if over or self.steps is not None:
                self._note_episode(k, over, info, observations, chosen, sum(rewards.values()))
            if over:
                self._reset_copy(k)
            else:
                self._note_acting(k, observations)
        if len(going) == len(self.envs) and self._take_whole_step(rows, values):
            return
        for k, observations, rewards in going:
            self._take_step(k, observations, rewards, {}, {})
            self._note_acting(k, observations)
        for group in self.groups:
            group.end_step()

    def continue_from(self, before: AgentVectorEnv) -> None:
        """Takes over from a vector that this one replaces: what the sampler has not taken yet, and
        the generator."""
        self.rng, self.steps, self._begun = before.rng, before.steps, before._begun
        self.episodes, self.num_steps = before.episodes, before.num_steps

    def render(self) -> tuple[Any, ...]:
        """Returns what each copy renders."""
        return tuple(env.render() for env in self.envs)

    def close(self) -> None:
        """Closes the environments."""
        for env in self.envs:
            env.close()

    # ---- state ----------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any] | None:
        """Returns a copy of the state of all copies and slots. Returns None if the environments
        cannot return their state. See `polopt.rollouts.envs.env_state`."""
        states = get_states(self.envs)
        if states is None:
            return None
        copies: list[Any] = [env.env for env in self.envs]
        found: dict[str, Any] = plain(
            {
                "envs": states,
                "agents": {group.name: group.agents for group in self.groups},
                "episodes": [env.get_episode() for env in copies],
                "groups": {group.name: group.get_state() for group in self.groups},
                "policies": [
                    {agent: group.name for agent, (group, _) in slots.items()}
                    for slots in self._slots
                ],
                "returns": [
                    {agent: group.returns[slot] for agent, (group, slot) in slots.items()}
                    for slots in self._slots
                ],
                "lengths": self._lengths,
                "truncated": self._truncated,
                "numbers": self._numbers,
                "begun": self._begun,
                "rng": self.rng.bit_generator.state,
            }
        )
        return found

    def set_state(self, state: Mapping[str, Any]) -> bool:
        """Restores a state that `get_state` returned. Returns False if the environments cannot
        restore it, or if their number, the agents or the policies have changed. The caller must
        then begin new episodes in all copies."""
        of_groups = {group.name: group.agents for group in self.groups}
        fits = len(state["envs"]) == len(self.envs) and state["agents"] == of_groups
        if not fits or not set_states(self.envs, state["envs"]):
            return False
        named = {group.name: group for group in self.groups}
        for group in self.groups:
            group.set_state(state["groups"][group.name])
        for k, env in enumerate(self.envs):
            adapter: Any = env.env
            adapter.set_episode(state["episodes"][k])
            self._acting[k] = adapter.acting
            self._slots[k] = {
                agent: (named[name], named[name].slot_of(k, agent))
                for agent, name in state["policies"][k].items()
            }
            for agent, value in state["returns"][k].items():
                group, slot = self._slots[k][agent]
                group.returns[slot] = value
        self._order = None
        self.data = [{} for _ in self.envs]
        self._lengths, self._truncated = list(state["lengths"]), list(state["truncated"])
        self._numbers, self._begun = list(state["numbers"]), state["begun"]
        self.rng.bit_generator.state = state["rng"]
        return True

    # ---- one step -------------------------------------------------------------------------------

    def _reset_copy(self, k: int, seed: int | None = None) -> None:
        observations, info = self.envs[k].reset(seed=seed)
        if FAULT_KEY in info:
            self._note_fault(k, info[FAULT_KEY])
        self._begin_episode(k, observations)

    def _note_fault(self, k: int, fault: Fault) -> None:
        first, *others = self.groups
        first.note_fault(k, fault)
        for group in others:  # the first group counts the fault
            group.note_fault(k, dataclasses.replace(fault, count=0))

    def _begin_episode(self, k: int, observations: Mapping[AgentID, Any]) -> None:
        for group in self.groups:
            group.begin_episode(k)
        self._slots[k], self.data[k] = {}, {}
        self._lengths[k], self._truncated[k], self._first[k] = 0, False, observations
        self._numbers[k], self._begun = self._begun, self._begun + 1
        self._note_acting(k, observations)

    def _note_acting(self, k: int, observations: Mapping[AgentID, Any]) -> None:
        self._order = None
        acting = self._acting[k] = self.envs[k].env.acting  # type: ignore[attr-defined]
        slots = self._slots[k]
        for group in self.groups:
            group.nobody_acts(k)
        for agent in acting:
            group, slot = slots.get(agent) or self._slot_of(k, agent)
            group.acts_next(slot, observations[agent])

    def _slot_of(self, k: int, agent: AgentID) -> tuple[SlotGroup, int]:
        found = self._slots[k].get(agent)
        if found is None:
            group = self.groups[self._choose(agent, MappedEpisode(self._numbers[k], k))]
            found = self._slots[k][agent] = group, group.slot_of(k, agent)
            group.returns[found[1]] = 0.0
        return found

    def _take_whole_step(self, observations: list[Any], rewards: list[float]) -> bool:
        """Takes a step of all copies, in which the same agents went on. Returns False, and does
        nothing, if a slot has no agent that acts.

        Args:
            observations: the observations of all agents that act, copy by copy.
            rewards: their rewards, in the same order.
        """
        if self._order is None:
            self._order = self._order_of_slots()
        if not self._order:
            return False
        for group, order in zip(self.groups, self._order, strict=True):
            group.all_act_again([observations[i] for i in order], [rewards[i] for i in order])
        self._lengths = [length + 1 for length in self._lengths]
        self.num_steps += len(self.envs)
        return True

    def _order_of_slots(self) -> list[list[int]]:
        """Returns for each group the places of its N slots among all agents that act, copy by
        copy. Returns [] if a slot has no agent that acts."""
        acting = [(k, agent) for k, agents in enumerate(self._acting) for agent in agents]
        if len(acting) != sum(group.num_envs for group in self.groups):
            return []
        places = {self._slots[k][agent]: i for i, (k, agent) in enumerate(acting)}
        return [[places[group, slot] for slot in range(group.num_envs)] for group in self.groups]

    def _take_step(
        self,
        k: int,
        observations: Mapping[AgentID, Any],
        rewards: Mapping[AgentID, float],
        terminated: Mapping[AgentID, bool],
        truncated: Mapping[AgentID, bool],
    ) -> None:
        """Takes the results of a step of copy `k`. `AgentsEnv.step` describes them."""
        self._lengths[k] += 1
        self.num_steps += 1
        slots = self._slots[k]
        for agent in self._acting[k]:
            group, slot = slots[agent]
            group.begin_transition(slot)
        for agent, reward in rewards.items():
            group, slot = slots.get(agent) or self._slot_of(k, agent)
            group.sums[slot] += reward
            group.returns[slot] += reward
        if not terminated and not truncated:
            return
        for agent in {**terminated, **truncated}:
            over, cut = bool(terminated.get(agent)), bool(truncated.get(agent))
            self._truncated[k] |= cut
            if over or cut:
                group, slot = self._slot_of(k, agent)
                group.end(slot, observations[agent], over, cut)

    def _note_episode(
        self,
        k: int,
        over: bool,
        info: dict[Any, Any],
        observations: Mapping[AgentID, Any],
        actions: Mapping[AgentID, Any],
        reward: float,
    ) -> None:
        """Describes the episode of copy `k` so far to `steps`, and to `episodes` if it has ended.
        The info of the episode has the infos of the agents."""
        steps, slots = self.steps, self._slots[k].items()
        returns = {agent: group.returns[slot] for agent, (group, slot) in slots}
        is_terminal = over and not self._truncated[k]
        episode = Episode(
            k,
            sum(returns.values()),
            self._lengths[k],
            is_terminal,
            info,
            self.data[k],
            over,
            agent_returns=returns,
            agent_policies={agent: group.name for agent, (group, _) in slots},
            observation=observations,
            action=actions,
            reward=reward,
        )
        if steps is not None and steps.step is not None:
            steps.step(episode)
        if over and steps is not None and steps.end is not None:
            episode = episode._replace(metrics=steps.end(episode))
        if over:
            self.episodes.append(episode)


class SlotGroup(VectorEnv[Any, Any, Any]):
    """The slots of the agents of one policy, as a Gymnasium vector in same-step mode.

    Slot `k * A + a` is the place of agent `a` of A agents in copy `k`. A slot may have no agent at
    times. A row of a step has a meaning only if the transition of its slot closed in this step (see
    `AgentVectorEnv`). The observation of a slot stays the same until its transition closes. A slot
    without an agent holds the last observation of this slot, or any observation of its space.

    Args:
        vector: the environments.
        name: the name of the policy.
        agents: the A agents.
        of_agents: the observation space and the action space of each agent.
        render_mode: the render mode of the environments.

    Attributes:
        vector, name, agents: the arguments.
        acts: `[N]` bool, True for the slots whose agents act in the next step.
        all_act: whether all slots have agents that act in the next step.
        has_row: `[N]` bool, True for the slots whose transitions closed in the last step.
        open: `[N]` bool, True for the slots whose agents have acted, and whose transitions have not
            closed.
        sums: the rewards of the transitions of the N slots that have begun.
        returns: the returns so far of the agents of the N slots in their episodes.
        actions: `[N, ...]`, the actions of the current step.

    Within a step, lists hold what belongs to single slots, because to read and to write an element
    of an array takes several times as long. `end_step` makes the arrays.
    """

    def __init__(
        self,
        vector: AgentVectorEnv,
        name: str,
        agents: Sequence[AgentID],
        of_agents: tuple[Space[Any], Space[Any]],
        render_mode: str | None,
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.vector = vector
        self.name = name
        self.agents = list(agents)
        self.num_envs = len(vector.envs) * len(self.agents)
        self.single_observation_space, self.single_action_space = of_agents
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = render_mode
        self.actions: Any = None
        self._nowhere: Any = np.zeros(self.num_envs, dtype=bool)
        self.sums, self.returns = [0.0] * self.num_envs, [0.0] * self.num_envs
        self._acts, self._open = self._no(), self._no()
        self.begin_step()
        self.end_step()
        self._infos: dict[str, Any] = {}
        self._observations = _Observations(self.single_observation_space, self.num_envs)
        self._places = {agent: place for place, agent in enumerate(self.agents)}

    # ---- Gymnasium's interface ------------------------------------------------------------------

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins new episodes in all copies, or in the copies that have a slot in
        `options["reset_mask"]` `[N]`. Concerns all groups of the environments.

        Args:
            seed: a list with one seed for each copy, or None.
            options: see above.
        """
        mask = (options or {}).get("reset_mask")
        copies: Iterable[int] = range(len(self.vector.envs))
        if mask is not None:
            copies = np.unique(np.flatnonzero(mask) // len(self.agents)).tolist()
        self.vector.reset(copies, seed)
        return self.first_observations()

    def first_observations(self) -> tuple[Any, dict[str, Any]]:
        """Returns the observations `[N, ...]` and the infos of the last reset."""
        return self._observations.batch(), self._infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environments, which have no other group. The actions `[N, ...]` of slots that
        are not in `acts` have no effect."""
        self.vector.step([actions])
        return self.results()

    def results(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns the results of the last step: observations `[N, ...]`, rewards `[N]`,
        `terminated` `[N]`, `truncated` `[N]`, and infos. The next step overwrites the
        observations."""
        columns = map(np.asarray, (self._rewards, self._terminated, self._truncated))
        return self._observations.batch(), *columns, self._infos

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the environments."""
        self.vector.close()

    def render(self) -> tuple[Any, ...]:
        """Returns what each copy renders."""
        return self.vector.render()

    def whole_copies(self, slots: np.ndarray) -> np.ndarray:
        """Returns `[N]` bool: all slots of the copies that have a slot in `slots` `[N]` bool."""
        of_copies = slots.reshape(len(self.vector.envs), -1).any(axis=1)
        return np.repeat(of_copies, len(self.agents))

    # ---- for `AgentVectorEnv` -------------------------------------------------------------------

    def slot_of(self, k: int, agent: AgentID) -> int:
        """Returns the slot of an agent of copy `k`."""
        return k * len(self.agents) + self._places[agent]

    def _range_of(self, k: int) -> range:
        return range(k * len(self.agents), (k + 1) * len(self.agents))

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the slots."""
        return {
            "acts": self._acts,
            "open": self._open,
            "sums": self.sums,
            "observations": self._observations.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self._acts, self._open = list(state["acts"]), list(state["open"])
        self.sums = list(state["sums"])
        self._observations.set_state(state["observations"])
        self.end_step()

    def begin_step(self) -> None:
        """Empties the results of the step before."""
        self._has_row = self._no()
        self._terminated: Any = self._no()
        self._truncated: Any = self._no()
        self._rewards = [0.0] * self.num_envs
        self._infos = {}

    def _no(self) -> list[bool]:
        return [False] * self.num_envs

    def end_step(self) -> None:
        """Makes the arrays that describe the slots after a step."""
        self.acts, self.open = np.array(self._acts), np.array(self._open)
        self.all_act = all(self._acts)
        self.has_row = np.array(self._has_row)

    def begin_episode(self, k: int) -> None:
        """Empties the slots of copy `k`. What has closed in this step stays."""
        for slot in self._range_of(k):
            self._open[slot] = False

    def begin_transition(self, slot: int) -> None:
        """The agent of a slot has acted. Its transition begins."""
        self._open[slot], self.sums[slot] = True, 0.0

    def all_act_again(self, observations: list[Any], rewards: list[float]) -> None:
        """The agents of all N slots have acted, and act next. Each slot has a transition of one
        step. This is the same as `begin_transition`, `acts_next` and `end_step`, and faster.

        Args:
            observations: the N observations.
            rewards: the N rewards.
        """
        self._rewards, self.returns = rewards, list(map(add, self.returns, rewards))
        self._terminated = self._truncated = self._nowhere
        self._observations.put_all(observations)
        self.has_row = self.acts

    def nobody_acts(self, k: int) -> None:
        """No agent of copy `k` acts next, except those of later calls of `acts_next`."""
        for slot in self._range_of(k):
            self._acts[slot] = False

    def acts_next(self, slot: int, observation: Any) -> None:
        """The agent of a slot acts next. This closes its transition if one has begun."""
        if self._open[slot]:  # as in `_close`. A call takes longer
            self._open[slot], self._has_row[slot] = False, True
            self._rewards[slot] = self.sums[slot]
        self._acts[slot] = True
        self._observations.put(slot, observation)

    def end(self, slot: int, last: Any, terminated: bool, truncated: bool) -> None:
        """The agent of a slot has ended, with its last observation."""
        if self._open[slot]:
            self._close(slot)
            self._terminated[slot], self._truncated[slot] = terminated, truncated
            self._note("final_obs", [slot], last)

    def note_fault(self, k: int, fault: Any) -> None:
        """Copy `k` has raised. None of its transitions closes in this step."""
        self._note(FAULT_KEY, self._range_of(k), fault)

    def _close(self, slot: int) -> None:
        self._open[slot], self._has_row[slot] = False, True
        self._rewards[slot] = self.sums[slot]

    def _note(self, key: str, slots: Iterable[int], value: Any) -> None:
        if key not in self._infos:
            self._infos[key] = np.full(self.num_envs, None, dtype=object)
        for slot in slots:
            self._infos[key][slot] = value


def num_copies(env: VectorEnv[Any, Any, Any]) -> int:
    """Returns the number of environments of a vector. A `SlotGroup` has more slots than this."""
    return len(env.vector.envs) if isinstance(env, SlotGroup) else env.num_envs


class _Observations:
    """The current observations of all slots.

    Args:
        space: the space of one observation.
        num: the number N of slots.

    Attributes:
        put: a function `(slot, observation)` that sets the observation of a slot.
    """

    def __init__(self, space: Space[Any], num: int) -> None:
        self._space = space
        self._is_array = isinstance(space, ARRAY_SPACES)
        self._array = cast("Any", create_empty_array(space, num))
        # A slot without an agent also needs an observation of the space, with a valid action mask.
        own = copy.deepcopy(space)
        own.seed(0)
        first: Any = own.sample()
        if isinstance(space, spaces.Dict) and MASK_KEY in first:
            first[MASK_KEY] = np.ones_like(first[MASK_KEY])
        self._items: list[Any] = [first] * num
        if self._is_array:
            self._array[:] = first
        self._slots = range(num)
        # For arrays: all rows one after another, and the observations that `batch` will copy.
        shape = space.shape or ()
        self._flat: Any = self._array.reshape(-1, *shape[1:]) if shape else None
        self._new: dict[int, Any] = {}
        self.put = (self._new if self._is_array else self._items).__setitem__

    def get_state(self) -> Any:
        """Returns the observations of all slots."""
        return self.batch() if self._is_array else self._items

    def set_state(self, observations: Any) -> None:
        """Restores observations that `get_state` returned."""
        self._new.clear()
        if self._is_array:
            self._array[:] = observations
        else:
            self._items[:] = observations

    def put_all(self, observations: list[Any]) -> None:
        """Sets the observations of all slots, which are arrays. This is much faster than `put`."""
        np.concatenate(observations, out=self._flat)
        self._new.clear()

    def batch(self) -> Any:
        """The observations `[N, ...]`. The next call overwrites them."""
        new = self._new
        if not self._is_array:
            self._array = concatenate(self._space, self._items, self._array)
        elif self._flat is not None and len(new) == len(self._slots):
            self.put_all([new[slot] for slot in self._slots])
        else:
            for slot, observation in new.items():
                self._array[slot] = observation
        new.clear()
        return self._array


def shared_spaces(env: Any, agents: Sequence[AgentID]) -> tuple[Space[Any], Space[Any]]:
    """Returns the observation space and the action space that some agents of an `AgentsEnv` share.

    Raises:
        ValueError: the spaces of two agents differ.
    """
    first, *others = agents
    found: tuple[Space[Any], Space[Any]] = env.spaces_of(first)
    for agent in others:
        own = env.spaces_of(agent)
        if not (same_encoding(own[0], found[0]) and own[1] == found[1]):
            raise ValueError(
                f"agents {first!r} and {agent!r} have different spaces: {found} and {own}"
            )
    return found
