"""`MinibatchGradients`: gradients of the minibatches of one batch. The caller applies them."""

from __future__ import annotations

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.policy import Policy


class MinibatchGradients:
    """The gradients that `Policy.learn_on_batch` would apply, one after the other.

    Each gradient is computed with the weights of that moment, and the caller applies it.

    Args:
        policy: computes the gradients. See `Policy.minibatch_gradients`.
        batch: postprocessed.

    Attributes:
        version: version of the weights that chose the actions of the batch.
        done: whether the last gradient of the batch was taken.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        self._gradients = policy.minibatch_gradients(batch)
        self.version = batch.version
        self.done = False

    @np.errstate(all="ignore")
    def next_gradients(self) -> Gradients:
        """The next gradient, not clipped.

        Raises:
            ValueError: all minibatches have been used.
        """
        if self.done:
            raise ValueError("all minibatches of the batch are used")
        gradients = next(self._gradients)
        self.done = gradients.ends_rollout
        return gradients._replace(acted=self.version)
