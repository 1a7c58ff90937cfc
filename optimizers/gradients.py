"""Gradients of workers that the driver applies: what AsyncGradients and SyncGradients share."""

from __future__ import annotations

import pydantic

from polopt.common.compression import GradientPacker, PackedGradients
from polopt.common.weights import Gradients, Weights
from polopt.optimizers.base import OptimizerConfig
from polopt.policies.minibatch_gradients import MinibatchGradients
from polopt.rollouts.workers.rollout_worker import RolloutWorker


class GradientsConfig(OptimizerConfig):
    """Options of optimizers that apply gradients of workers centrally.

    Attributes:
        grads_per_step: gradients that arrive within one `step()`.
    """

    grads_per_step: int = pydantic.Field(100, ge=1, le=10**7)


def compute_gradient(
    worker: RolloutWorker, weights: Weights | None
) -> Gradients | PackedGradients | None:
    """Runs in a worker: takes over weights, samples if the last rollout has no minibatch left, and
    computes the gradient of the next minibatch.

    The rest of the rollout, and what compression has not sent yet, stay in the worker.

    Returns:
        the gradient, packed as `compress_gradients` says; None: it is not finite.
    """
    worker.set_weights(weights)
    rollout: MinibatchGradients | None = worker.state.get("rollout")
    if rollout is None or rollout.done:
        batch = worker.next_batch()
        with worker.phase("gradient"):
            rollout = worker.state["rollout"] = MinibatchGradients(worker.policy, batch)
    with worker.phase("gradient"):
        gradients = rollout.next_gradients()
        return packer_of(worker).pack(gradients) if worker.is_finite(gradients) else None


def packer_of(worker: RolloutWorker) -> GradientPacker:
    """The worker's packer, which holds the residual of `topk`."""
    options = worker.config.rollout
    if "packer" not in worker.state:
        worker.state["packer"] = GradientPacker(options.compress_gradients, options.topk_share)
    packer: GradientPacker = worker.state["packer"]
    return packer
