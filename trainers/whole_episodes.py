"""`WholeEpisodes`: plays whole episodes for evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.common.episodes import Episode
from polopt.common.faults import Fault, Faults, one_per_kind
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.rollouts.envs.agent_vector_env import num_copies
from polopt.rollouts.sampling.group_sampler import GroupSampler
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.sampler import VectorSampler

#: The maximum number of steps in one fragment. The last fragment continues to its full length after
#: the last episode has ended, and these steps are wasted. Short fragments waste fewer steps.
_MOST_STEPS = 64


def shares(total: int, parts: int) -> list[int]:
    """Divides `total` into `parts` numbers that differ by at most 1, the larger numbers first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class WholeEpisodes:
    """Plays K whole episodes with a sampler. The environments of the sampler must be at the start
    of an episode.

    The number of episodes for each environment is fixed in advance. The first K episodes that end
    would give a biased mean: short episodes end first, and their returns may be lower or higher
    than the returns of long episodes. If an environment plays more episodes than this number, the
    additional episodes are not used. If an environment raises, its current episode is discarded. If
    a value of an environment is not finite, all its episodes in the fragment are discarded. The
    environment then plays other episodes instead.

    Args:
        sampler: the sampler, whose policy chooses the actions.
        num_episodes: the number K of episodes of all environments together.
        explore: whether to sample actions. If False, the most likely actions are used.

    Attributes:
        episodes: the episodes that have been played so far.
    """

    def __init__(
        self,
        sampler: VectorSampler | GroupSampler,
        num_episodes: int,
        explore: bool = False,
    ) -> None:
        self._sampler = sampler
        self._explore = explore
        self._left = shares(num_episodes, num_copies(sampler.env))
        self.episodes: list[Episode] = []

    @property
    def done(self) -> bool:
        """Whether all episodes have been played."""
        return not any(self._left)

    def play(self) -> Faults:
        """Samples one fragment, and adds the episodes that end in it to `episodes`.

        Returns:
            the exceptions of environments in the fragment, and its non-finite values.

        Raises:
            EnvironmentFailedError, Exception: see `VectorSampler.sample`.
        """
        sampler = self._sampler
        sampler.ended = []
        batch = sampler.sample(self._explore, min(sampler.fragment_length, _MOST_STEPS))
        ended, sampler.ended = sampler.ended, None
        problem, bad = self._find_non_finite(batch)
        if problem:
            sampler.reset_some(bad)
        # With agents, `bad` describes slots.
        of_envs = bad.reshape(len(self._left), -1).sum(axis=1)
        for episode in ended:
            if self._left[episode.env_index] and not of_envs[episode.env_index]:
                self._left[episode.env_index] -= 1
                self.episodes.append(episode)
        if not problem:
            return batch.faults
        fault = Fault("non_finite", sampler.faults.source + problem)
        return one_per_kind([*batch.faults.values(), fault])

    def _find_non_finite(self, batch: Any) -> tuple[str, np.ndarray]:
        """See `find_non_finite`. With several policies, all environments are bad if one is."""
        if not isinstance(batch, MultiAgentBatch):
            return find_non_finite(batch)
        problems = [find_non_finite(part)[0] for part in batch.parts.values()]
        problem = next(filter(None, problems), "")
        return problem, np.full(len(self._left), bool(problem))
