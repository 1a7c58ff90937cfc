"""Splits batches into minibatches of valid rows."""

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
        prepare: a function that returns the rows of a batch, and statistics that are sums over
            these rows. With unit `columns`, this class calls `prepare` for each minibatch, right
            before the gradient of the minibatch is computed. With other units, it calls `prepare`
            once, for the whole batch.
        unit: the unit that is shuffled. `rows` shuffles single rows. `sequences` shuffles the
            environments of the prepared batch, for a policy with memory. `columns` shuffles the
            environments of the batch before `prepare`.
        size: upper bound of the average number of rows of a minibatch in one learner. With the
            units `sequences` and `columns`, each environment stays whole, so the average can be
            larger. `None` means that there is only one minibatch.
        rng: random generator for the order.
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
        sums = [float(batch.agent_steps), float(batch.shape[1])]
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
        """Yields `parts` minibatches that together hold each row once.

        Each minibatch is a tuple of rows and sums. With unit `columns`, the sums are over the rows
        of this minibatch in all learners. With other units, the sums are over the whole batches of
        all learners.
        """
        if self._unit != "columns":
            split = shuffled if self._unit == "rows" else shuffled_sequences
            for rows in split(self._rows, parts, self._rng):
                yield rows, self._sums
            return
        for part in shuffled_columns(self._batch, parts, self._rng):
            rows, sums = self._prepare(part)
            yield rows, summed(sums, self._reducer)


def valid_rows(batch: SampleBatch, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns the valid rows `[B, ...]` of the columns `names`. If all rows are valid, the results
    are views."""
    valid = batch.flat("valid")
    if valid.all():
        return {name: batch.flat(name) for name in names}
    rows = np.flatnonzero(valid)
    return {name: batch.flat(name)[rows] for name in names}


def num_minibatches(rows: int, world_size: int, minibatch_size: int | None) -> int:
    """The number of minibatches for `rows` rows. `rows` counts the rows of all learners.

    On average, a minibatch has at most `minibatch_size` rows in each learner. If `minibatch_size`
    is None, there is one minibatch.
    """
    if not minibatch_size or rows == 0:
        return 1
    return max(1, -(-rows // (world_size * minibatch_size)))


def shuffled(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yields the rows in random order, in `parts` minibatches of nearly equal size. The minibatches
    are views of one copy of the rows. With `parts=1`, the rows are neither copied nor shuffled."""
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
    """Yields the environments of a batch in random order, in `parts` batches `[T, n]` with nearly
    equal numbers of environments. If there are more parts than environments, some batches are
    empty. With `parts=1`, the order does not change."""
    if parts == 1:
        yield batch
        return
    for columns in np.array_split(rng.permutation(batch.shape[1]), parts):
        yield batch.select(columns)


def shuffled_sequences(rows: Rows, parts: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yields the rows of a policy with memory in `parts` minibatches. The environments are in
    random order, and all minibatches have nearly the same number of environments. With `parts=1`,
    the order does not change.

    `FragmentPolicy.training_rows` describes the rows.
    """
    if parts == 1:
        yield rows
        return
    yield from _sequences(rows, np.array_split(rng.permutation(rows["valid"].shape[1]), parts))


def microbatches(rows: Rows, size: int, sequences: bool) -> Iterator[Rows]:
    """Yields the rows in their order, in microbatches of nearly equal size with at most `size`
    rows.

    Args:
        rows: rows of a minibatch.
        size: at least 1. A sequence with more than `size` steps becomes one microbatch.
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
    """Yields the rows of a policy with memory. Each array of environments in `parts` becomes one
    minibatch."""
    valid = rows["valid"]
    numbers = (valid.flatten().cumsum(0) - 1).reshape(valid.shape)  # [T, N] row of each valid step
    for envs in parts:
        part = {name: rows[name][:, envs] for name in ("obs", "starts", "valid")}
        picked = numbers[:, envs][part["valid"]]
        part["state"] = rows["state"][envs]
        yield part | {name: rows[name][picked] for name in rows if name not in part}
