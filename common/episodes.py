"""`Episode` describes one episode to callbacks. `EpisodeStats` holds the returns and lengths of the
episodes in a fragment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Episode(NamedTuple):
    """One episode that has ended. In `on_episode_step`, the current episode so far.

    Attributes:
        env_index: the index of the environment in its worker.
        episode_return: the undiscounted sum of rewards.
        episode_len: the length in environment steps.
        terminated: whether the episode ended by termination. False if the episode was truncated, or
            has not ended yet.
        info: the info that the environment returned in the last step. Empty if infos are not kept.
        data: a dict that `on_episode_start` and `on_episode_step` may fill. All steps of an episode
            share this dict. Empty if the callbacks define neither.
        done: whether the episode has ended.
        metrics: what `on_episode_end` returned for this episode.
        agent_returns: the return of each agent, by agent. Empty in an environment with one agent.
        observation: the observation after the last step, as the environment returned it. The next
            step may overwrite its array, so a callback that keeps the observation copies it. With
            several agents, a dict with the observations of the agents. None if it is not known.
        action: the action of the last step as the policy chose it, before `normalize_actions`. With
            several agents, a dict with the actions of the agents. None before the first step.
        reward: the reward of the last step. With several agents, the sum of the rewards of all
            agents.
    """

    env_index: int
    episode_return: float
    episode_len: int
    terminated: bool
    info: Mapping[str, Any] = {}
    data: dict[str, Any] = {}  # noqa: RUF012 - the sampler gives each episode its own dict
    done: bool = True
    metrics: Mapping[str, float | Sequence[float]] = {}
    agent_returns: Mapping[Any, float] = {}
    observation: Any = None
    action: Any = None
    reward: float = 0.0


class EpisodeStats(NamedTuple):
    """Statistics of the E episodes that ended within one fragment. The batch of the fragment
    contains them.

    Attributes:
        returns: the undiscounted sums of rewards `[E]`.
        lengths: the lengths in environment steps `[E]`.
        agents: the return of each agent, by agent. Empty in environments with one agent.
    """

    returns: Sequence[float] = ()
    lengths: Sequence[int] = ()
    agents: Sequence[Mapping[Any, float]] = ()  # [E] or []

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeStats:
        """Returns the statistics of some episodes."""
        return cls(
            [one.episode_return for one in episodes],
            [one.episode_len for one in episodes],
            [one.agent_returns for one in episodes if one.agent_returns],
        )

    @classmethod
    def concat(cls, parts: Iterable[EpisodeStats]) -> EpisodeStats:
        """Concatenates the statistics of several fragments, in the given order."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        return cls(
            [value for part in parts for value in part.returns],
            [value for part in parts for value in part.lengths],
            [value for part in parts for value in part.agents],
        )
