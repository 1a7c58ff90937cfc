"""`GroupSampler`: samples for several policies in environments with several agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polopt.common.episodes import Episode, EpisodeStats
from polopt.common.faults import one_per_kind
from polopt.common.multi_agent_batch import MomentsByPolicy, MultiAgentBatch
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.agent_vector_env import AgentVectorEnv, SlotGroup
from polopt.rollouts.envs.env_errors import close_env
from polopt.rollouts.envs.env_state import get_env_statistics, set_env_statistics
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY
from polopt.rollouts.sampling.running_episodes import EpisodeSteps
from polopt.rollouts.sampling.sampler import Exploration, VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.seeds import Seeds


class GroupSampler:
    """Steps environments with several agents, and samples fragments for each of several policies.

    Each policy has a `VectorSampler` for the slots of its agents. This class lets them choose their
    actions, steps the environments with the actions of all agents, and gives each of them its
    results. If the process of an environment dies, all environments are made again, as in
    `VectorSampler`.

    Args:
        vector: the environments. The sampler closes them.
        policy: the policies. Their order is the order of `vector.groups`.
        fragment_length: the number of steps in one fragment.
        seeds: the seeds of the environments and of the action noise.
        faults: see `VectorSampler`.

    Attributes:
        samplers: the sampler of each policy, by name.
        ended, num_steps, steps, stop_after, fragment_length, faults: see `VectorSampler`.
    """

    def __init__(
        self,
        vector: AgentVectorEnv,
        policy: PolicyGroup,
        fragment_length: int,
        seeds: Seeds,
        faults: SamplerFaults,
    ) -> None:
        self.vector = vector
        self.fragment_length = fragment_length
        self.stop_after: Callable[[], int | None] = lambda: None
        self.ended: list[Episode] | None = None
        self.steps: EpisodeSteps | None = None
        self.num_steps = 0
        self.faults = faults
        self._policy = policy
        self.samplers = {
            name: VectorSampler(group, one, fragment_length, _seeds_of(seeds, place), in_group=True)
            for place, (group, (name, one)) in enumerate(
                zip(vector.groups, policy.policies.items(), strict=True)
            )
        }
        for one in self.samplers.values():
            one.stop_after = lambda: self.stop_after()
        self.restart(seeds)

    @property
    def policy(self) -> PolicyGroup:
        """The policies that act."""
        return self._policy

    @policy.setter
    def policy(self, policy: PolicyGroup) -> None:
        self._policy = policy
        for name, one in self.samplers.items():
            one.policy = policy.policies[name]

    @property
    def env(self) -> SlotGroup:
        """The slots of the first policy."""
        return self.vector.groups[0]

    def restart(self, seeds: Seeds) -> None:
        """Starts new episodes with new seeds. Discards the current episodes."""
        self._seeds = seeds
        for place, one in enumerate(self.samplers.values()):
            one.reseed(_seeds_of(seeds, place))
        self.vector.rng = np.random.default_rng(_seeds_of(seeds, len(self.samplers)).actions)
        self.reset(seeds.envs)

    def reset(self, seeds: list[int] | None = None) -> None:
        """Starts new episodes in all environments. See `VectorSampler.reset`."""
        try:
            self.vector.reset(range(len(self.vector.envs)), seeds)
        except (EOFError, ConnectionError) as error:
            for sampler, group, raw, infos in self._rebuild(error):
                sampler.env = group
                sampler.begin_episodes(raw, infos)
        else:
            for one, group in zip(self.samplers.values(), self.vector.groups, strict=True):
                one.begin_episodes(*group.first_observations())
        self.leave_gap()

    def _rebuild(
        self, error: Exception, step: int = 0
    ) -> list[tuple[VectorSampler, Any, Any, Any]]:
        """Replaces the environments after the death of one of their processes. Returns, for each
        policy, its sampler, its slots, their first observations, and infos that report a lost
        step."""
        env, _, infos = self.faults.rebuild(self.env, error, self._seeds, step)
        assert isinstance(env, SlotGroup)
        self.vector, found = env.vector, []
        fault = infos[FAULT_KEY][0]
        for one, group in zip(self.samplers.values(), self.vector.groups, strict=True):
            raw, infos = group.first_observations()
            lost = np.full(group.num_envs, fault, dtype=object)
            found.append((one, group, raw, {**infos, FAULT_KEY: lost}))
            fault = dataclasses.replace(fault, count=0)  # the first policy counts it
        return found

    def sample(
        self,
        explore: bool | Exploration = True,
        steps: int | None = None,
        uniform: bool = False,
    ) -> MultiAgentBatch:
        """Samples one fragment for each policy. `VectorSampler.sample` describes the arguments and
        the errors."""
        samplers = list(self.samplers.values())
        self.vector.steps = self.steps
        for one in samplers:
            one.begin_fragment(explore, steps, uniform)
        while samplers[0].goes_on():
            actions = [one.act() for one in samplers]
            try:
                self.vector.step(actions)
            except (EOFError, ConnectionError) as error:  # the process of an environment has died
                for one, *begun in self._rebuild(error, samplers[0].num_steps):
                    one.lose_step(*begun)
                continue
            for one, group in zip(samplers, self.vector.groups, strict=True):
                one.take_results(group.results())
        self.num_steps = samplers[0].num_steps
        self.faults.step += self.num_steps
        version = self._policy.version
        parts = {name: one.end_fragment() for name, one in self.samplers.items()}
        ended, self.vector.episodes = self.vector.episodes, []
        taken, self.vector.num_steps = self.vector.num_steps, 0
        moments = {name: part.moments for name, part in parts.items() if part.moments is not None}
        for part in parts.values():
            part.version = version
        batch = MultiAgentBatch(
            parts,
            taken,
            version=version,
            episodes=EpisodeStats.of(ended),
            faults=one_per_kind(one for part in parts.values() for one in part.faults.values()),
            moments=MomentsByPolicy(moments) if moments else None,
        )
        if self.ended is not None:
            self.ended += ended
        return batch

    def reset_some(self, envs: np.ndarray) -> None:
        """Starts new episodes in all environments. `envs` has no effect."""
        self.reset()

    def leave_gap(self) -> None:
        """See `VectorSampler.leave_gap`."""
        for one in self.samplers.values():
            one.leave_gap()

    def get_state(self) -> dict[str, Any] | None:
        """See `VectorSampler.get_state`."""
        env_state = self.vector.get_state()
        if env_state is None:
            return None
        own = {name: one.get_own_state() for name, one in self.samplers.items()}
        return {"env": env_state, "samplers": own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned. Begins new episodes if the environments
        cannot restore it, or if their number, the agents or the policies have changed."""
        if not self.vector.set_state(state["env"]):
            self.reset()
            return
        for name, one in self.samplers.items():
            one.set_own_state(state["samplers"][name])

    def get_statistics(self) -> dict[str, Any]:
        """See `VectorSampler.get_statistics`."""
        return get_env_statistics(self.env)

    def set_statistics(self, saved: dict[str, Any]) -> None:
        """See `VectorSampler.set_statistics`."""
        set_env_statistics(self.env, saved)

    def close(self) -> None:
        """See `VectorSampler.close`."""
        close_env(self.env, self.faults.place)


def _seeds_of(seeds: Seeds, place: int) -> Seeds:
    """The seeds of the policy at this place. The first policy has the seeds of a single policy."""
    if place == 0:
        return seeds
    actions = seeds.actions
    key = (*actions.spawn_key, place)
    return seeds._replace(actions=np.random.SeedSequence(actions.entropy, spawn_key=key))
