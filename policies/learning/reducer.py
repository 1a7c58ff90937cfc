"""Sums over all learners."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Sums over all learners.

    Attributes:
        world_size: number of learners.
    """

    world_size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all learners, in place."""


class LocalReducer:
    """A single learner: each sum has one term."""

    world_size = 1

    def sum_(self, tensor: Tensor) -> None:
        """Does nothing."""
