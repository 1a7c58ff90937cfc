"""Rows, standardised advantages, and minibatches of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer


def valid_rows(batch: SampleBatch, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The valid rows `[B, ...]` of the columns `names`, as tensors; views where possible."""
    valid = batch.flat("valid")
    if valid.all():
        arrays = {name: batch.flat(name) for name in names}
    else:
        rows = np.flatnonzero(valid)
        arrays = {name: batch.flat(name)[rows] for name in names}
    # Arrays from Ray's object store are read-only, which torch does not support.
    owned = {name: a if a.flags.writeable else a.copy() for name, a in arrays.items()}
    return {name: torch.as_tensor(a, device=device) for name, a in owned.items()}


def standardized(advantages: Tensor, reducer: Reducer) -> Tensor:
    """`[B]` with mean 0 and standard deviation 1 over the rows of all learners.

    Two passes in float64, because the difference of large sums would lose digits where learners
    have different means.
    """
    values = advantages.double()
    moments = torch.stack(
        [torch.tensor(float(len(values)), dtype=torch.float64), values.sum().cpu()]
    )
    reducer.sum_(moments)
    count, mean = float(moments[0]), float(moments[1] / moments[0].clamp(min=1.0))
    squares = (values - mean).square().sum().cpu().reshape(1)
    reducer.sum_(squares)
    std = (float(squares[0]) / max(count, 1.0)) ** 0.5
    return ((values - mean) / max(std, 1e-8)).float()


def explained_variance(batch: SampleBatch) -> float:
    """`1 - Var(targets - values) / Var(targets)` over valid rows; 0 if the targets are constant."""
    valid = batch["valid"]
    targets, values = batch["value_targets"][valid], batch["values"][valid]
    variance = float(targets.var()) if len(targets) else 0.0
    return 1.0 - float((targets - values).var()) / variance if variance > 0.0 else 0.0


def num_minibatches(rows: int, world_size: int, minibatch_size: int) -> int:
    """Number of minibatches of `rows` rows of `world_size` learners.

    The mean size per learner is at most `minibatch_size`; 0 means a single minibatch.
    """
    if minibatch_size == 0 or rows == 0:
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
