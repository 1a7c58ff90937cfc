"""`MinibatchGradients`: gradients of the minibatches of one batch; the caller applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.sgd import (
    LocalReducer,
    explained_variance,
    num_minibatches,
    shuffled,
    standardized,
)

if TYPE_CHECKING:
    from polopt.policies.policy import Policy


class MinibatchGradients:
    """Goes through a batch as `Policy.learn_on_batch` does, `num_sgd_iter` epochs of minibatches,
    but only computes each gradient, from the weights of that moment; somebody else applies it.

    Args:
        policy: its config says how many epochs and how large minibatches are.
        batch: postprocessed. What it leaves out is what only the applying side can do: a policy's
            `on_epoch` and `on_learned`.

    Attributes:
        version: of the weights that acted.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        self._policy = policy
        self._explained = explained_variance(batch)
        self._rows = policy.training_rows(batch)
        if policy.config.standardize_advantages and len(self._rows["obs"]):
            self._rows["advantages"] = standardized(self._rows["advantages"], LocalReducer())
        # As many for every worker with a whole fragment, however many of its rows are valid.
        parts = num_minibatches(len(batch), 1, policy.config.sgd_minibatch_size)
        self._parts = parts
        self._left = parts * policy.config.num_sgd_iter
        self._minibatches = self._shuffled()
        self.version = batch.version

    def _shuffled(self) -> Iterator[Mapping[str, Tensor]]:
        while True:
            yield from shuffled(self._rows, self._parts, self._policy.shuffle)

    @property
    def done(self) -> bool:
        """Whether all minibatches have been gone through."""
        return self._left == 0

    @property
    def first_epoch(self) -> bool:
        """Whether the next gradient is of rows that none was computed from before."""
        return self._left > self._parts * (self._policy.config.num_sgd_iter - 1)

    def next_gradients(self) -> Gradients:
        """The gradient of the next minibatch, not clipped.

        Raises:
            ValueError: if there is none left.
        """
        if self.done:
            raise ValueError("the lesson is over: all minibatches have been gone through")
        self._left -= 1
        policy, rows = self._policy, next(self._minibatches)
        count = len(rows["obs"])
        if count == 0:
            return policy.no_gradients()
        stats = policy.backward(rows)
        stats["vf_explained_var"] = self._explained
        return Gradients(policy.flat.get_grads(), policy.version, count, stats)
