"""Valid rows and minibatches of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.networks.backend import Rows


def valid_rows(batch: SampleBatch, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The valid rows `[B, ...]` of the columns `names`; views where possible."""
    valid = batch.flat("valid")
    if valid.all():
        return {name: batch.flat(name) for name in names}
    rows = np.flatnonzero(valid)
    return {name: batch.flat(name)[rows] for name in names}


def num_minibatches(rows: int, world_size: int, minibatch_size: int | None) -> int:
    """Number of minibatches of `rows` rows of `world_size` learners.

    The mean size per learner is at most `minibatch_size`; None means a single minibatch.
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
    """The rows of a policy with memory (see `ActorCriticPolicy.training_rows`), in `parts`
    minibatches of nearly equal numbers of environments, in random order."""
    if parts == 1:
        yield rows
        return
    valid = rows["valid"]
    numbers = (valid.flatten().cumsum(0) - 1).reshape(valid.shape)  # [T, N] row of each valid step
    for envs in np.array_split(rng.permutation(valid.shape[1]), parts):
        part = {name: rows[name][:, envs] for name in ("obs", "starts", "valid")}
        picked = numbers[:, envs][part["valid"]]
        part["state"] = rows["state"][envs]
        yield part | {name: rows[name][picked] for name in rows if name not in part}
