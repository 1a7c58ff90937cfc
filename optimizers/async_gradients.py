"""AsyncGradients: gradients of remote workers, applied centrally as they come (A3C).

Mnih et al., 2016; RLlib 0.8's AsyncGradientsOptimizer, with the pipeline kept full between steps.
With `sync` the mean of all workers' gradients is applied at once (DPPO; Heess et al., 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic

from polopt.common.compression import unpack_gradients
from polopt.common.weights import Gradients
from polopt.metrics.learner import mean_stats
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer, StepResult
from polopt.optimizers.scheme import (
    Scheme,
    check_collection,
    check_remote_workers,
    check_unused,
    collection_of,
)
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import RoundInfo
from polopt.rollouts.workers.in_flight import Arrival
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class AsyncGradientsConfig(OptimizerConfig):
    """Options of `AsyncGradients`.

    Attributes:
        grads_per_step: gradients that arrive within one `step()`.
        sync: wait for a gradient of every worker, and apply their mean over all rows.
        max_requests_in_flight_per_worker: gradients asked of each worker at once. With 2 it begins
            the next before the last is applied: it never waits, and is one update further behind.
        max_policy_lag: gradients that are more updates old than this are stale; None: none are.
        stale_gradients: `drop` them, or `scale` the learning rate of their update by
            (max_policy_lag + 1) / (lag + 1), after Zhang et al., 2016.
    """

    grads_per_step: int = pydantic.Field(100, ge=1, le=10**7)
    sync: bool = False
    max_requests_in_flight_per_worker: int = pydantic.Field(1, ge=1, le=1000)
    max_policy_lag: int | None = pydantic.Field(None, ge=0)
    stale_gradients: Literal["drop", "scale"] = "drop"

    aliases: ClassVar[Mapping[str, str]] = {
        "max_requests_in_flight_per_env_runner": "max_requests_in_flight_per_worker",
    }


class AsyncGradients(PolicyOptimizer):
    """Every worker samples and computes a gradient on its own weights; the driver applies the
    first that is ready and sends that worker new weights. Nobody waits for anybody else.

    A policy with epochs and minibatches goes through each rollout in as many gradients. Workers
    with others below them (`num_workers_below`) have those sample for them.
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
        places, how = rollout.num_workers, rollout.collection
        check_remote_workers(cls.name, rollout)
        below = rollout.num_workers_below
        check_collection("each worker", "num_workers_below", rollout)
        depth = config.max_requests_in_flight_per_worker
        if config.sync:
            check_unused(
                "with sync=True each update waits for all, so no gradient is ever old",
                max_requests_in_flight_per_worker=(depth, 1),
                max_policy_lag=(config.max_policy_lag, None),
            )
        waits = config.sync or (places == 1 and depth == 1)
        gradients = f"{'central' if places == 1 else 'parallel'} {'sync' if waits else 'async'}"
        return Scheme(collection_of(below, how), gradients, "central")

    def step(self) -> StepResult:
        before = self._counts()
        self._dispatch_all()
        arrived = 0
        while arrived < self.config.grads_per_step:
            with self.timers["wait"]:
                arrivals = self._wait_for_all() if self.config.sync else self._wait_for_one()
            arrived += len(arrivals)
            with self.timers["apply"]:
                self._take(arrivals)
            with self.timers["dispatch"]:
                if self.config.sync:
                    self._dispatch_all()
                else:
                    self._dispatch(arrivals[0].worker)
        return self._since(before)

    def _dispatch_all(self) -> None:
        """Of workers that are not up yet, those that nobody waits for begin as soon as they are."""
        up = self.health.up()
        for worker in up if self.config.sync else self.workers.remote:
            self._dispatch(worker)

    def _dispatch(self, worker: RemoteWorker) -> None:
        """Asks a worker for as many gradients as it may have in hand."""
        while self.in_flight.count(worker) < self.config.max_requests_in_flight_per_worker:
            weights = self.workers.weights_for(worker)
            call = self.workers.call(worker, "sample_and_compute_gradients", weights)
            self.in_flight.launch(worker, call)

    def _wait_for_one(self) -> list[Arrival]:
        while True:
            arrival = self.in_flight.wait()
            if arrival.failure is None:
                return [arrival]
            fresh = self.workers.replace(arrival.worker, arrival.failure)
            if fresh is not None:
                self._dispatch(fresh)

    def _wait_for_all(self) -> list[Arrival]:
        """In order of index: sums must not depend on who came first. Of a worker that failed there
        is none; its replacement takes part as soon as it is up."""
        arrivals: dict[int, Arrival] = {}
        while len(self.in_flight):
            arrival = self.in_flight.wait()
            if arrival.failure is None:
                arrivals[arrival.worker.index] = arrival
            else:
                self.workers.replace(arrival.worker, arrival.failure)
        return [arrivals[index] for index in sorted(arrivals)]

    def _take(self, arrivals: list[Arrival]) -> None:
        """Applies the mean of those that may be learned from."""
        rounds = [arrival.value for arrival in arrivals]
        usable = [r for r in rounds if self.usable(r[1].worker_index, r[1].faults)]
        for _, info in rounds:
            self.workers.faults.num_restarts_below += info.restarts_below
        if usable:
            self._apply(*_mean(usable))

    def _apply(self, gradients: Gradients, infos: list[RoundInfo]) -> None:
        for info in infos:
            self.count_samples(info.env_steps, info.episodes)
            self.num_gradients += 1
            self.count_lag(info.acted, gradients.version)
        lag = self.policy.version - gradients.version
        lr_scale = self._lr_scale(lag)
        if lr_scale < 1.0:
            self.num_stale_gradients += 1
        if lr_scale > 0.0 and gradients.rows > 0:
            version = self.policy.version
            stats = gradients.stats | self.policy.apply_gradients(gradients, lr_scale)
            updates = self.policy.version - version
            blamed = infos[0].worker_index
            self.workers.faults.fragments.update(updates > 0, blamed, "norm of its gradient")
            fresh = sum(info.fresh for info in infos) if updates else 0
            self.count_training(fresh, updates, stats, gradients.rows)
        if any(info.last for info in infos):
            self.rollouts.tick(self.policy.version)

    def _lr_scale(self, lag: int) -> float:
        bound = self.config.max_policy_lag
        if bound is None or lag <= bound:
            return 1.0
        return 0.0 if self.config.stale_gradients == "drop" else (bound + 1) / (lag + 1)

    def drain(self) -> None:
        if self.config.sync:
            self._take(self._wait_for_all())
        while self.in_flight.num_begun:
            arrival: Arrival = self.in_flight.wait()
            if arrival.failure is not None:
                self.workers.replace(arrival.worker, arrival.failure)
            else:
                self._take([arrival])

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_gradients": self.num_gradients,
            "num_stale_gradients": self.num_stale_gradients,
        }


def _mean(rounds: list[tuple[Any, RoundInfo]]) -> tuple[Gradients, list[RoundInfo]]:
    """The gradient of the mean loss over all their rows, and what each told besides."""
    parts = [unpack_gradients(gradients) for gradients, _ in rounds]
    infos = [info for _, info in rounds]
    if len(parts) == 1:
        return parts[0], infos
    rows = sum(part.rows for part in parts)
    flat = np.zeros_like(parts[0].flat)
    for part in parts:
        if part.rows:
            flat += part.flat * np.float32(part.rows / rows)
    stats = mean_stats([(part.stats, part.rows) for part in parts if part.rows])
    return Gradients(flat, min(part.version for part in parts), rows, stats), infos
