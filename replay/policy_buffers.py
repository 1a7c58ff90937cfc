"""`PolicyBuffers`: a replay buffer and a rate limiter for each of several policies."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer


class PolicyRows(NamedTuple):
    """Rows that were drawn for several policies.

    Attributes:
        parts: the `Transitions` or `Sequences` of each policy, by name.
    """

    parts: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """The number of rows of all policies."""
        return sum(part.num_rows for part in self.parts.values())

    @property
    def indices(self) -> dict[str, np.ndarray]:
        """The indices of the rows of each policy."""
        return {name: part.indices for name, part in self.parts.items()}


class PolicyBuffers:
    """Replay buffers of several policies, with the methods of one `ReplayBuffer`. `limiter` has the
    methods of one `RateLimiter`. Each policy learns at its own training intensity: the number of
    rows that it learns from follows the number of rows of its own agents.

    Args:
        buffers: the buffer of each policy that learns, by name.
        limiters: the rate limiter of each of them.
    """

    def __init__(
        self, buffers: Mapping[str, ReplayBuffer], limiters: Mapping[str, RateLimiter]
    ) -> None:
        self.buffers = dict(buffers)
        self.limiter = PolicyLimiters(limiters, self.buffers)

    @property
    def num_drawable(self) -> int:
        """The number of rows of all policies that can be drawn now."""
        return sum(buffer.num_drawable for buffer in self.buffers.values())

    def add(self, batch: MultiAgentBatch) -> dict[str, int]:
        """Adds a fragment. Returns the number of transitions of each policy."""
        counts = {}
        for name, buffer in self.buffers.items():
            part = batch.parts[name]
            part.worker_index = batch.worker_index
            counts[name] = buffer.add(part)
        return counts

    def sample(self, batch_size: int) -> PolicyRows:
        """Draws B rows for each policy that may learn now. See `ReplayBuffer.sample`."""
        ready = self.limiter.ready
        return self._drawn({name: self.buffers[name].sample(batch_size) for name in ready})

    def sample_sequences(self, batch_size: int) -> PolicyRows:
        """Draws B sequences for each policy that may learn now."""
        ready = self.limiter.ready
        return self._drawn({n: self.buffers[n].sample_sequences(batch_size) for n in ready})

    def _drawn(self, parts: dict[str, Any]) -> PolicyRows:
        self.limiter.drawn = {name: part.num_rows for name, part in parts.items()}
        return PolicyRows(parts)

    def update_priorities(
        self, indices: Mapping[str, np.ndarray], priorities: Mapping[str, np.ndarray]
    ) -> None:
        """Sets the priorities of rows of each policy. See `ReplayBuffer.update_priorities`."""
        for name, of_policy in priorities.items():
            self.buffers[name].update_priorities(indices[name], of_policy)

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of `ReplayBuffer.stats`. Rows, bytes and gaps are sums over the
        policies, the fill is a mean, and all others are of the first policy."""
        found = [buffer.stats() for buffer in self.buffers.values()]
        sums = {key: sum(one[key] for one in found) for key in ("num_rows", "nbytes", "num_gaps")}
        return {**found[0], **sums, "fill": sum(one["fill"] for one in found) / len(found)}

    @property
    def nbytes(self) -> int:
        """The memory of all full buffers. See `ReplayBuffer.nbytes`."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def save(self, directory: Path) -> dict[str, Any]:
        """Saves each buffer in a folder of its own, whose name is its place among the policies.
        Returns the state of each. See `ReplayBuffer.save`."""
        return {
            name: buffer.save(directory / str(place))
            for place, (name, buffer) in enumerate(self.buffers.items())
        }

    @staticmethod
    def checksums(state: Mapping[str, Any]) -> dict[str, str]:
        """The SHA-256 of each file that `save` wrote. See `ReplayBuffer.checksums`."""
        return {
            f"{place}/{file}": checksum
            for place, of_policy in enumerate(state.values())
            for file, checksum in ReplayBuffer.checksums(of_policy).items()
        }

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns the first difference to the saved buffers. See `ReplayBuffer.misfit`."""
        for name, buffer in self.buffers.items():
            if name in state and (problem := buffer.misfit(state[name])):
                return f"policy {name!r}: {problem}"
        return ""

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restores the buffers that are in the state. See `ReplayBuffer.load`."""
        for place, (name, of_policy) in enumerate(state.items()):
            if name in self.buffers:
                self.buffers[name].load(directory / str(place), of_policy)

    def get_state(self) -> dict[str, Any]:
        """Returns the state of each buffer. See `ReplayBuffer.get_state`."""
        return {name: buffer.get_state() for name, buffer in self.buffers.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the buffers that are in the state. See `ReplayBuffer.set_state`."""
        for name, buffer in self.buffers.items():
            if name in state:
                buffer.set_state(state[name])


class PolicyLimiters:
    """The rate limiters of several policies, with the methods of one `RateLimiter`.

    Args:
        limiters: the limiter of each policy that learns, by name.
        buffers: their buffers. Empty if other processes hold the buffers.

    Attributes:
        limiters: the argument.
        ready: the policies that could learn at the last call of `can_learn`.
        drawn: the number of rows of each policy in the last batch. Policies can have different
            numbers, because sequences differ in length.
    """

    def __init__(
        self,
        limiters: Mapping[str, RateLimiter],
        buffers: Mapping[str, ReplayBuffer] | None = None,
    ) -> None:
        self._buffers = buffers or {}
        self.limiters = dict(limiters)
        self.ready: list[str] = []
        self.drawn: dict[str, int] = {}

    def can_learn(self, rows: int) -> bool:
        """Whether one of the policies may learn from a batch of `rows` rows now."""
        self.ready = [name for name, one in self.limiters.items() if one.can_learn(rows)]
        return bool(self.ready)

    def inserted(self, rows: Mapping[str, int], can_draw: bool = True) -> None:
        """Counts the rows of each policy that were added. See `RateLimiter.inserted`."""
        for name, one in self.limiters.items():
            drawable = name not in self._buffers or self._buffers[name].num_drawable > 0
            one.inserted(rows[name], drawable)

    def learned(self, rows: int) -> None:
        """Counts the `rows` rows of the last batch. Each policy learns from its own rows."""
        for name, own in self.drawn.items():
            self.limiters[name].learned(own)

    @property
    def delivered(self) -> float:
        """The actual intensity over all policies. See `RateLimiter.delivered`."""
        counted = sum(one.num_counted for one in self.limiters.values())
        return sum(one.num_learned for one in self.limiters.values()) / counted if counted else 0.0

    @property
    def credit(self) -> Fraction:
        """The sum of the credits. See `RateLimiter.credit`."""
        return sum((one.credit for one in self.limiters.values()), Fraction(0))

    @property
    def error_buffer(self) -> int:
        """The sum of the bounds of the credits. See `RateLimiter.error_buffer`."""
        return sum(one.error_buffer or 0 for one in self.limiters.values())

    def get_state(self) -> dict[str, Any]:
        """Returns the state of each limiter."""
        return {name: one.get_state() for name, one in self.limiters.items()}

    def set_state(self, state: Mapping[str, Any], rows: int | None = None) -> None:
        """Restores the limiters that are in the state. See `RateLimiter.set_state`."""
        for name, one in self.limiters.items():
            if name in state:
                one.set_state(state[name], rows)
