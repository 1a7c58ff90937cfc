"""AsyncGradients: gradients of remote workers, applied centrally as they arrive (A3C).

Mnih et al., 2016; RLlib 0.8's AsyncGradientsOptimizer, with calls kept pending between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from polopt.common.compression import unpack_gradients
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.optimizers.central_updates import apply_gradients, is_usable
from polopt.optimizers.scheme import (
    Scheme,
    check_collection,
    check_remote_workers,
    collection_of,
)
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers.in_flight import Arrival
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class GradientsConfig(OptimizerConfig):
    """Options of optimizers that apply gradients of workers centrally.

    Attributes:
        grads_per_step: gradients that arrive within one `step()`.
    """

    grads_per_step: int = pydantic.Field(100, ge=1, le=10**7)


class AsyncGradientsConfig(GradientsConfig):
    """Options of `AsyncGradients`.

    Attributes:
        max_requests_in_flight_per_worker: gradients requested of each worker at once. With 2, a
            worker begins the next before the last is applied: it never waits, and its weights are
            one update older.
        max_policy_lag: gradients that are more updates old than this are stale; None: none are.
        stale_gradients: `drop` them, or `scale` the learning rate of their update by
            (max_policy_lag + 1) / (lag + 1), after Zhang et al., 2016.
        sync: only False; True is the optimizer `sync_gradients`.
    """

    max_requests_in_flight_per_worker: int = pydantic.Field(1, ge=1, le=1000)
    max_policy_lag: int | None = pydantic.Field(None, ge=0)
    stale_gradients: Literal["drop", "scale"] = "drop"
    sync: bool = False

    aliases: ClassVar[Mapping[str, str]] = {
        "max_requests_in_flight_per_env_runner": "max_requests_in_flight_per_worker",
    }

    @pydantic.model_validator(mode="after")
    def _check_sync(self) -> AsyncGradientsConfig:
        if self.sync:
            raise ValueError(
                "key 'sync': got True with optimizer 'async_gradients'. Allowed: False, or "
                "optimizer 'sync_gradients'"
            )
        return self


class AsyncGradients(PolicyOptimizer):
    """Every worker samples and computes a gradient on its own weights. The driver applies the first
    gradient that arrives, and sends that worker new weights. No barriers.

    A policy with epochs and minibatches makes several gradients of each rollout. Gradient workers
    (`num_workers_below`) compute them from samples of the workers below them.
    """

    name = "async_gradients"
    config_class = AsyncGradientsConfig
    config: AsyncGradientsConfig
    phases: ClassVar[tuple[str, ...]] = ("wait", "apply", "dispatch")

    num_gradients = 0
    num_stale_gradients = 0

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        workers.use_transport(self.policy.flat.grads.nbytes)

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        check_remote_workers(cls.name, rollout)
        check_collection("each worker", "num_workers_below", rollout)
        waits = rollout.num_workers == 1 and config.max_requests_in_flight_per_worker == 1
        place = "central" if rollout.num_workers == 1 else "parallel"
        collection = collection_of(rollout.num_workers_below, rollout.collection)
        return Scheme(collection, f"{place} {'sync' if waits else 'async'}", "central")

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["wait"]:
            self.health.up()  # waits until the run can begin, and pings workers that are not up
        with self.timers["dispatch"]:
            for worker in self.workers.remote:
                self._dispatch(worker)
        for _ in range(self.config.grads_per_step):
            with self.timers["wait"]:
                arrival = self._wait()
            with self.timers["apply"]:
                self._apply(arrival)
            with self.timers["dispatch"]:
                self._dispatch(arrival.worker)
        return self.metrics.counts_since(before)

    def _dispatch(self, worker: RemoteWorker) -> None:
        """Requests as many gradients as a worker may have pending. A worker that is not up yet
        begins once it is."""
        while self.in_flight.count(worker) < self.config.max_requests_in_flight_per_worker:
            weights = self.workers.weights_for(worker)
            call = self.workers.call(worker, "sample_and_compute_gradients", weights)
            self.in_flight.launch(worker, call)

    def _wait(self) -> Arrival:
        """The first gradient that arrives; workers that fail meanwhile are replaced."""
        while True:
            arrival = self.in_flight.wait()
            if arrival.failure is None:
                return arrival
            fresh = self.workers.replace(arrival.worker, arrival.failure)
            if fresh is not None:
                self._dispatch(fresh)

    def _apply(self, arrival: Arrival) -> None:
        packed, info = arrival.value
        if not is_usable(self, packed, info):
            return
        gradients = unpack_gradients(packed)
        lr_scale = self._lr_scale(self.policy.version - gradients.version)
        self.num_gradients += 1
        self.num_stale_gradients += lr_scale < 1.0
        self.metrics.num_gradients_stale = self.num_stale_gradients
        apply_gradients(self, gradients, [info], lr_scale)

    def _lr_scale(self, lag: int) -> float:
        bound = self.config.max_policy_lag
        if bound is None or lag <= bound:
            return 1.0
        return 0.0 if self.config.stale_gradients == "drop" else (bound + 1) / (lag + 1)

    def drain(self) -> None:
        """Waits for pending gradients of workers that are up, and applies them."""
        while self.in_flight.num_begun:
            arrival = self.in_flight.wait()
            if arrival.failure is None:
                self._apply(arrival)
            else:
                self.workers.replace(arrival.worker, arrival.failure)

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_gradients": self.num_gradients,
            "num_stale_gradients": self.num_stale_gradients,
        }
