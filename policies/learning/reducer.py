"""`Reducer`: sums tensors over all learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


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
