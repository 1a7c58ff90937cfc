"""SyncSamples: samples of all workers, learned from centrally (A2C, PPO).

RLlib 0.8's SyncSamplesOptimizer. All samples are used, and results do not depend on the order in
which they arrive. Overlapped with learning, it is PyTorchRL's overlapped PPO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from polopt.common.config import Automatic, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.metrics import plots
from polopt.metrics.optimizer_stats import StepResult
from polopt.metrics.tab import Tab
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.optimizers.checks import check_central_gradients
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.calls import WEIGHTS
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.set_up import call_each, set_up_each
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncSamplesConfig(OptimizerConfig):
    """Options of `SyncSamples`.

    Attributes:
        train_batch_size: environment steps of one batch, rounded up to whole fragments; rows lost
            to next-step resets are not made up for. None: one fragment of each worker.
        fraction_workers: once this share of the workers has sampled all its fragments, the others
            stop early; their samples are used. 1: waits for all, and only then do results not
            depend on timing.
        fraction_samples: a fragment that stops early keeps at least this share of its steps.
    """

    train_batch_size: Automatic = pydantic.Field(None, ge=0, le=10**8)
    fraction_workers: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(0.25, ge=0.0, le=1.0)

    aliases: ClassVar[Mapping[str, str]] = {"train_batch_size_per_learner": "train_batch_size"}


def sample(worker: RolloutWorker, weights: Weights | None) -> SampleBatch:
    """Runs in a worker: takes over weights, and samples a fragment `[T, N]` with them."""
    worker.set_weights(weights)
    return worker.next_batch()


def check_batch(value: Any) -> None:
    """Refuses an answer that is no batch.

    Raises:
        TypeError: says what it is.
    """
    if not isinstance(value, SampleBatch):
        raise TypeError(f"a SampleBatch was expected; got {type(value).__name__}")


def num_fragments(optimizer: PolicyOptimizer, default: int) -> int:
    """Number of fragments in a batch of `train_batch_size` rows; `default` where that is None."""
    config: Any = optimizer.config
    rollout = optimizer.workers.config.rollout
    rows = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    return -(-config.train_batch_size // rows) if config.train_batch_size else default


def sample_message_bytes(optimizer: PolicyOptimizer) -> int:
    """Size of the larger one of a call, which holds weights, and a fragment; see
    `WorkerSet.use_transport`. A fragment's size is that of its observations, which are most of it:
    what policies add is known once there is a fragment."""
    rollout, encoder = optimizer.workers.config.rollout, optimizer.policy.encoder
    row_bytes = math.prod(encoder.shape) * encoder.dtype.itemsize
    rows = (rollout.rollout_fragment_length + 1) * rollout.num_envs_per_worker
    return max(int(optimizer.policy.flat.params.nbytes), rows * row_bytes)


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
    runs_in_process = True
    after_failure = "reassign"
    tab: ClassVar[Tab] = Tab(
        "Workers are idle while the driver learns, unless collection is overlapped, and the driver "
        "waits while workers sample: the larger share is what to speed up.",
        (plots.PEAK_RATES, plots.EARLY_STOPPED, plots.POLICY_LAG),
        (plots.PEAK_METRIC, plots.EARLY_STOPPED_METRIC),
    )

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.check = check_batch
        self.stragglers = Stragglers(self.config.fraction_workers, self.config.fraction_samples)

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        if rollout.collection == "async" and rollout.num_workers > 0:
            raise ConfigError(
                "key 'collection': got 'async' with optimizer 'sync_samples'. Allowed: 'sync', "
                "'overlapped', or optimizer 'async_samples'"
            )
        check_central_gradients(rollout)

    def message_bytes(self) -> int:
        return sample_message_bytes(self)

    def step(self) -> StepResult:
        before = self.metrics.counts()
        rollout = self.workers.config.rollout
        with self.timers["broadcast"]:
            self._request()
        with self.timers["sample"]:
            length = rollout.rollout_fragment_length
            replies = self.calls.all(self.stragglers, steps=lambda _: length)
            batch = SampleBatch.concat([reply.value for reply in replies])
        self.timers["sample"].push_rows(batch.env_steps)
        if rollout.collection == "overlapped":
            with self.timers["broadcast"]:
                self._request()
        with self.timers["learn"]:
            self.learn(batch)
        self.timers["learn"].push_rows(batch.env_steps)
        return self.metrics.counts_since(before)

    def _request(self) -> None:
        """Requests the fragments of a batch, of all workers in turn, unless that was done. A worker
        gets weights with the first."""
        if self.calls.idle:
            workers = self.workers.up()
            for i in range(num_fragments(self, default=len(workers))):
                self.calls.send(workers[i % len(workers)], sample, WEIGHTS)

    def drain(self) -> None:
        """Waits for pending fragments, and keeps them for the next step."""
        self.calls.wait()

    def worker_states(self) -> dict[str, Any]:
        """State of the workers' environments and random numbers, besides their statistics.

        A run restored with the same config continues bit for bit if collection is `sync` and the
        environments have `get_checkpoint_state` and `set_checkpoint_state`
        (`polopt.rollouts.envs.env_state`). Otherwise weights, torch optimizer, schedules and
        counters continue, episodes start again, and fragments collected ahead are collected
        again."""
        up = {worker.index: (False,) for worker in self.workers.remote if worker.up}
        states = {0: self.workers.local.get_state(False)}
        states |= call_each(self.workers, "get_state", up)
        return {str(index): saved for index, saved in states.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        states = {
            index: {key: value for key, value in saved.items() if key != "statistics"}
            for index, saved in state.get("workers", {}).items()
        }
        if "0" in states:
            self.workers.local.set_state(states["0"])
        remote = {int(index): (saved,) for index, saved in states.items() if index != "0"}
        set_up_each(self.workers, "set_state", remote)

    def extra_stats(self) -> dict[str, Any]:
        return {
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
