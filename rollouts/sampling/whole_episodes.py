"""`WholeEpisodes`: plays a number of whole episodes of each environment, for evaluation."""

from __future__ import annotations

from polopt.common.data_faults import DataFaults
from polopt.common.episodes import Episode
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.sampler import VectorSampler

#: Steps of one fragment at most: the last one goes on after the last episode has ended.
_MOST_STEPS = 64


def shares(total: int, parts: int) -> list[int]:
    """Divides `total` into `parts` numbers that differ by 1 at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class WholeEpisodes:
    """Plays whole episodes with a sampler whose environments have just begun new ones.

    How many episodes each environment plays is fixed in advance. The first K episodes to end would
    give a biased mean: short episodes end first, and their returns may be lower or higher than the
    returns of long episodes. Episodes that an environment plays beyond its number are not used.
    Episodes with an exception of the environment, or with values that are not finite, are played
    again.

    Args:
        sampler: its policy acts.
        num_episodes: K, of all environments together.
        explore: sample actions. False takes the mode of the policy's distribution.

    Attributes:
        episodes: those played so far.
    """

    def __init__(self, sampler: VectorSampler, num_episodes: int, explore: bool = False) -> None:
        self._sampler = sampler
        self._explore = explore
        self._left = shares(num_episodes, sampler.env.num_envs)
        self.episodes: list[Episode] = []

    @property
    def done(self) -> bool:
        """Whether all episodes are played."""
        return not any(self._left)

    def play(self) -> DataFaults:
        """Plays one fragment of the sampler.

        Returns:
            exceptions of environments in it, and what was not finite.

        Raises:
            EnvironmentFailedError: see `VectorSampler.sample`.
        """
        sampler = self._sampler
        sampler.ended = []
        batch = sampler.sample(self._explore, min(sampler.fragment_length, _MOST_STEPS))
        ended, sampler.ended = sampler.ended, None
        problem, bad = find_non_finite(batch)
        if problem:
            sampler.reset_some(bad)
        for episode in ended:
            if self._left[episode.env_index] and not bad[episode.env_index]:
                self._left[episode.env_index] -= 1
                self.episodes.append(episode)
        return batch.faults._replace(non_finite=problem)
