"""`Reducer` sums tensors over all learners. Statistics that compare the values of a
critic with their targets are made of such sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch


class Reducer(Protocol):
    """Sums tensors over all learners. Every learner must make the same calls in the same order, and
    gets the same sums.

    Attributes:
        world_size: number of learners.
    """

    world_size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all learners, in place."""


class LocalReducer:
    """The reducer of a single learner. A sum over one learner changes nothing."""

    world_size = 1

    def sum_(self, tensor: Tensor) -> None:
        """Does nothing."""


def summed(numbers: Sequence[float], reducer: Reducer) -> list[float]:
    """Sums each of a few numbers over all learners, in float64."""
    if reducer.world_size == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float64)
    reducer.sum_(total)
    sums: list[float] = total.tolist()
    return sums


def value_statistics(sums: Sequence[float]) -> dict[str, float]:
    """Compares values of a fragment with their targets.

    Args:
        sums: sums from `value_sums`, from one learner or added up over several learners.

    Returns:
        three statistics. `vf_explained_var` is `1 - Var(targets - values) / Var(targets)`, or 0 if
        the targets are constant. `vf_predicted_mean` is the mean of the values, and
        `vf_target_mean` is the mean of the targets. The difference of these means is the bias of
        the values. Without rows, all three statistics are 0.
    """
    count, target, squares, error, error_squares = sums
    rows = max(count, 1.0)
    variance = squares - target**2 / rows
    constant = variance <= 1e-12 * squares  # constant except for rounding
    explained = 0.0 if constant else 1.0 - (error_squares - error**2 / rows) / variance
    return {
        "vf_explained_var": explained,
        "vf_predicted_mean": (target - error) / rows,
        "vf_target_mean": target / rows,
    }


def value_sums(batch: SampleBatch) -> list[float]:
    """Five sums over the valid rows of a batch with `values` and `value_targets`. These are the
    number of rows, the targets, their squares, the errors (target minus value), and the squares of
    the errors."""
    valid = batch["valid"]
    targets = batch["value_targets"][valid].astype(np.float64)
    errors = targets - batch["values"][valid]
    return [
        float(len(targets)),
        float(targets.sum()),
        float(np.square(targets).sum()),
        float(errors.sum()),
        float(np.square(errors).sum()),
    ]


def value_stats(values: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Compares values `[B]` of replayed rows with their targets `[B]`, in torch. Returns the
    statistics of `value_statistics`."""
    variance = targets.var(correction=0)
    explained = 1.0 - (targets - values).var(correction=0) / variance.clamp(min=1e-12)
    return {
        "vf_explained_var": torch.where(variance > 1e-12, explained, 0.0),
        "vf_predicted_mean": values.mean(),
        "vf_target_mean": targets.mean(),
    }
