"""Valid rows and minibatches of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer, summed
from polopt.policies.networks.backend import Rows


class Minibatches:
    """Splits one batch into minibatches. All learners get the same number of minibatches.

    Args:
        batch: a postprocessed batch.
        prepare: returns the rows of a batch, and statistics that are sums over these rows. It is
            called once, for the whole batch. With unit `columns` it is called for each minibatch,
            right before its gradient.
        unit: what is shuffled. `rows`: single rows. `sequences`: columns of the prepared batch, for
            a policy with memory. `columns`: columns of the batch before it is prepared.
        size: the most rows that a minibatch of one learner has on average. None: all.
        rng: the source of the random order.
        reducer: sums over all learners.

    Attributes:
        parts: number of minibatches of an epoch. 0 if no learner has a row.
    """

    def __init__(
        self,
        batch: SampleBatch,
        prepare: Callable[[SampleBatch], tuple[Rows, list[float]]],
        unit: Literal["rows", "sequences", "columns"],
        size: int | None,
        rng: np.random.Generator,
        reducer: Reducer,
    ) -> None:
        self._batch = batch
        self._prepare = prepare
        self._unit = unit
        self._rng = rng
        self._reducer = reducer
        self._rows: Rows = {}
        sums = [float(batch.env_steps), float(batch.shape[1])]
        if unit != "columns":
            self._rows, of_rows = prepare(batch)
            sums = [float(len(self._rows["actions"])), sums[1], *of_rows]
        rows, columns, *self._sums = summed(sums, reducer)
        learners = reducer.world_size
        parts = num_minibatches(int(rows), learners, size)
        if unit != "rows":
            parts = min(parts, -(-int(columns) // learners))
        self.parts = parts if rows else 0

    def epoch(self, parts: int) -> Iterator[tuple[Rows, list[float]]]:
        """Yields `parts` minibatches, each with its rows and its sums over all learners. Together
        they hold each row once. The sums are over the batch, or with unit `columns` over the
        minibatch."""
        if self._unit != "columns":
            split = shuffled if self._unit == "rows" else shuffled_sequences
            for rows in split(self._rows, parts, self._rng):
                yield rows, self._sums
            return
        for part in shuffled_columns(self._batch, parts, self._rng):
            rows, sums = self._prepare(part)
            yield rows, summed(sums, self._reducer)


def valid_rows(batch: SampleBatch, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The valid rows `[B, ...]` of the columns `names`. They are views if all rows are valid."""
    valid = batch.flat("valid")
    if valid.all():
        return {name: batch.flat(name) for name in names}
    rows = np.flatnonzero(valid)
    return {name: batch.flat(name)[rows] for name in names}


def num_minibatches(rows: int, world_size: int, minibatch_size: int | None) -> int:
    """The number of minibatches for `rows` rows of `world_size` learners together.

    On average a minibatch has at most `minibatch_size` rows per learner. With None there is a
    single minibatch.
    """
    if not minibatch_size or rows == 0:
        return 1
    return max(1, -(-rows // (world_size * minibatch_size)))


def shuffled(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yields the rows in random order, in `parts` minibatches of nearly equal size. These are views
    of one copy."""
    if parts == 1:
        yield rows
        return
    size = len(rows["obs"])
    order = rng.permutation(size)
    columns = {name: column[order] for name, column in rows.items()}
    cuts = [size * i // parts for i in range(parts + 1)]
    for start, end in itertools.pairwise(cuts):
        yield {name: column[start:end] for name, column in columns.items()}


def shuffled_columns(
    batch: SampleBatch, parts: int, rng: np.random.Generator
) -> Iterator[SampleBatch]:
    """Yields the columns of a batch in random order, in `parts` batches `[T, n]` of nearly equal
    width. If there are more parts than columns, some parts are empty."""
    if parts == 1:
        yield batch
        return
    for columns in np.array_split(rng.permutation(batch.shape[1]), parts):
        yield batch.select(columns)


def shuffled_sequences(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yields the rows of a policy with memory in `parts` minibatches, with the environments in
    random order. Each minibatch has nearly the same number of environments. See
    `FragmentPolicy.training_rows`."""
    if parts == 1:
        yield rows
        return
    yield from _sequences(rows, np.array_split(rng.permutation(rows["valid"].shape[1]), parts))


def microbatches(rows: Rows, size: int, sequences: bool) -> Iterator[Rows]:
    """Yields the rows in their order, in parts of nearly equal size, with at most `size` rows.

    Args:
        rows: rows of a minibatch.
        size: at least 1. A sequence with more steps than this is a part of its own.
        sequences: whether the rows belong to a policy with memory.
    """
    if sequences:
        steps, envs = rows["valid"].shape
        parts = num_minibatches(envs, 1, max(1, size // steps))
        yield from _sequences(rows, np.array_split(np.arange(envs), parts))
        return
    count = len(rows["actions"])
    parts = num_minibatches(count, 1, size)
    for start, end in itertools.pairwise(count * i // parts for i in range(parts + 1)):
        yield {name: column[start:end] for name, column in rows.items()}


def _sequences(rows: Rows, parts: Iterable[np.ndarray]) -> Iterator[Rows]:
    """Yields the rows of a policy with memory, one part for each array of environments."""
    valid = rows["valid"]
    numbers = (valid.flatten().cumsum(0) - 1).reshape(valid.shape)  # [T, N] row of each valid step
    for envs in parts:
        part = {name: rows[name][:, envs] for name in ("obs", "starts", "valid")}
        picked = numbers[:, envs][part["valid"]]
        part["state"] = rows["state"][envs]
        yield part | {name: rows[name][picked] for name in rows if name not in part}
