"""`MinibatchGradients`: gradients of the minibatches of one batch; the caller applies them."""

from __future__ import annotations

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.policy import Policy


class MinibatchGradients:
    """Iterates over a batch like `Policy.learn_on_batch`, in epochs of minibatches.

    Each gradient is computed with the weights of that moment, and the caller applies it.

    Args:
        policy: computes the gradients; see `Policy.minibatch_gradients`.
        batch: postprocessed.

    Attributes:
        version: version of the weights that chose the actions of the batch.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        parts, epochs = policy.num_minibatches(batch)
        self._later = parts * (epochs - 1)  # gradients after the first epoch
        self._left = parts * epochs
        self._gradients = policy.minibatch_gradients(batch)
        self.version = batch.version

    @property
    def done(self) -> bool:
        """Whether all minibatches of all epochs are used."""
        return self._left == 0

    @np.errstate(all="ignore")
    def next_gradients(self) -> Gradients:
        """The gradient of the next minibatch, not clipped.

        Raises:
            ValueError: if all minibatches are used.
        """
        if self.done:
            raise ValueError("all minibatches of the batch are used")
        first_epoch = self._left > self._later
        self._left -= 1
        gradients = next(self._gradients)
        new_rows = gradients.rows if first_epoch else 0
        return gradients._replace(new_rows=new_rows, ends_rollout=self.done, acted=self.version)
