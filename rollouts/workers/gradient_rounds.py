"""`GradientRounds`: a worker's minibatch gradients of successive rollouts, for central updates."""

from __future__ import annotations

import time

from polopt.common.compression import GradientCodec, GradientPacker, PackedGradients
from polopt.common.sample_batch import SampleBatch
from polopt.common.tracing import TRACER
from polopt.common.weights import Gradients
from polopt.policies.minibatch_gradients import MinibatchGradients
from polopt.policies.policy import Policy
from polopt.rollouts.sampling.non_finite import non_finite_gradient
from polopt.rollouts.sampling.requests import RoundInfo


class GradientRounds:
    """The minibatches of the current rollout, and the residual of compression.

    Args:
        codec: of the gradients; see `polopt.common.compression`.
        topk_share: share of the elements that `topk` sends.

    Attributes:
        minibatches: gradients of the current rollout; None before the first.
    """

    def __init__(self, codec: GradientCodec, topk_share: float) -> None:
        self._packer = GradientPacker(codec, topk_share)
        self.minibatches: MinibatchGradients | None = None

    @property
    def done(self) -> bool:
        """Whether the current rollout has no minibatch left."""
        return self.minibatches is None or self.minibatches.done

    def begin(self, policy: Policy, batch: SampleBatch) -> None:
        """Makes `batch` the current rollout, unless it holds non-finite values."""
        usable = not batch.faults.non_finite
        self.minibatches = MinibatchGradients(policy, batch) if usable else None

    def next_gradients(
        self, policy: Policy, info: RoundInfo
    ) -> tuple[Gradients | PackedGradients, RoundInfo]:
        """The gradient of the next minibatch, packed; an empty one if there is no rollout.

        Args:
            policy: computes it.
            info: of the round, which is returned completed.
        """
        minibatches = self.minibatches
        if minibatches is None:
            return policy.no_gradients(), info
        started_s = time.perf_counter()
        fresh = minibatches.first_epoch
        gradients = minibatches.next_gradients()
        problem = non_finite_gradient(gradients)
        if problem:
            info = info._replace(faults=info.faults._replace(non_finite=problem))
        packed = self._packer.pack(gradients)
        return packed, info._replace(
            fresh=gradients.rows if fresh else 0,
            last=minibatches.done,
            gradient_s=TRACER.span("worker", "gradient", started_s),
        )

    def clear(self) -> None:
        """Drops the current rollout and the residual of compression."""
        self.minibatches = self._packer.residual = None
