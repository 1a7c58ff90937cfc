"""`MultiAgentBatch`: the fragments of several policies that acted in the same environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.common.faults import Faults, one_per_kind
from polopt.common.moments import Moments, merged
from polopt.common.sample_batch import SampleBatch


class MomentsByPolicy(dict[str, Moments]):
    """The moments of each policy that normalises, by name. It has the attributes of `Moments`, over
    all policies."""

    def merge(self, other: Mapping[str, Moments]) -> MomentsByPolicy:
        """Returns the moments of both sets of rows together, for each policy."""
        both = {name: merged(self.get(name), other.get(name)) for name in {**self, **other}}
        return MomentsByPolicy({name: one for name, one in both.items() if one is not None})

    @property
    def is_finite(self) -> bool:
        """Whether all moments are finite."""
        return all(one.is_finite for one in self.values())

    @property
    def rows(self) -> int:
        """The number of rows of all policies."""
        return sum(one.rows for one in self.values())

    @property
    def mean(self) -> np.ndarray:
        """The means of all policies, one after another."""
        return np.concatenate([one.mean for one in self.values()])

    @property
    def m2(self) -> np.ndarray:
        """The sums of squared deviations of all policies, one after another."""
        return np.concatenate([one.m2 for one in self.values()])


@dataclass(slots=True)
class MultiAgentBatch:
    """One `SampleBatch` for each policy. RLlib has a class of the same name.

    Strategies use a `MultiAgentBatch` like a `SampleBatch`. The columns are in the parts.

    Attributes:
        parts: the fragment `[T, N]` of each policy, by name. T and N may differ. A policy without
            an agent in these steps has a fragment without valid rows.
        num_env_steps: the number of environment steps.
        version: see `SampleBatch`, for the weights of all policies together.
        column_versions: the version for each slot of each policy, one policy after another. None
            means `version`.
        worker_index, episodes, faults, moments: see `SampleBatch`.
    """

    parts: dict[str, SampleBatch]
    num_env_steps: int
    version: int = 0
    column_versions: np.ndarray | None = None
    worker_index: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    faults: Faults = field(default_factory=dict)
    moments: Any = None

    def __len__(self) -> int:
        """The number of rows of all policies. This includes rows that are not valid."""
        return sum(map(len, self.parts.values()))

    @property
    def first(self) -> SampleBatch:
        """The fragment of the first policy."""
        return next(iter(self.parts.values()))

    @property
    def env_steps(self) -> int:
        """The number of environment steps."""
        return self.num_env_steps

    @property
    def agent_steps(self) -> int:
        """The number of valid rows of all policies. A row is one step of one agent."""
        return sum(part.agent_steps for part in self.parts.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The largest T, and the sum of N."""
        shapes = [part.shape for part in self.parts.values()]
        return max(shape[0] for shape in shapes), sum(shape[1] for shape in shapes)

    @property
    def versions(self) -> np.ndarray:
        """The version for each slot. See `SampleBatch.versions`."""
        if self.column_versions is None:
            return np.full(self.shape[1], self.version, dtype=np.int64)
        return self.column_versions

    @property
    def nbytes(self) -> int:
        """The size of all parts in bytes. See `SampleBatch.nbytes`."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def compress(self) -> str:
        """The codec of the parts. See `SampleBatch.compress`."""
        return self.first.compress

    @compress.setter
    def compress(self, codec: str) -> None:
        for part in self.parts.values():
            part.compress = codec

    @staticmethod
    def concat(batches: Sequence[MultiAgentBatch]) -> MultiAgentBatch:
        """Concatenates batches along the slots, for each policy. See `SampleBatch.concat`."""
        if len(batches) == 1:
            return batches[0]
        return MultiAgentBatch(
            {
                name: SampleBatch.concat([batch.parts[name] for batch in batches])
                for name in batches[0].parts
            },
            sum(batch.num_env_steps for batch in batches),
            version=min(batch.version for batch in batches),
            column_versions=np.concatenate([batch.versions for batch in batches]),
            worker_index=batches[0].worker_index,
            episodes=EpisodeStats.concat(batch.episodes for batch in batches),
            faults=one_per_kind(one for batch in batches for one in batch.faults.values()),
        )
