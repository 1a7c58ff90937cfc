"""SyncGradients: the mean of all workers' gradients, applied centrally (DPPO).

Heess et al., 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from polopt.common.compression import unpack_gradients
from polopt.common.weights import Gradients
from polopt.metrics.learner import mean_stats
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.async_gradients import GradientsConfig
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.optimizers.central_updates import apply_gradients, is_usable
from polopt.optimizers.scheme import (
    Scheme,
    check_collection,
    check_remote_workers,
    collection_of,
)
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import RoundInfo
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncGradientsConfig(GradientsConfig):
    """Options of `SyncGradients`; those of `GradientsConfig`."""


class SyncGradients(PolicyOptimizer):
    """Broadcasts weights, waits for a gradient of every worker, and applies their mean over all
    rows.

    Workers that have just started take part once they are up. A worker that fails is missing in the
    update. Otherwise a run is reproducible bit for bit for one seed, config and number of workers.
    """

    name = "sync_gradients"
    config_class = SyncGradientsConfig
    config: SyncGradientsConfig
    phases: ClassVar[tuple[str, ...]] = ("wait", "apply", "dispatch")

    num_gradients = 0

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        workers.use_transport(self.policy.flat.grads.nbytes)

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        check_remote_workers(cls.name, rollout)
        check_collection("each worker", "num_workers_below", rollout)
        place = "central" if rollout.num_workers == 1 else "parallel"
        collection = collection_of(rollout.num_workers_below, rollout.collection)
        return Scheme(collection, f"{place} sync", "central")

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["dispatch"]:
            self._dispatch()
        arrived = 0
        while arrived < self.config.grads_per_step:
            with self.timers["wait"]:
                rounds = list(self.in_flight.gather().values())
            arrived += len(rounds)
            with self.timers["apply"]:
                self._apply(rounds)
            with self.timers["dispatch"]:
                self._dispatch()
        return self.metrics.counts_since(before)

    def _dispatch(self) -> None:
        """Sends weights to every worker that is up, and requests a gradient."""
        for worker in self.health.up():
            if self.in_flight.count(worker) == 0:
                weights = self.workers.weights_for(worker)
                call = self.workers.call(worker, "sample_and_compute_gradients", weights)
                self.in_flight.launch(worker, call)

    def _apply(self, rounds: Sequence[tuple[Any, RoundInfo]]) -> None:
        usable = [each for each in rounds if is_usable(self, *each)]
        if usable:
            self.num_gradients += len(usable)
            mean = mean_gradients([unpack_gradients(packed) for packed, _ in usable])
            apply_gradients(self, mean, [info for _, info in usable])

    def drain(self) -> None:
        """Waits for pending gradients, and applies them."""
        self._apply(list(self.in_flight.gather().values()))

    def extra_stats(self) -> dict[str, Any]:
        return {"num_gradients": self.num_gradients}


def mean_gradients(parts: Sequence[Gradients]) -> Gradients:
    """The gradient of the mean loss over all rows of several gradients."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.rows for part in parts)
    flat = np.zeros_like(parts[0].flat)
    for part in parts:
        if part.rows:
            flat += part.flat * np.float32(part.rows / rows)
    stats = mean_stats([(part.stats, part.rows) for part in parts if part.rows])
    return Gradients(flat, min(part.version for part in parts), rows, stats)
