"""`GradientWorker`: an actor with a policy and a Collector of its own. PyTorchRL's GWorker."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from polopt.common.compression import PackedGradients, unpack_gradients
from polopt.common.moments import merged
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics.record import Record
from polopt.policies.minibatch_gradients import MinibatchGradients
from polopt.policies.policy import reduce_gradient
from polopt.policies.resolve_policy import resolve_policy
from polopt.rollouts.collectors.collector import Collector
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.collective import TimedReducer
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call_workers import begin_restored_run, update_algorithm_parameter
from polopt.rollouts.workers.calls import Reply
from polopt.rollouts.workers.gathering import current_rollout
from polopt.rollouts.workers.recorded_transport import RecordedTransport
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config
from polopt.rollouts.workers.worker_set import WorkerSet

#: Interval at which a gradient worker looks for requests to stop early.
STOP_CHECK_S = 0.1
#: How a worker's Collector collects, by the key `collection`.
COLLECTING: dict[str, dict[str, Any]] = {
    "sync": {"sync": True, "update_after_each_batch": True},
    "overlapped": {"sync": True, "broadcast_interval": 1},
    "async": {"sync": False, "broadcast_interval": 1},
}


class GradientWorker(RolloutWorker):
    """A worker whose `next_batch` is what its Collector collects: with environments in its own
    process, or with `num_workers_below` remote rollout workers, which receive the same weights. It
    adds what their replies count to its own.

    Strategies use it as any `RolloutWorker`. The methods from `get_data` on are PyTorchRL's, for
    programs that call gradient workers directly.

    Args:
        config: `config.rollout` has the number of workers below, and how they collect.
        index: as for a rollout worker.
        control: see `CallRunner`.
        clock: see `CallRunner`.
        below: workers that the gradient worker before in this process had below it.

    Attributes:
        workers: this worker as the local one, and the remote workers below it.
        collector: collects with `workers`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        index: int,
        control: ControlPage | None = None,
        clock: Callable[[], float] = time.monotonic,
        below: WorkerSet | None = None,
    ) -> None:
        super().__init__(config, index, control, clock)
        if below is not None and not below.reconfigure(self._config_below(), local=self):
            below.stop()
            below = None
        self.workers = below or WorkerSet(self._config_below(), local=self)
        self._begin_collecting()
        watch = threading.Thread(target=self._pass_on_stops, name="polopt-stops", daemon=True)
        self._stopped = threading.Event()
        watch.start()

    def _begin_collecting(self) -> None:
        rollout = self.config.rollout
        self.collector = Collector.over(
            self.workers,
            self._count,
            fraction_workers=rollout.fraction_workers_below,
            fraction_samples=rollout.fraction_samples_below,
            **COLLECTING[rollout.collection],
        )
        self._restarts = 0

    def _count(self, reply: Reply) -> None:
        """Counts a reply of a worker below as this worker's own."""
        self.record.add_below(reply.counts)
        if reply.worker.index > 0:  # this worker's own are there already
            self.new_moments = merged(self.new_moments, reply.counts.moments)

    def _config_below(self) -> WorkerConfig:
        config = self.config
        rollout = config.rollout
        # Half the time limits, so that the driver receives the failure of a worker below before it
        # takes this worker for hanging.
        below = rollout.model_copy(
            update={
                "num_workers": rollout.num_workers_below,
                "num_workers_below": 0,
                "transport": "ray",
                "min_workers": None,  # concerns the gradient workers
                "worker_timeout_s": rollout.worker_timeout_s / 2.0,
                "worker_startup_timeout_s": rollout.worker_startup_timeout_s / 2.0,
                "num_gpus_per_worker": 0.0,  # this worker learns, those below only act
            }
        )
        # Other random numbers than workers below another gradient worker, or below a predecessor.
        stream = np.random.SeedSequence(config.seed, spawn_key=(self.index, config.restart_count))
        seed = int(stream.generate_state(1)[0]) >> 1
        offset = max(self.index - 1, 0) * rollout.num_workers_below
        return dataclasses.replace(
            config, rollout=below, seed=seed, device="cpu", env_index_offset=offset, is_below=True
        )

    def next_batch(self) -> SampleBatch:
        """The next batch of its collector. With synchronous collection, this worker's weights
        sample it."""
        self.collector.stop_batch_early(self.stop_after())  # not a request for an earlier call
        with self.phase("sample"):
            batch: SampleBatch = next(self.collector)
        before, self._restarts = self._restarts, self.workers.faults.num_restarts
        self.record.restarts_below += self._restarts - before
        return batch

    def _pass_on_stops(self) -> None:
        """Passes the driver's requests to stop early on to the workers below. Nothing wakes a
        process when memory that it shares changes, so this thread looks ten times a second."""
        while not self._stopped.wait(STOP_CHECK_S):
            self.collector.stop_batch_early(self.stop_after())

    def complete(self, record: Record) -> None:
        """Adds also the record of the calls below, if the run is recorded."""
        super().complete(record)
        if isinstance(self.workers.transport, RecordedTransport):
            below = self.workers.transport.log.take()
            if below["events"]:
                record.timing["below"] = below

    def set_weights(self, weights: Weights | None) -> None:
        """Sets weights here, and in the workers below before their next fragments."""
        super().set_weights(weights)
        if weights is not None:
            self._pass_on()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._pass_on()

    def _pass_on(self) -> None:
        # Other weights may have had this version, before a restore.
        if self.workers.remote:
            self.collector.weight_sync.take(force=True)

    def begin_restored_run(self, restore_count: int) -> None:
        """As in `RolloutWorker`, also for the workers below. Drops their pending fragments."""
        self.collector.calls.discard()
        super().begin_restored_run(restore_count)
        begin_restored_run(self.workers, restore_count)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy here, in its torch optimizer, and in all workers below.
        Returns once all have applied it."""
        super().update_algorithm_parameter(name, value)
        self.collector.drain()
        update_algorithm_parameter(self.workers, name, value)

    def remade(self, *args: Any, control: ControlPage) -> GradientWorker:
        """Another gradient worker in the same process, with the same processes below it."""
        self._end_collecting()
        super().stop()
        kind: Any = type(self)
        return kind(*args, control=control, below=self.workers)

    def _end_collecting(self) -> None:
        self._stopped.set()
        self.collector.shutdown()

    def stop(self) -> None:
        """Stops the workers below, and closes environments and connections."""
        self._end_collecting()
        self.workers.stop()
        super().stop()

    # ---- PyTorchRL's ----------------------------------------------------------------------------

    def get_data(self) -> SampleBatch:
        """The next batch of its collector. `get_grads` computes gradients from it."""
        self.record = Record(self.clock)
        batch = self.next_batch()
        self.state["rollout"] = MinibatchGradients(self.policy, batch)
        return batch

    def get_grads(self, distribute_gradients: bool = False) -> Gradients:
        """The gradient of the next minibatch of the last batch of `get_data`.

        Args:
            distribute_gradients: all-reduce over the group that `polopt.optimizers.rank_group`
                forms. Every rank has to make the same call: the gradient of the mean loss over the
                rows of all ranks.

        Raises:
            RuntimeError: no minibatch is left, or the worker is in no group.
            GroupBroken: a peer died or hangs.
        """
        rollout: MinibatchGradients | None = self.state.get("rollout")
        if rollout is None or rollout.done:
            raise RuntimeError(f"worker {self.index} has no data left: call get_data first")
        gradients = rollout.next_gradients()
        if not distribute_gradients:
            return gradients
        if "group" not in self.state:
            raise RuntimeError(f"worker {self.index} has no peers: it has joined no group")
        reducer = TimedReducer(self.state["group"], lambda: self.phase("allreduce"))
        self.share_moments(reducer)
        stats = reduce_gradient(self.policy, gradients.rows, gradients.stats, reducer)
        return gradients._replace(flat=self.policy.flat.get_grads(), stats=stats)

    def step(self, distribute_gradients: bool = False) -> tuple[Gradients | None, Record]:
        """Gets data if none is left, and computes the gradient of the next minibatch.

        Args:
            distribute_gradients: all-reduce the gradient and apply it here. Otherwise return it.

        Returns:
            the gradient or None, and what the call has counted.
        """
        self.record = Record(self.clock)
        current_rollout(self)
        gradients: Gradients | None = self.get_grads(distribute_gradients)
        if distribute_gradients:
            self.apply_gradients()
            gradients = None
        self.record.end(self.policy.version, gradients)
        return gradients, self.record

    def apply_gradients(self, gradients: Gradients | PackedGradients | None = None) -> int:
        """Makes one update with `gradients`, None: the last of `get_grads`. Returns the version."""
        if gradients is None:
            self.policy.apply_flat()
        else:
            self.policy.apply_gradients(unpack_gradients(gradients))
        return self.policy.version

    def save_model(self, fname: str) -> str:
        """Writes weights, torch optimizer, counters and schedules' clock. Returns the path.
        `Policy.set_state` accepts the result of `torch.load(path, weights_only=True)`."""
        path = Path(fname).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.policy.get_state(), path)
        return str(path)

    def actor_version(self) -> int:
        """Number of updates that made the weights."""
        return self.policy.version


class GradientWorkerSet(WorkerSet):
    """A WorkerSet whose remote workers are gradient workers."""

    worker_class: ClassVar[type[RolloutWorker]] = GradientWorker

    @classmethod
    def create_factory(
        cls, create_env_fn: Any, policy: Any, **options: Any
    ) -> Callable[[], GradientWorkerSet]:
        """A function that makes such sets, for programs that call gradient workers directly.

        Args:
            create_env_fn: makes an environment, or names one. See `resolve_env`.
            policy: name, class, or `(name or class, options)` of a policy that learns.
            options: see `RolloutConfig`.

        Raises:
            ConfigError: an argument is invalid. Before any actor starts.
        """
        rollout = RolloutConfig.parse({"env": create_env_fn, **options}, "GradientWorkerSet")
        policy_class, policy_config = resolve_policy(policy)
        keys = ("create_env_fn", "env_config", "num_envs_per_worker")
        config = make_worker_config(rollout, policy_class, policy_config, keys=keys)
        return lambda: cls(config)
