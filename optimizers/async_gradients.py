"""AsyncGradients: asynchronous gradients of remote workers, applied centrally (A3C).

Mnih et al., 2016; RLlib 0.8's AsyncGradientsOptimizer, with the pipeline kept full between steps.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pydantic

from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer, StepResult
from polopt.policies.transport import Gradients
from polopt.rollouts.in_flight import Arrival
from polopt.rollouts.remote_worker import RemoteWorker
from polopt.rollouts.worker import RoundInfo


class AsyncGradientsConfig(OptimizerConfig):
    """Options of `AsyncGradients`.

    Attributes:
        grads_per_step: gradients that arrive within one `step()`.
        max_policy_lag: gradients that are more updates old than this are stale; None: none are.
        stale_gradients: `drop` them, or `scale` the learning rate of their update by
            (max_policy_lag + 1) / (lag + 1), after Zhang et al., 2016.
    """

    grads_per_step: int = pydantic.Field(100, ge=1, le=10**7)
    max_policy_lag: int | None = pydantic.Field(None, ge=0)
    stale_gradients: Literal["drop", "scale"] = "drop"


class AsyncGradients(PolicyOptimizer):
    """Every worker samples and computes a gradient on its own weights; the driver applies the
    first that is ready and sends that worker new weights. Nobody waits for anybody else."""

    name = "async_gradients"
    config_class = AsyncGradientsConfig
    config: AsyncGradientsConfig
    phases: ClassVar[tuple[str, ...]] = ("wait", "apply", "dispatch")
    needs_remote_workers = True

    num_gradients = 0
    num_stale_gradients = 0

    def step(self) -> StepResult:
        before = self._counts()
        self.muster.up()
        for worker in self.workers.remote:  # those that are not up yet begin as soon as they are
            if self.in_flight.count(worker) == 0:
                self._dispatch(worker)
        arrived = 0
        while arrived < self.config.grads_per_step:
            with self.timers["wait"]:
                arrival = self.in_flight.wait()
            if arrival.failure is not None:
                fresh = self.workers.replace(arrival.worker, arrival.failure)
                if fresh is not None:
                    self._dispatch(fresh)
                continue
            arrived += 1
            with self.timers["apply"]:
                self._apply(*arrival.value)
            with self.timers["dispatch"]:
                self._dispatch(arrival.worker)
        return self._since(before)

    def _dispatch(self, worker: RemoteWorker) -> None:
        weights = self.workers.weights_for(worker)
        call = worker.actor.sample_and_compute_gradients.remote(weights)
        self.in_flight.launch(worker, call)

    def _apply(self, gradients: Gradients, info: RoundInfo) -> None:
        if not self.usable(info.worker_index, info.faults):
            return
        self.count_samples(info.env_steps, info.episodes)
        self.num_gradients += 1
        lag = self.policy.version - gradients.version
        self.lag.add(lag)
        lr_scale = self._lr_scale(lag)
        if lr_scale < 1.0:
            self.num_stale_gradients += 1
        if lr_scale == 0.0 or gradients.rows == 0:
            return
        version = self.policy.version
        stats = gradients.stats | self.policy.apply_gradients(gradients, lr_scale)
        updates = self.policy.version - version
        self.workers.faults.fragments.update(updates > 0, info.worker_index, "norm of its gradient")
        self.count_training(gradients.rows if updates else 0, updates, stats)

    def _lr_scale(self, lag: int) -> float:
        bound = self.config.max_policy_lag
        if bound is None or lag <= bound:
            return 1.0
        return 0.0 if self.config.stale_gradients == "drop" else (bound + 1) / (lag + 1)

    def drain(self) -> None:
        while self.in_flight.num_begun:
            arrival: Arrival = self.in_flight.wait()
            if arrival.failure is not None:
                self.workers.replace(arrival.worker, arrival.failure)
            else:
                self._apply(*arrival.value)

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_gradients": self.num_gradients,
            "num_stale_gradients": self.num_stale_gradients,
        }
