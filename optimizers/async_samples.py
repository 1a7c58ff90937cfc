"""AsyncSamples: learns from the fragments that are ready; workers do not wait for the learner.

Data flow of IMPALA (Espeholt et al., 2018) and RLlib's APPO, without V-trace: policies correct for
the lag of the samples themselves, as PPO's importance ratio does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.optimizers.central_updates import (
    learn_from_samples,
    num_fragments,
    sample_message_bytes,
    take_fragment,
)
from polopt.optimizers.scheme import (
    Scheme,
    check_central_gradients,
    check_remote_workers,
    collection_of,
)
from polopt.rollouts.collectors.gatherer import Gatherer, Slot
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import SampleRequest, next_number
from polopt.rollouts.workers.worker_set import WorkerSet


class AsyncSamplesConfig(OptimizerConfig):
    """Options of `AsyncSamples`.

    Attributes:
        train_batch_size: environment steps of one batch, rounded up to whole fragments. 0: one
            fragment.
    """

    train_batch_size: int = pydantic.Field(0, ge=0, le=10**8)


class AsyncSamples(PolicyOptimizer):
    """Learns from the first fragments that arrive. A worker whose fragment has arrived gets new
    weights and samples the next one at once, so workers sample while the driver learns.

    Results depend on timing. A failed worker's fragment is launched on its replacement.
    """

    name = "async_samples"
    config_class = AsyncSamplesConfig
    config: AsyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.gatherer = Gatherer(
            workers,
            request=lambda _: SampleRequest(next_number()),
            weights_for=workers.weights_for,
        )
        self.in_flight = self.gatherer.in_flight
        workers.use_transport(sample_message_bytes(self))

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        check_remote_workers(cls.name, rollout)
        if rollout.collection == "overlapped":
            raise ConfigError(
                "key 'collection': got 'overlapped' with optimizer 'async_samples', which always "
                "collects while it learns. Allowed: 'async', or optimizer 'sync_samples'"
            )
        rollout = rollout.model_copy(update={"collection": "async"})
        check_central_gradients(rollout)
        return Scheme(collection_of(rollout.num_workers, "async"), "central sync", "central")

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["broadcast"]:
            self._launch()
        fragments = []
        with self.timers["sample"]:
            for _ in range(num_fragments(self, default=1)):
                while not self.gatherer.landed:
                    self.gatherer.receive()
                    self._launch()
                fragments.append(take_fragment(self, self.gatherer.landed.popleft()))
                self._launch()
            batch = SampleBatch.concat(fragments)
        learn_from_samples(self, fragments, batch)
        return self.metrics.counts_since(before)

    def _launch(self) -> None:
        """Sends weights to every idle worker, and launches a fragment there."""
        for worker in self.health.up():
            if self.gatherer.is_idle(worker):
                weights = self.workers.weights_for(worker)
                self.gatherer.launch(worker, Slot(worker.index), weights)

    def drain(self) -> None:
        """Waits for pending fragments of workers that are up, and keeps them for the next step."""
        while self.in_flight.num_begun:
            self.gatherer.receive()

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.gatherer.landed.clear()

    def extra_stats(self) -> dict[str, Any]:
        return {
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
