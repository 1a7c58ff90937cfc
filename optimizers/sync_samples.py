"""SyncSamples: samples of all workers, learned from centrally (A2C, PPO).

RLlib 0.8's SyncSamplesOptimizer. All samples are used, and results do not depend on the order in
which they arrive. Overlapped with learning, it is PyTorchRL's overlapped PPO.
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
from polopt.optimizers.scheme import Scheme, check_central_gradients, collection_of
from polopt.rollouts.collectors.gatherer import Gatherer, Slot
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import SampleRequest, next_number
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncSamplesConfig(OptimizerConfig):
    """Options of `SyncSamples`.

    Attributes:
        train_batch_size: environment steps of one batch, rounded up to whole fragments; rows lost
            to next-step resets are not made up for. 0: one fragment of each worker.
        fraction_workers: once this share of the workers has sampled all its fragments, the others
            stop early; their samples are used. 1: waits for all, and only then do results not
            depend on timing.
        fraction_samples: a fragment that stops early keeps at least this share of its steps.
    """

    train_batch_size: int = pydantic.Field(0, ge=0, le=10**8)
    fraction_workers: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(0.25, ge=0.0, le=1.0)


class SyncSamples(PolicyOptimizer):
    """Broadcasts weights, gathers samples from all workers, and learns in the driver.

    Workers that have just started take part from the next step on. Fragments of a failed worker
    are reassigned to the others, so a worker that hangs delays one step. As long as none fails, a
    run is reproducible bit for bit for one seed, config and number of workers, also if `collection`
    is `overlapped`. With `num_workers=0` the local worker samples.
    """

    name = "sync_samples"
    config_class = SyncSamplesConfig
    config: SyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.gatherer = Gatherer(
            workers,
            request=lambda _: SampleRequest(next_number()),
            weights_for=workers.weights_for,
            reassign_to=self.health.up,
            stragglers=Stragglers(self.config.fraction_workers, self.config.fraction_samples),
        )
        self.in_flight = self.gatherer.in_flight
        workers.use_transport(sample_message_bytes(self))

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        if rollout.collection == "async" and rollout.num_workers > 0:
            raise ConfigError(
                "key 'collection': got 'async' with optimizer 'sync_samples'. Allowed: 'sync', "
                "'overlapped', or optimizer 'async_samples'"
            )
        check_central_gradients(rollout)
        collection = collection_of(rollout.num_workers, rollout.collection)
        return Scheme(collection, "central sync", "central")

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["broadcast"]:
            self._launch()
        with self.timers["sample"]:
            self._gather()
            fragments = [take_fragment(self, landed) for landed in self.gatherer.take_all()]
            batch = SampleBatch.concat(fragments)
        if self.workers.config.rollout.collection == "overlapped":
            with self.timers["broadcast"]:
                self._launch()
        learn_from_samples(self, fragments, batch)
        return self.metrics.counts_since(before)

    def _launch(self) -> None:
        """Sends weights and launches the first fragment of each worker, unless that was done."""
        if self.gatherer.idle and self._has_remote_workers:
            up = self.health.up()
            self.gatherer.deal(num_fragments(self, default=len(up)), up)

    @property
    def _has_remote_workers(self) -> bool:
        return bool(self.workers.remote) or self.workers.config.rollout.num_workers > 0

    def _gather(self) -> None:
        if not self._has_remote_workers:
            for i in range(num_fragments(self, default=1)):
                self.gatherer.sample_locally(Slot(0, i))
        self.gatherer.wait_for_all()

    def drain(self) -> None:
        """Waits for pending fragments, and keeps them for the next step."""
        self.gatherer.wait_for_all()

    def get_state(self) -> dict[str, Any]:
        """As every optimizer's, and the state of the workers' environments and random numbers.

        A run restored with the same config continues bit for bit if collection is `sync` and the
        environments have `get_state` and `set_state` (`polopt.rollouts.envs.saving`). Otherwise
        weights, torch optimizer, schedules and counters continue, episodes start again, and
        fragments collected ahead are collected again."""
        state = super().get_state()
        up = {worker.index: (False,) for worker in self.workers.remote if worker.up}
        states = {0: self.workers.local.get_state(False), **self.workers.call_each("get_state", up)}
        return {**state, "workers": {str(index): saved for index, saved in states.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.gatherer.landed.clear()
        states = state.get("workers", {})
        if "0" in states:
            self.workers.local.set_state(states["0"])
        up = [w.index for w in self.workers.remote if w.up and str(w.index) in states]
        self.workers.call_each("set_state", {index: (states[str(index)],) for index in up})

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_early_stopped": self.gatherer.num_early_stopped,
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
