"""`GradientWorker`: a worker with its own policy and its own Collector, like PyTorchRL's
`GWorker`."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from polopt.collectors.collector import Collector
from polopt.collectors.resolve_policy import resolve_policy
from polopt.common.compression import PackedGradients, unpack_gradients
from polopt.common.moments import merged
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics.record import Record
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.policy import reduce_gradient
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.collective import TimedReducer
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.call_workers import begin_restored_run, update_algorithm_parameter
from polopt.rollouts.workers.gathering import current_rollout
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config
from polopt.rollouts.workers.worker_set import WorkerSet

#: The interval at which a gradient worker checks for requests to stop early, in seconds.
STOP_CHECK_S = 0.1
#: Maps each value of the option `collection` to options of the worker's Collector.
COLLECTING: dict[str, dict[str, Any]] = {
    "sync": {"sync": True, "update_after_each_batch": True},
    "overlapped": {"sync": True, "broadcast_interval": 1},
    "async": {"sync": False, "broadcast_interval": 1},
}


class GradientWorker(RolloutWorker):
    """A worker whose `next_batch` returns a batch from its own Collector.

    The Collector samples with environments in this worker's process, or with `num_workers_below`
    remote rollout workers. These remote workers are called the workers below. They receive the
    weights of the gradient worker. The gradient worker adds the counts in the replies of the
    workers below to its own record.

    Policy optimizers use a gradient worker like any `RolloutWorker`. The method `get_data` and the
    methods after it come from PyTorchRL. They are for programs that call gradient workers directly.

    Args:
        config: the config of the worker. `config.rollout` says how many workers are below, and how
            they collect.
        index: as for a rollout worker.
        control: see `CallRunner`.
        clock: see `CallRunner`.
        below: the set with the workers below the previous gradient worker of this process. The new
            gradient worker reuses these workers if possible.

    Attributes:
        workers: a set with this worker as the local worker, and with the remote workers below.
        collector: the Collector that samples with `workers`.
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
        self._stopped, self._stops = threading.Event(), threading.Lock()
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
        """Adds the counts in a reply of a worker below to this worker's record."""
        self.record.add_below(reply.counts)
        # If this worker itself has sampled the fragment, `new_moments` already includes its moments
        # (the mean and variance of its observations and returns).
        if reply.worker.index > 0:
            self.new_moments = merged(self.new_moments, reply.counts.moments)

    def _config_below(self) -> WorkerConfig:
        config = self.config
        rollout = config.rollout
        # With half of the time limits, this worker reports the failure of a worker below before the
        # driver decides that this worker hangs.
        below = rollout.model_copy(
            update={
                "num_workers": rollout.num_workers_below,
                "num_workers_below": 0,
                "transport": "ray",
                "min_workers": None,  # the option applies to gradient workers
                "worker_timeout_s": rollout.worker_timeout_s / 2.0,
                "worker_startup_timeout_s": rollout.worker_startup_timeout_s / 2.0,
                "num_gpus_per_worker": 0.0,  # the workers below do not learn
            }
        )
        # Each gradient worker, and each of its replacements, has a different seed for its workers
        # below. The workers below two gradient workers therefore draw different random numbers.
        stream = np.random.SeedSequence(config.seed, spawn_key=(self.index, config.restart_count))
        seed = int(stream.generate_state(1)[0]) >> 1
        offset = max(self.index - 1, 0) * rollout.num_workers_below
        return dataclasses.replace(
            config, rollout=below, seed=seed, device="cpu", env_index_offset=offset
        )

    def next_batch(self) -> SampleBatch:
        """Returns the next batch of the Collector. With `collection: sync`, the batch is sampled
        with this worker's current weights."""
        # Replaces a request to stop early that the driver's previous call left in the Collector.
        with self._stops:
            self.collector.stop_batch_early(self.stop_after())
        with self.phase("sample"):
            batch: SampleBatch = next(self.collector)
        before, self._restarts = self._restarts, self.workers.faults.num_restarts
        self.record.restarts_below += self._restarts - before
        return batch

    def _pass_on_stops(self) -> None:
        """Forwards the driver's requests to stop early to the workers below. The driver writes
        these requests to shared memory. A write does not wake this process, so this thread reads
        the memory ten times per second."""
        while not self._stopped.wait(STOP_CHECK_S):
            with self._stops:  # so that a request of one call is not passed on in the next call
                self.collector.stop_batch_early(self.stop_after())

    def complete(self, record: Record) -> None:
        """Completes the record like `RolloutWorker.complete`. Also adds what depended on timing in
        the calls to the workers below."""
        super().complete(record)
        below = self.workers.transport.take_timing()
        if below:
            record.timing["below"] = below

    def set_weights(self, weights: Weights | None) -> None:
        """Sets the weights of this worker. The workers below receive the weights with the requests
        for their next fragments."""
        super().set_weights(weights)
        if weights is not None:
            self._pass_on()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._pass_on()

    def _pass_on(self) -> None:
        # `force`, because after a restore different weights may have the same version.
        if self.workers.remote:
            self.collector.weight_sync.take(force=True)

    def begin_restored_run(self, restore_count: int) -> None:
        """Begins a restored run in this worker and in the workers below. Drops the pending
        fragments of the workers below."""
        self.collector.calls.discard()
        super().begin_restored_run(restore_count)
        begin_restored_run(self.workers, restore_count)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in this worker, in its torch optimizer, and in all
        workers below. Workers that are still starting apply the change before they sample. Returns
        when all workers that have started have applied the change."""
        super().update_algorithm_parameter(name, value)
        self.collector.drain()
        update_algorithm_parameter(self.workers, name, value)

    def remade(self, *args: Any, control: ControlPage) -> GradientWorker:
        """Stops this worker, and makes another gradient worker in the same process. The new worker
        reuses the processes of the workers below if possible."""
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

    # ---- the interface of PyTorchRL -------------------------------------------------------------

    def get_data(self) -> SampleBatch:
        """Returns the next batch of the Collector. `get_grads` then computes gradients from this
        batch."""
        self.record = Record(self.clock)
        batch = self.next_batch()
        self.state["rollout"] = MinibatchGradients(self.policy, batch)
        return batch

    def get_grads(self, distribute_gradients: bool = False) -> Gradients:
        """Returns the gradient of the next minibatch of the batch from `get_data`.

        Args:
            distribute_gradients: whether to all-reduce the gradient over the group that
                `polopt.optimizers.rank_group` forms. Every worker of the group must make the same
                call. The result is the gradient of the mean loss over all rows of the group. A row
                is one step of one environment.

        Raises:
            RuntimeError: if no minibatch is left, or if the worker has not joined a group.
            GroupBroken: if the all-reduce fails, usually because another worker of the group died
                or hangs.
        """
        rollout: MinibatchGradients | None = self.state.get("rollout")
        if rollout is None or rollout.done:
            raise RuntimeError(f"worker {self.index} has no data left: call get_data first")
        gradients = rollout.next_gradients()
        if not distribute_gradients:
            return gradients
        if "group" not in self.state:
            raise RuntimeError(
                f"worker {self.index} cannot distribute gradients: it has not joined a group"
            )
        reducer = TimedReducer(self.state["group"], lambda: self.phase("allreduce"))
        self.share_moments(reducer)
        stats = reduce_gradient(self.policy, gradients.rows, gradients.stats, reducer)
        return gradients._replace(flat=self.policy.flat.get_grads(), stats=stats)

    def step(self, distribute_gradients: bool = False) -> tuple[Gradients | None, Record]:
        """Computes the gradient of the next minibatch. If no minibatch is left, first collects a
        new batch.

        Args:
            distribute_gradients: if True, all-reduces the gradient and applies it in this worker.
                If False, returns the gradient.

        Returns:
            the gradient (None with `distribute_gradients`), and the counts of this call.
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
        """Applies `gradients` in one update, and returns the new version of the weights. `None`
        applies the last result of `get_grads`."""
        if gradients is None:
            self.policy.apply_flat()
        else:
            self.policy.apply_gradients(unpack_gradients(gradients))
        return self.policy.version

    def save_model(self, fname: str) -> str:
        """Saves the state of the policy to a file, and returns the absolute path of the file. The
        state contains the weights, the torch optimizer, the counters and the progress of schedules.
        To restore the state, pass the result of `torch.load(path, weights_only=True)` to
        `Policy.set_state`."""
        path = Path(fname).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.policy.get_state(), path)
        return str(path)

    def actor_version(self) -> int:
        """Returns the version of the weights, which is the number of updates that produced them."""
        return self.policy.version


class GradientWorkerSet(WorkerSet):
    """A WorkerSet whose remote workers are gradient workers."""

    worker_class: ClassVar[type[RolloutWorker]] = GradientWorker

    @classmethod
    def create_factory(
        cls, create_env_fn: Any, policy: Any, **options: Any
    ) -> Callable[[], GradientWorkerSet]:
        """Returns a function that makes sets of gradient workers. This is for programs that call
        gradient workers directly.

        Args:
            create_env_fn: a callable that makes an environment, or a Gymnasium id. See
                `resolve_env`.
            policy: a policy that learns: its name, its class, or `(name or class, options)`.
            options: see `RolloutConfig`.

        Raises:
            ConfigError: if an argument is invalid. This is raised before any actor starts.
        """
        rollout = RolloutConfig.parse({"env": create_env_fn, **options}, "GradientWorkerSet")
        policy_class, policy_config = resolve_policy(policy)
        keys = ("create_env_fn", "env_config", "num_envs_per_worker")
        config = make_worker_config(rollout, policy_class, policy_config, keys=keys)
        return lambda: cls(config)
