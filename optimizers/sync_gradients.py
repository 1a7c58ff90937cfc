"""SyncGradients: the driver averages and applies the gradients of all workers (DPPO).

The strategy follows Heess et al., 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from polopt.common.compression import unpack_gradients
from polopt.common.weights import Gradients
from polopt.metrics.learner import mean_stats
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.async_gradients import GradientsConfig, compute_gradient
from polopt.optimizers.collection_checks import check_collection
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncGradientsConfig(GradientsConfig):
    """Options of `SyncGradients`. They are the options of `GradientsConfig`."""


class SyncGradients(PolicyOptimizer):
    """Sends weights to all workers, waits for a gradient from each worker, and applies the mean
    gradient over all rows.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="ppo",
            optimizer={"name": "sync_gradients", "grads_per_step": 40},
            num_workers=4,
        )

    A worker that starts during the run takes part in all updates after its start. If a worker
    fails, the driver makes the update without the gradient of this worker. As long as no worker
    fails or starts late, a run is reproducible bit for bit for one seed, config and number of
    workers. With `num_workers_below`, this is not true for `collection: async` or for
    `fraction_workers_below` below 1, because results then depend on timing.
    """

    name = "sync_gradients"
    config_class = SyncGradientsConfig
    config: SyncGradientsConfig
    needs_gradients = True
    phases: ClassVar[tuple[str, ...]] = ("wait", "apply", "dispatch")
    after_failure = "drop"

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.check = self.policy.check_gradients

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        check_collection("each worker", "num_workers_below", rollout)

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["dispatch"]:
            self._request()
        arrived = 0
        while arrived < self.config.grads_per_step:
            with self.timers["wait"]:
                replies = self.calls.all()
            arrived += len(replies)
            with self.timers["apply"]:
                self._apply_mean([reply.value for reply in replies])
            with self.timers["dispatch"]:
                self._request()
        return self.metrics.counts_since(before)

    def _request(self) -> None:
        """Sends weights to all workers that are up, and requests a gradient from each worker. Does
        nothing if calls are pending, or if their replies have not been taken yet."""
        if self.calls.idle:
            self.calls.fill(compute_gradient, self.workers.up())

    def _apply_mean(self, values: Sequence[Any]) -> None:
        finite = [unpack_gradients(value) for value in values if value is not None]
        for _ in range(len(values) - len(finite)):
            self.apply(None)
        if finite:
            self.apply(mean_gradients(finite), parts=finite)


@np.errstate(all="ignore")
def mean_gradients(parts: Sequence[Gradients]) -> Gradients:
    """Returns the mean of several gradients, weighted by their numbers of rows. This mean is the
    gradient of the mean loss over all rows."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.rows for part in parts)
    flat = np.zeros_like(parts[0].flat)
    for part in parts:
        if part.rows:
            flat += part.flat * np.float32(part.rows / rows)
    stats = mean_stats([(part.stats, part.rows) for part in parts if part.rows])
    return Gradients(
        flat,
        min(part.version for part in parts),
        rows,
        stats,
        new_rows=sum(part.new_rows for part in parts),
        ends_rollout=any(part.ends_rollout for part in parts),
        acted=min(part.acted for part in parts),
    )
