"""`MinibatchGradients`: gradients of the minibatches of one batch; the caller applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.learning.minibatches import explained_variance, num_minibatches, shuffled
from polopt.policies.policy import Policy


class MinibatchGradients:
    """Iterates over a batch like `Policy.learn_on_batch`, in `num_sgd_iter` epochs of minibatches.

    Each gradient is computed with the weights of that moment, and the caller applies it. `on_epoch`
    and `on_learned` are not called, so PPO's `kl_stop` and `kl_target` have no effect.

    Args:
        policy: its config has the number of epochs and the minibatch size.
        batch: postprocessed.

    Attributes:
        version: version of the weights that chose the actions of the batch.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        self._policy = policy
        self._explained = explained_variance(batch)
        self._rows = policy.training_rows(batch)
        # All rows count, valid or not, so that workers with whole fragments have the same number.
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
        """Whether all minibatches of all epochs are used."""
        return self._left == 0

    @property
    def first_epoch(self) -> bool:
        """Whether the next gradient belongs to the first epoch."""
        return self._left > self._parts * (self._policy.config.num_sgd_iter - 1)

    def next_gradients(self) -> Gradients:
        """The gradient of the next minibatch, not clipped.

        Raises:
            ValueError: if all minibatches are used.
        """
        if self.done:
            raise ValueError("all minibatches of the batch are used")
        self._left -= 1
        policy, rows = self._policy, next(self._minibatches)
        count = len(rows["obs"])
        if count == 0:
            return policy.no_gradients()
        stats = policy.backward(rows)
        stats["vf_explained_var"] = self._explained
        return Gradients(policy.flat.get_grads(), policy.version, count, stats)
