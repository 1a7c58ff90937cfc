"""`MinibatchGradients`: gradients of the minibatches of one batch. The caller applies them."""

from __future__ import annotations

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.policy import Policy


class MinibatchGradients:
    """Computes the gradients of `Policy.minibatch_gradients`, one per call of `next_gradients`.

    Each gradient is computed with the weights that the policy has at the time of the call. The
    caller applies the gradient, in this process or in another one.

    Args:
        policy: the policy that computes the gradients. See `Policy.minibatch_gradients`.
        batch: a postprocessed batch.

    Attributes:
        version: version of the weights that chose the actions of the batch. If several versions
            chose actions, this is the oldest version.
        done: whether `next_gradients` has returned the last gradient of the batch.
    """

    def __init__(self, policy: Policy, batch: SampleBatch) -> None:
        self._gradients = policy.minibatch_gradients(batch)
        self.version = batch.version
        self.done = False

    @np.errstate(all="ignore")
    def next_gradients(self) -> Gradients:
        """Computes the next gradient. The gradient is not clipped.

        Raises:
            ValueError: the batch has no more minibatches.
        """
        if self.done:
            raise ValueError("all minibatches of the batch are used")
        gradients = next(self._gradients)
        self.done = gradients.ends_rollout
        return gradients._replace(acted=self.version)
