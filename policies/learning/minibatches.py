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
    """The minibatches of one batch, the same number for all learners.

    Args:
        batch: postprocessed.
        prepare: returns the rows of a batch, and sums over them that are of interest. It is called
            for the whole batch now or, with unit `columns`, for each minibatch right before its
            gradient.
        unit: what is drawn in random order. `rows`: single rows. `sequences`: columns of the
            prepared batch, which a policy with memory needs. `columns`: columns of the batch.
        size: rows of a minibatch of one learner. None: all.
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
        """The rows of each of `parts` minibatches, which together hold each row once, and the sums
        over all learners: of the batch, or with unit `columns` of the minibatch."""
        if self._unit != "columns":
            split = shuffled if self._unit == "rows" else shuffled_sequences
            for rows in split(self._rows, parts, self._rng):
                yield rows, self._sums
            return
        for part in shuffled_columns(self._batch, parts, self._rng):
            rows, sums = self._prepare(part)
            yield rows, summed(sums, self._reducer)


def valid_rows(batch: SampleBatch, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The valid rows `[B, ...]` of the columns `names`. Views where possible."""
    valid = batch.flat("valid")
    if valid.all():
        return {name: batch.flat(name) for name in names}
    rows = np.flatnonzero(valid)
    return {name: batch.flat(name)[rows] for name in names}


def num_minibatches(rows: int, world_size: int, minibatch_size: int | None) -> int:
    """Number of minibatches of `rows` rows of `world_size` learners.

    The mean size per learner is at most `minibatch_size`. None means a single minibatch.
    """
    if not minibatch_size or rows == 0:
        return 1
    return max(1, -(-rows // (world_size * minibatch_size)))


def shuffled(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """The rows in random order, in `parts` minibatches of nearly equal size (views of one copy)."""
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
    """The columns of a batch in random order, in `parts` batches `[T, n]` of nearly equal width.
    Some have no column where there are more parts than columns."""
    if parts == 1:
        yield batch
        return
    for columns in np.array_split(rng.permutation(batch.shape[1]), parts):
        yield batch.select(columns)


def shuffled_sequences(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """The rows of a policy with memory (see `FragmentPolicy.training_rows`), in `parts`
    minibatches of nearly equal numbers of environments, in random order."""
    if parts == 1:
        yield rows
        return
    yield from _sequences(rows, np.array_split(rng.permutation(rows["valid"].shape[1]), parts))


def microbatches(rows: Rows, size: int, sequences: bool) -> Iterator[Rows]:
    """The rows in their order, in parts of at most `size` rows and of nearly equal size.

    Args:
        rows: of a minibatch.
        size: at least 1. A sequence of more steps is a part of its own.
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
    """The rows of a policy with memory, of each array of environments."""
    valid = rows["valid"]
    numbers = (valid.flatten().cumsum(0) - 1).reshape(valid.shape)  # [T, N] row of each valid step
    for envs in parts:
        part = {name: rows[name][:, envs] for name in ("obs", "starts", "valid")}
        picked = numbers[:, envs][part["valid"]]
        part["state"] = rows["state"][envs]
        yield part | {name: rows[name][picked] for name in rows if name not in part}
