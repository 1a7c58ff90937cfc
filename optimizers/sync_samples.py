"""SyncSamples: samples of all workers, learned from centrally (A2C, PPO).

RLlib 0.8's SyncSamplesOptimizer; nothing collected is thrown away, and results do not depend on
the order in which samples arrive. Overlapped with learning it is PyTorchRL's overlapped PPO, and
first come first served the flow of data of IMPALA (Espeholt et al., 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer, StepResult
from polopt.optimizers.gathering import DealtOut, FirstReady, Gathering
from polopt.optimizers.scheme import Scheme, check_collection, check_unused, collection_of
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncSamplesConfig(OptimizerConfig):
    """Options of `SyncSamples`.

    Attributes:
        train_batch_size: environment steps of one batch, rounded up to whole fragments; rows lost
            to next-step resets are not made up for. 0: one fragment of each worker, or with
            `collection: async` one of the first that is ready.
        fraction_workers: once this share of the workers has sampled all its part, the others are
            cut short; what they have is used. 1: waits for all, and only then do results not
            depend on timing.
        fraction_samples: but a fragment that is cut short keeps at least this share of its steps.
    """

    train_batch_size: int = pydantic.Field(0, ge=0, le=10**8)
    fraction_workers: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(0.25, ge=0.0, le=1.0)


class SyncSamples(PolicyOptimizer):
    """Broadcast, gather samples from all workers, learn on the driver; then again.

    Workers that have just been started take part from the step on that follows. What a failed
    worker owed the others make up for, so that one that hangs holds up one step. As long as none
    fails, which worker gives which part of a batch is fixed beforehand, so a run is reproducible
    bit for bit for one seed, config and number of workers, also if `collection` is `overlapped`; if
    it is `async` it is not. With `num_workers=0` the local worker samples.
    """

    name = "sync_samples"
    config_class = SyncSamplesConfig
    config: SyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.collection = workers.config.rollout.collection
        self.source = self._make_source()

    def _make_source(self) -> Gathering:
        config = self.config
        given: dict[str, Any] = {
            "workers": self.workers,
            "health": self.health,
            "in_flight": self.in_flight,
            "train_batch_size": config.train_batch_size,
            "usable": self._usable_batch,
        }
        if self.collection == "async":
            return FirstReady(**given)
        return DealtOut(Stragglers(config.fraction_workers, config.fraction_samples), **given)

    def _usable_batch(self, batch: SampleBatch) -> bool:
        return self.usable(batch.worker_index, batch.faults)

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        how = rollout.collection
        check_collection("the driver", "num_workers", rollout)
        check_unused(
            "the driver computes all gradients, so no worker has others below it and none travels",
            num_workers_below=(rollout.num_workers_below, 0),
            compress_gradients=(rollout.compress_gradients, "none"),
        )
        if how == "async":
            why = "in asynchronous collection nobody is waited for"
            check_unused(why, fraction_workers=(config.fraction_workers, 1.0))
        return Scheme(collection_of(rollout.num_workers, how), "central sync", "central")

    def step(self) -> StepResult:
        before = self._counts()
        with self.timers["broadcast"]:
            self.source.launch()
        with self.timers["sample"]:
            fragments = self.source.gather()
            batch = SampleBatch.concat(fragments)
        if self.collection == "overlapped":
            with self.timers["broadcast"]:
                self.source.launch()
        env_steps = batch.env_steps
        self.timers["sample"].push_rows(env_steps)
        self.count_samples(env_steps, batch.episodes)
        for fragment in fragments:
            self.count_lag(fragment.version)
        with self.timers["learn"]:
            version = self.policy.version
            stats = self.policy.learn_on_batch(batch)
        self.rollouts.tick(self.policy.version)
        self.timers["learn"].push_rows(env_steps)
        updates = self.policy.version - version
        if env_steps:
            self.workers.faults.fragments.update(updates > 0, why="gradient of the whole batch")
        self.count_training(env_steps if updates else 0, updates, stats)
        return self._since(before)

    def drain(self) -> None:
        """What is in flight, where collection goes on while the driver learns, is kept for the next
        step."""
        self.source.drain()

    def get_state(self) -> dict[str, Any]:
        """Besides what every optimizer saves, where the workers' environments and random numbers
        stand. A run restored with the same config goes on bit for bit if collection is `sync` and
        the environments have `get_state` and `set_state` (`polopt.rollouts.envs.saving`); if not,
        weights, torch optimizer, schedules and counters go on, episodes start anew, and what was
        collected ahead is collected again."""
        state = super().get_state()
        up = {worker.index: (False,) for worker in self.workers.remote if worker.up}
        states = {0: self.workers.local.get_state(False), **self.workers.call_each("get_state", up)}
        return {**state, "workers": {str(index): saved for index, saved in states.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.source.forget()
        states = state.get("workers", {})
        if "0" in states:
            self.workers.local.set_state(states["0"])
        up = [w.index for w in self.workers.remote if w.up and str(w.index) in states]
        self.workers.call_each("set_state", {index: (states[str(index)],) for index in up})

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_early_stopped": self.source.num_early_stopped,
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
