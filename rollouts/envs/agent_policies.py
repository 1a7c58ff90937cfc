"""`AgentPolicies`: which policy acts for which agent."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from polopt.common.config import ConfigError, shown
from polopt.common.registry import load_path
from polopt.rollouts.envs.agent_vector_env import AgentID, MappedEpisode
from polopt.rollouts.envs.env_api import space_that_differs
from polopt.rollouts.envs.env_errors import EnvironmentAPIError

#: Arguments of a mapping function that may differ from call to call. With one of them, an agent may
#: get another policy in each episode.
_CHANGING = {"rng", "episode", "worker"}


@dataclass(frozen=True)
class AgentPolicies:
    """The policies of a run with several agents.

    Attributes:
        members: for each policy, the agents for which it may act.
        mapping: see `RolloutConfig.policy_mapping_fn`. None means that the first policy of
            `members` that has the agent acts for it.
        are_named: whether the user has named the policies.
    """

    members: Mapping[str, Sequence[AgentID]]
    mapping: Any = None
    are_named: bool = True

    @property
    def is_group(self) -> bool:
        """Whether the run has several policies, or a policy with a name."""
        return self.are_named or len(self.members) > 1

    def chooser(
        self, rng: Callable[[], np.random.Generator], worker_index: int
    ) -> Callable[[AgentID, MappedEpisode], int]:
        """Returns a function that returns the place in `members` of the policy of an agent.

        Args:
            rng: returns a generator that the mapping may use. Reruns then get the same numbers.
            worker_index: the index of the worker, for the mapping.

        The function raises `EnvironmentAPIError` if the mapping returns a name that it may not
        return for the agent. The run then ends, because another try would not help.
        """
        names = list(self.members)
        call = caller_of(self.mapping)

        def choose(agent: AgentID, episode: MappedEpisode) -> int:
            if call is None:
                return next(i for i, name in enumerate(names) if agent in self.members[name])
            name = call(agent, {"rng": rng(), "episode": episode, "worker": worker_index})
            if name not in self.members or agent not in self.members[name]:
                allowed = [one for one in names if agent in self.members[one]]
                raise EnvironmentAPIError(
                    f"policy_mapping_fn: got {shown(name)} for agent {agent!r}. Allowed: "
                    f"{_listed(allowed)}{_may_change(self.mapping)}"
                )
            return names.index(name)

        return choose


def caller_of(mapping: Any) -> Callable[[AgentID, Mapping[str, Any]], Any] | None:
    """Returns a function `(agent, further arguments) -> name of a policy`. Returns None for None.

    Args:
        mapping: see `RolloutConfig.policy_mapping_fn`.

    Raises:
        ConfigError: the mapping is of another type, or its function cannot be imported.
    """
    if mapping is None:
        return None
    if isinstance(mapping, Mapping):
        patterns = dict(mapping)
        return lambda agent, _: _first_match(patterns, agent)
    function = _loaded(mapping)
    if not callable(function):
        raise ConfigError(
            f"key 'policy_mapping_fn': got {shown(mapping)}. Allowed: a function, "
            "'module:function', or a dict of patterns such as {'adversary_*': 'hunters'}"
        )
    accepted = _accepted(function)

    def call(agent: AgentID, further: Mapping[str, Any]) -> Any:
        return function(agent, **{key: further[key] for key in accepted})

    return call


def _accepted(function: Callable[..., Any]) -> list[str]:
    """The names of the further arguments that a mapping function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
    return [one.name for one in parameters if one.name in _CHANGING]


def _changes(mapping: Any) -> bool:
    """Whether an agent may get another policy in each episode."""
    return not isinstance(mapping, Mapping) and bool(_accepted(_loaded(mapping)))


def _may_change(mapping: Any) -> str:
    """The end of an error message, for a mapping function that polopt takes to be constant."""
    if isinstance(mapping, Mapping) or mapping is None or _changes(mapping):
        return ""
    return (
        ". If the mapping changes from episode to episode, it must take the argument 'rng', "
        "'episode' or 'worker', and should draw from 'rng', such as (agent_id, rng)"
    )


def _first_match(patterns: Mapping[str, str], agent: AgentID) -> str:
    for pattern, name in patterns.items():
        if fnmatch.fnmatchcase(str(agent), pattern):
            return name
    raise ConfigError(
        f"key 'policy_mapping_fn': no pattern fits agent {agent!r}. The patterns are "
        f"{_listed(patterns)}; add '*' for all other agents"
    )


def resolve_policies(
    spaces_of: Mapping[AgentID, tuple[Space[Any], Space[Any]]],
    names: Sequence[str],
    mapping: Any,
) -> AgentPolicies:
    """Decides which agents each policy may act for.

    Without names, there is one policy for all agents with the same spaces.

    Args:
        spaces_of: the observation space and the action space of each possible agent.
        names: the names of the policies. Empty means that this function chooses them.
        mapping: see `RolloutConfig.policy_mapping_fn`.

    Raises:
        ConfigError: the mapping names an unknown policy, or a policy would act for agents with
            different spaces.
    """
    if not names:
        if mapping is not None:
            raise ConfigError(
                "key 'policy_mapping_fn': got a mapping without policies. Give 'policies', such as "
                "{'hunters': {}, 'prey': {}}"
            )
        return AgentPolicies(_by_spaces(spaces_of), are_named=False)
    if mapping is None:
        if len(names) > 1:
            raise ConfigError(
                f"key 'policy_mapping_fn': got None with {len(names)} policies. Allowed: a "
                "function, 'module:function', or a dict of patterns such as "
                f"{{'agent_*': {names[0]!r}}}"
            )
        mapping = {"*": names[0]}
    call = caller_of(mapping)
    assert call is not None
    changes = _changes(mapping)
    members: dict[str, list[AgentID]] = {name: [] for name in names}
    further = {
        "rng": np.random.default_rng(0),
        "episode": MappedEpisode(0, 0),
        "worker": 0,
    }
    for agent in spaces_of:
        name = call(agent, further)
        if name not in members:
            raise ConfigError(
                f"key 'policy_mapping_fn': got {shown(name)} for agent {agent!r}. Allowed: "
                f"{_listed(names)}, the names in 'policies'"
            )
        members[name].append(agent)
    if changes:
        members = {name: _fitting(spaces_of, own) for name, own in members.items()}
    for name, agents in members.items():
        for agent in agents[1:]:
            if which := space_that_differs(spaces_of[agent], spaces_of[agents[0]]):
                raise ConfigError(
                    f"policy {name!r} would act for agents {agents[0]!r} and {agent!r}, whose "
                    f"{which} spaces differ: {spaces_of[agents[0]][which == 'action']} and "
                    f"{spaces_of[agent][which == 'action']}"
                )
        if not agents:
            raise ConfigError(
                f"key 'policies': policy {name!r} acts for no agent. The agents are "
                f"{_listed(spaces_of)}{_may_change(mapping)}"
            )
    return AgentPolicies(members, mapping)


def _fitting(spaces_of: Mapping[AgentID, Any], mapped: Sequence[AgentID]) -> list[AgentID]:
    """All agents with the spaces of the agents that were mapped to a policy once, or all agents if
    none was."""
    if not mapped:
        return list(spaces_of)
    return [
        agent
        for agent, own in spaces_of.items()
        if not space_that_differs(own, spaces_of[mapped[0]])
    ]


def _by_spaces(spaces_of: Mapping[AgentID, Any]) -> dict[str, list[AgentID]]:
    """One policy for all agents with the same spaces. It has the name of their first agent without
    its number, such as `adversary` for `adversary_0`."""
    groups: list[list[AgentID]] = []
    for agent, own in spaces_of.items():
        for group in groups:
            if not space_that_differs(own, spaces_of[group[0]]):
                group.append(agent)
                break
        else:
            groups.append([agent])
    if len(groups) == 1:
        return {"default_policy": groups[0]}
    named: dict[str, list[AgentID]] = {}
    for group in groups:
        name = str(group[0]).rstrip("0123456789").rstrip("_-") or f"policy_{group[0]}"
        named[str(group[0]) if name in named else name] = group
    return named


def _loaded(mapping: Any) -> Any:
    """Returns the function that `module:function` names. Returns any other value unchanged."""
    if not isinstance(mapping, str):
        return mapping
    try:
        return load_path(mapping)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"key 'policy_mapping_fn': got {mapping!r}, which cannot be imported: {error}"
        ) from error


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in names)
