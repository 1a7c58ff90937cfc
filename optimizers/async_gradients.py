"""AsyncGradients: the driver applies the gradients of remote workers as they arrive (A3C).

The strategy follows Mnih et al., 2016, and RLlib 0.8's AsyncGradientsOptimizer. Unlike in RLlib,
calls stay pending between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from polopt.common.compression import GradientPacker, PackedGradients
from polopt.common.weights import Gradients, Weights
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.collection_checks import check_collection
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.gathering import current_rollout
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class GradientsConfig(OptimizerConfig):
    """Options of optimizers whose driver applies the gradients of workers.

    Attributes:
        grads_per_step: number of gradients that the driver receives in one `step()`.
            `sync_gradients` takes the gradients of all workers at once, so a step of this optimizer
            may receive more gradients than this number.
    """

    grads_per_step: int = pydantic.Field(default=100, ge=1, le=10**7)


class AsyncGradientsConfig(GradientsConfig):
    """Options of `AsyncGradients`.

    Attributes:
        max_requests_in_flight_per_worker: number of gradients that the driver requests from each
            worker at once. With 2, a worker begins its next gradient before the driver has applied
            the worker's previous gradient. So the worker does not wait for the driver, but its
            weights are older than with 1.
        max_policy_lag: maximum lag of a gradient. The lag is the number of updates that the driver
            has made since it sent the weights for this gradient. A gradient with a larger lag is
            stale. None means that no gradient is stale.
        stale_gradients: what the driver does with stale gradients. `drop` ignores them. `scale`
            multiplies the learning rate of their update by (max_policy_lag + 1) / (lag + 1), after
            Zhang et al., 2016.
    """

    max_requests_in_flight_per_worker: int = pydantic.Field(default=1, ge=1, le=1000)
    max_policy_lag: int | None = pydantic.Field(default=None, ge=0)
    stale_gradients: Literal["drop", "scale"] = "drop"

    removed: ClassVar[Mapping[str, str]] = {
        "sync": "use optimizer 'sync_gradients', which waits for all workers",
    }


def compute_gradient(
    worker: RolloutWorker, weights: Weights | None
) -> Gradients | PackedGradients | None:
    """Runs in a worker: sets the weights, and computes the gradient of the next minibatch. Samples
    a new rollout once all minibatches of the previous rollout were used.

    The worker keeps the unused minibatches of the rollout, and the parts of gradients that
    compression has not sent yet.

    Returns:
        the gradient, compressed as `compress_gradients` says. None if the gradient is not finite.
    """
    worker.set_weights(weights)
    rollout = current_rollout(worker)
    with worker.phase("gradient"):
        gradients = rollout.next_gradients()
        return packer_of(worker).pack(gradients) if worker.is_finite(gradients) else None


def packer_of(worker: RolloutWorker) -> GradientPacker:
    """Returns the worker's packer, which keeps the parts of gradients that `topk` has not sent
    yet."""
    options = worker.config.rollout
    if "packer" not in worker.state:
        worker.state["packer"] = GradientPacker(options.compress_gradients, options.topk_share)
    packer: GradientPacker = worker.state["packer"]
    return packer


class AsyncGradients(PolicyOptimizer):
    """Every worker samples and computes a gradient with its own copy of the weights. The driver
    applies the first gradient that arrives, and sends new weights to the worker that computed this
    gradient. The driver does not wait for the gradients of the other workers.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="a2c",
            optimizer={"name": "async_gradients", "max_policy_lag": 8, "stale_gradients": "scale"},
            num_workers=4,
        )

    A policy with epochs and minibatches computes several gradients from each rollout. With
    `num_workers_below`, each worker computes gradients from the samples of its own workers (the
    workers below it), and does not sample itself.
    """

    name = "async_gradients"
    config_class = AsyncGradientsConfig
    config: AsyncGradientsConfig
    needs_gradients = True
    phases: ClassVar[tuple[str, ...]] = ("wait", "apply", "dispatch")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.per_worker = self.config.max_requests_in_flight_per_worker
        self.calls.check = self.policy.check_gradients

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        check_collection("each worker", "num_workers_below", rollout)

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["wait"]:
            workers = self.workers.up()
        with self.timers["dispatch"]:
            self.calls.fill(compute_gradient, workers)
        for _ in range(self.config.grads_per_step):
            with self.timers["wait"]:
                reply = self.calls.first()
            with self.timers["apply"]:
                self.apply(reply.value, self._lr_scale(reply.value))
            with self.timers["dispatch"]:
                self.calls.fill(compute_gradient, [reply.worker])
        return self.metrics.counts_since(before)

    def _lr_scale(self, gradients: Any) -> float:
        """Returns the factor by which the learning rate is multiplied for a gradient. The factor is
        below 1 for a stale gradient."""
        bound = self.config.max_policy_lag
        lag = 0 if gradients is None else self.policy.version - gradients.version
        if bound is None or lag <= bound:
            return 1.0
        return 0.0 if self.config.stale_gradients == "drop" else (bound + 1) / (lag + 1)
