"""`GradientWorker`: an actor with a policy and a Collector of its own; PyTorchRL's GWorker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from polopt.common.compression import PackedGradients, unpack_gradients
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.policies.learning.sgd import reduce_gradient
from polopt.rollouts.collectors.collector import Collector
from polopt.rollouts.collectors.worker_factory import resolve_policy
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import RoundInfo, SampleRequest
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config
from polopt.rollouts.workers.worker_set import WorkerSet

#: How a worker's Collector collects, by the key `collection`.
COLLECTING: dict[str, dict[str, Any]] = {
    "sync": {"sync": True, "update_after_each_batch": True},
    "overlapped": {"sync": True, "broadcast_interval": 1},
    "async": {"sync": False, "broadcast_interval": 1},
}


class GradientWorker(RolloutWorker):
    """Computes gradients from what its Collector collects: with environments in its own process,
    or with `num_workers_below` remote rollout workers, which receive the same weights.

    Optimizers call the methods of `RolloutWorker`. The other methods are PyTorchRL's, for programs
    that call gradient workers directly.

    Args:
        config: `config.rollout` has the number of workers below, and how they collect.
        index: as for a rollout worker.

    Attributes:
        below: this worker as the local one, and the remote workers below it.
        collector: collects with `below`.
    """

    def __init__(self, config: WorkerConfig, index: int) -> None:
        super().__init__(config, index)
        self.below = WorkerSet(self._config_below(), local=self)
        self._begin_collecting()

    def _begin_collecting(self) -> None:
        rollout = self.config.rollout
        self.collector = Collector.over(
            self.below,
            fraction_workers=rollout.fraction_workers_below,
            fraction_samples=rollout.fraction_samples_below,
            **COLLECTING[rollout.collection],
        )
        self._round: int | None = None
        self._restarts = 0

    def _config_below(self) -> WorkerConfig:
        config = self.config
        rollout = config.rollout
        # Half the time limits, so that the driver receives the failure of a worker below before it
        # takes this worker for hanging.
        below = rollout.model_copy(
            update={
                "num_workers": rollout.num_workers_below,
                "num_workers_below": 0,
                "min_workers": None,  # concerns the gradient workers
                "worker_timeout_s": rollout.worker_timeout_s / 2.0,
                "worker_startup_timeout_s": rollout.worker_startup_timeout_s / 2.0,
            }
        )
        # Other random numbers than workers below another gradient worker, or below a predecessor.
        stream = np.random.SeedSequence(config.seed, spawn_key=(self.index, config.restart_count))
        seed = int(stream.generate_state(1)[0]) >> 1
        return dataclasses.replace(config, rollout=below, seed=seed)

    # ---- what optimizers call -------------------------------------------------------------------

    def _next_batch(
        self, weights: Weights | None = None, request: SampleRequest | None = None
    ) -> SampleBatch:
        """The next batch of its collector. With synchronous collection, `weights` sample it.

        Args:
            weights: set first; None: the worker's own.
            request: its number identifies the batch in `stop_early`.
        """
        if weights is not None:
            self.set_weights(weights)
        self._round = None if request is None else request.number
        try:
            batch: SampleBatch = next(self.collector)
        finally:
            self._round = None
        return batch

    def stop_early(self, number: int, keep_steps: int) -> None:
        """Ends all fragments of the batch of request `number` once they have `keep_steps` steps.
        Runs in a concurrency group of its own, beside the call that collects."""
        if self.below.remote and number != self._round:
            return
        if self.below.remote:
            self.collector.gatherer.stop_all(keep_steps)
        else:
            super().stop_early(number, keep_steps)

    def _round_info(self, batch: SampleBatch, started_s: float) -> RoundInfo:
        before, self._restarts = self._restarts, self.below.faults.num_restarts
        info = super()._round_info(batch, started_s)
        return info._replace(restarts_below=self._restarts - before)

    def set_weights(self, weights: Weights) -> None:
        """Sets weights here, and in the workers below before their next fragments."""
        self.policy.set_weights(weights)
        self._pass_on()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._pass_on()

    def _pass_on(self) -> None:
        if not self.below.remote:
            return
        snapshot = self.below.snapshots.last
        if snapshot is None or self.policy.version <= snapshot.version:
            # Other weights may have had this version, before a restore.
            self.below.snapshots.clear()
        self.collector.weight_sync.take_snapshot()

    def begin_restored_run(self, restore_count: int) -> None:
        """As in `RolloutWorker`, also for the workers below. Drops their pending fragments."""
        self.collector.gatherer.discard()
        super().begin_restored_run(restore_count)
        self.below.begin_restored_run(restore_count)

    def reconfigure(self, config: WorkerConfig, index: int) -> None:
        """Becomes the worker that `config` describes, in the same process; workers below too."""
        below = self.below
        self.collector.shutdown()
        super().stop()
        RolloutWorker.__init__(self, config, index)
        if not below.reconfigure(self._config_below()):
            below.stop()
            below = WorkerSet(self._config_below(), local=self)
        self.below = below
        self._begin_collecting()

    def stop(self) -> None:
        """Stops the workers below, closes environments and leaves its group."""
        self.collector.shutdown()
        self.below.stop()
        super().stop()

    # ---- PyTorchRL's ----------------------------------------------------------------------------

    def get_data(self) -> SampleBatch:
        """The next batch of its collector; `get_grads` computes gradients from it."""
        batch = self._next_batch()
        self.gradients.begin(self.policy, batch)
        return batch

    def get_grads(self, distribute_gradients: bool = False) -> Gradients:
        """The gradient of the next minibatch of the last batch of `get_data`.

        Args:
            distribute_gradients: all-reduce over the group, in which every rank has to make the
                same call: the gradient of the mean loss over the rows of all ranks.

        Raises:
            RuntimeError: no minibatch is left, or the worker is in no group.
            GroupBroken: a peer died or hangs.
        """
        minibatches = self.gradients.minibatches
        if minibatches is None or minibatches.done:
            raise RuntimeError(f"worker {self.index} has no data left: call get_data first")
        gradients = minibatches.next_gradients()
        if not distribute_gradients:
            return gradients
        if self.group.reducer is None:
            raise RuntimeError(f"worker {self.index} has no peers: call join_group first")
        stats = reduce_gradient(self.policy, gradients.rows, gradients.stats, self.group.reducer)
        return gradients._replace(flat=self.policy.flat.get_grads(), stats=stats)

    def step(
        self, distribute_gradients: bool = False
    ) -> tuple[Gradients | PackedGradients | None, RoundInfo]:
        """Gets data if none is left, and computes the gradient of the next minibatch.

        Args:
            distribute_gradients: all-reduce the gradient and apply it here; otherwise return it.
        """
        if not distribute_gradients:
            return self.sample_and_compute_gradients()
        sampled = self._sample_if_needed(None)
        self.get_grads(distribute_gradients=True)
        self.apply_gradients()
        return None, sampled

    def apply_gradients(self, gradients: Gradients | PackedGradients | None = None) -> int:
        """Makes one update with `gradients`, None: the last of `get_grads`; returns the version."""
        if gradients is None:
            self.policy.apply_flat()
        else:
            self.policy.apply_gradients(unpack_gradients(gradients))
        return self.policy.version

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy here, in its torch optimizer, and in all workers below.
        Returns once all have applied it."""
        self.policy.set_option(name, value)
        self.collector.settle()
        self.below.update_algorithm_parameter(name, value)

    def save_model(self, fname: str) -> str:
        """Writes weights, torch optimizer, counters and schedules' clock; returns the path.
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

    actor_class: ClassVar[type[RolloutWorker]] = GradientWorker

    @classmethod
    def create_factory(
        cls, create_env_fn: Any, policy: Any, **options: Any
    ) -> Callable[[], GradientWorkerSet]:
        """A function that makes such sets, for programs that call gradient workers directly.

        Args:
            create_env_fn: makes an environment, or names one; see `resolve_env`.
            policy: name, class, or `(name or class, options)` of a policy that learns.
            options: see `RolloutConfig`.

        Raises:
            ConfigError: an argument is invalid; before any actor starts.
        """
        rollout = RolloutConfig.parse({"env": create_env_fn, **options}, "GradientWorkerSet")
        policy_class, policy_config = resolve_policy(policy)
        keys = ("create_env_fn", "env_config")
        config = make_worker_config(rollout, policy_class, policy_config, keys=keys)
        return lambda: cls(config)


def make_workers(config: WorkerConfig, learner_device: str = "cpu") -> WorkerSet:
    """The workers of a config: gradient workers if `num_workers_below` is 1 or more, else rollout
    workers, which compute gradients from their own samples."""
    kind = GradientWorkerSet if config.rollout.num_workers_below else WorkerSet
    return kind(config, learner_device)
