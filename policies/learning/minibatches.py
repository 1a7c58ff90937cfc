"""Valid rows and minibatches of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.policies.networks.backend import as_tensor


def valid_rows(batch: SampleBatch, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The valid rows `[B, ...]` of the columns `names`, as tensors; views where possible."""
    valid = batch.flat("valid")
    if valid.all():
        arrays = {name: batch.flat(name) for name in names}
    else:
        rows = np.flatnonzero(valid)
        arrays = {name: batch.flat(name)[rows] for name in names}
    return {name: as_tensor(array, device) for name, array in arrays.items()}


def num_minibatches(rows: int, world_size: int, minibatch_size: int | None) -> int:
    """Number of minibatches of `rows` rows of `world_size` learners.

    The mean size per learner is at most `minibatch_size`; None means a single minibatch.
    """
    if not minibatch_size or rows == 0:
        return 1
    return max(1, -(-rows // (world_size * minibatch_size)))


def shuffled(
    rows: Mapping[str, Tensor], parts: int, rng: np.random.Generator
) -> Iterator[dict[str, Tensor]]:
    """The rows in random order, in `parts` minibatches of nearly equal size (views of one copy)."""
    if parts == 1:
        yield dict(rows)
        return
    size = len(rows["obs"])
    order = torch.from_numpy(rng.permutation(size)).to(rows["obs"].device)
    cuts = [size * i // parts for i in range(1, parts)]
    pieces = [column[order].tensor_split(cuts) for column in rows.values()]
    for part in zip(*pieces, strict=True):
        yield dict(zip(rows, part, strict=True))


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


def shuffled_sequences(
    rows: Mapping[str, Tensor], parts: int, rng: np.random.Generator
) -> Iterator[dict[str, Tensor]]:
    """The rows of a policy with memory (see `ActorCriticPolicy.training_rows`), in `parts`
    minibatches of nearly equal numbers of environments, in random order."""
    if parts == 1:
        yield dict(rows)
        return
    valid = rows["valid"]
    numbers = (valid.flatten().cumsum(0) - 1).view_as(valid)  # [T, N] row of each valid step
    for envs in np.array_split(rng.permutation(valid.shape[1]), parts):
        chosen = torch.from_numpy(envs).to(valid.device)
        part = {name: rows[name][:, chosen] for name in ("obs", "starts", "valid")}
        picked = numbers[:, chosen][part["valid"]]
        part["state"] = rows["state"][chosen]
        yield part | {name: rows[name][picked] for name in rows if name not in part}
