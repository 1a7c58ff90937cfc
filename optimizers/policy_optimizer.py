"""`PolicyOptimizer`: base class of optimizers, the strategies that distribute sampling and learning
over processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from polopt.common.checks import Checks
from polopt.common.compression import PackedGradients, unpack_gradients
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics import optimizer_stats
from polopt.metrics.machine import GpuReader
from polopt.metrics.number import Number, declare
from polopt.metrics.optimizer_stats import OptimizerStats, StepResult
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.policies.learning.weight_updater import Updates
from polopt.policies.policy import Policy
from polopt.policies.policy_group import learner_keys
from polopt.replay.buffer_files import BufferFiles
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers import calls, worker_set
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.call_workers import (
    latest_statistics,
    present_statistics,
    restore_workers,
    update_algorithm_parameter,
)
from polopt.rollouts.workers.calls import AfterFailure, Calls
from polopt.rollouts.workers.worker_set import WorkerSet

#: The numbers of the block `optimizer/` that every strategy reports. See `PolicyOptimizer.stats`.
NUMBERS = (
    *declare("""
        name (text): the name of the optimizer
        learns_with (text): what computes the gradients in the driver: `NumPy`, `CUDA graphs` or
            `torch`. After `torch`, the reason why no faster implementation is used, such as `torch
            (MyPolicy changes loss)`. See [write a
            policy](write-a-policy.md#speed-closed-form-gradients)
    """),
    *optimizer_stats.NUMBERS,
    *worker_set.NUMBERS,
    *calls.NUMBERS,
    *declare("""
        num_skipped_updates (updates, total): updates that were not applied because the gradient was
            not finite or was too large
    """),
)


class PolicyOptimizer(Checks, ABC):
    """Base class of strategies. A strategy decides which processes sample, compute gradients and
    apply gradients, and which processes wait for others.

        optimizer = SyncSamples(workers, SyncSamplesConfig())
        while optimizer.metrics.num_env_steps_sampled < 100_000:
            optimizer.step()
        result = optimizer.stats()                  # the `optimizer/` block of a result
        optimizer.stop()
        workers.stop()

    A strategy has two halves in one file. The first half consists of functions `fn(worker, ...)`
    that run in workers. The second half is `step`, which runs in the driver. `step` sends these
    functions to workers through `calls`, and uses the values that the functions return.
    `docs/write-an-optimizer.md` has complete examples.

    A strategy seldom has to count anything itself. `calls` counts samples, seconds, faults and
    bytes when the strategy takes a reply. `apply`, `learn` and `set_weights` count updates in the
    driver. `RolloutWorker.learn` counts updates in workers.

    A subclass may name the phases of a step in `phases`, and time each phase with
    `with self.timers[phase]:`. Phases must not overlap, because results report the share of each
    phase.

    Args:
        workers: the workers to use. The caller must stop the workers.
        config: an instance of `config_class`. A trainer has checked it before it started the
            workers. A program that makes the workers itself calls `check_options` first.

    Attributes:
        policy: policy of the local worker. The trainer evaluates and saves this policy.
        calls: sends functions to workers, and receives their replies.
        metrics: counters and statistics.
        timers: the timers of `metrics`, by phase.

    Raises:
        ConfigError: see `check_workers`.
    """

    name: ClassVar[str] = ""
    config: Any  # an instance of `config_class`. A subclass declares the exact type
    config_class: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    #: The type of the batches from which policies learn under this strategy, unless an option
    #: selects a type of `also_learns_from`. A policy must have the same `learns_from`.
    learns_from: ClassVar[type] = SampleBatch
    #: Further types of batches, each with the option `(key, value)` that selects the type.
    also_learns_from: ClassVar[Mapping[type, tuple[str, Any]]] = {}
    #: True if a policy must define `compute_gradients`. See `Policy.gives_gradients`.
    needs_gradients: ClassVar[bool] = False
    #: The phases of `step`. See the docstring of the class.
    phases: ClassVar[tuple[str, ...]] = ()
    #: The phases of calls in workers, in addition to phases of all strategies, such as `sample`.
    worker_phases: ClassVar[tuple[str, ...]] = ()
    #: True if the strategy also runs in one process, with `num_workers=0`.
    runs_in_process: ClassVar[bool] = False
    #: Name of the optimizer that the error for `num_workers=0` suggests. Not used by strategies
    #: that run in one process.
    in_process_instead: ClassVar[str] = "sync_samples"
    #: The numbers that `extra_stats` adds to the block `optimizer/`, in addition to the numbers of
    #: base classes. Their keys are relative to this block. See `Number`.
    numbers: ClassVar[tuple[Number, ...]] = ()
    #: The rule for the calls of a worker that fails. See `AfterFailure`.
    after_failure: ClassVar[AfterFailure] = "send again"
    #: Saves and restores the rows of a replay buffer in the driver. None without such a buffer.
    buffer_files: BufferFiles | None = None

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        self.check_workers(workers.config.rollout)
        self.workers = workers
        self.config = config
        self.policy: Policy = workers.local.policy
        actions, gpus = self.policy.dist.new_stats(), GpuReader(torch.cuda)
        self.metrics = OptimizerStats(
            self.phases,
            self.worker_phases,
            actions,
            gpus,
            workers.clock,
            learner_keys(self.policy),
        )
        self.timers = self.metrics.timers
        self.calls = Calls(
            workers,
            f"optimizer {self.title()!r}",
            count=self._count,
            after_failure=self.after_failure,
        )

    @classmethod
    def title(cls) -> str:
        """Returns the name of the strategy in results and messages."""
        return cls.name or cls.__name__

    @abstractmethod
    def step(self) -> StepResult:
        """Runs one round of optimization, and returns the counts of this round.

        A step should last at least some milliseconds. Otherwise the overhead of the call is large
        in comparison with the work.
        """

    # ---- options --------------------------------------------------------------------------------

    @classmethod
    def check_options(cls, rollout: RolloutConfig, config: Any) -> None:
        """Checks that the strategy supports these options. Needs no workers, so that callers can
        check options before any actor starts.

        Args:
            rollout: options of sampling.
            config: an instance of `config_class`.

        Raises:
            ConfigError: an option is not supported. The error names the option and the reason.
        """
        cls.check_workers(rollout)
        cls.check(rollout, config)

    @classmethod
    def check_workers(cls, rollout: RolloutConfig) -> None:
        """Checks that the run has remote workers, unless the strategy also runs in one process.

        Raises:
            ConfigError: `num_workers` is 0, and the strategy needs remote workers.
        """
        if rollout.num_workers == 0 and not cls.runs_in_process:
            raise ConfigError(
                f"optimizer {cls.title()!r} with num_workers=0: this optimizer needs remote "
                f"workers. Allowed: num_workers of 1 or more, or optimizer "
                f"{cls.in_process_instead!r}"
            )

    @classmethod
    def batches_of(cls, config: Any) -> type:
        """Returns the type of the batches from which a policy learns with these options.

        Args:
            config: an instance of `config_class`.
        """
        for kind, (key, value) in cls.also_learns_from.items():
            if getattr(config, key) == value:
                return kind
        return cls.learns_from

    @classmethod
    def further_processes(cls, config: Any) -> list[dict[str, float]]:
        """Returns the Ray resources of each process that the strategy starts in addition to the
        workers, such as `[{"CPU": 1.0}]` for one process. A Tune trial reserves these resources.

        Args:
            config: an instance of `config_class`.
        """
        return []

    # ---- counting -------------------------------------------------------------------------------

    def _count(self, reply: Reply) -> None:
        """Counts a reply that was taken. Also advances the policy's schedules by the environment
        steps of the reply, and updates the policy's normaliser with the moments of the new
        observations and of their discounted returns."""
        own = reply.worker is self.workers.here
        self.metrics.add_record(reply.worker.index, reply.counts, in_driver=own)
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        self.policy.add_moments(reply.counts.moments)

    def apply(
        self,
        gradients: Gradients | PackedGradients | None,
        lr_scale: float = 1.0,
        parts: Sequence[Gradients] = (),
    ) -> None:
        """Applies a gradient to the driver's policy, and counts its lag and the update.

        Args:
            gradients: the gradient of a worker, or the mean gradient of several workers. None if a
                worker's gradient was not finite.
            lr_scale: a factor on the learning rate. With 0, the gradient is dropped. A gradient
                with a factor below 1 counts as stale.
            parts: the gradients of the workers if `gradients` is their mean. Empty if `gradients`
                comes from one worker.

        Raises:
            NonFiniteError: too many consecutive updates were skipped.
        """
        metrics, policy = self.metrics, self.policy
        if gradients is None:
            metrics.add_gradients_skipped()
            return
        gradients = unpack_gradients(gradients)
        parts = parts or [gradients]
        metrics.add_gradients(parts, policy.version, stale=lr_scale < 1.0)
        if lr_scale > 0.0 and gradients.rows > 0:
            updates = Updates(policy)
            stats = gradients.stats | policy.apply_gradients(gradients, lr_scale)
            self.workers.faults.note_update(updates.num > 0, why="norm of the gradient")
            metrics.add_gradient_update(gradients, len(parts), updates.num, stats)
        if gradients.ends_rollout:
            metrics.rollouts.end_rollout(policy.version)

    def learn(self, batch: SampleBatch) -> None:
        """Learns from a batch `[T, N]` with the driver's policy. Counts the updates, and the lag of
        the batch.

        Raises:
            NonFiniteError: too many consecutive updates were skipped.
        """
        metrics, policy = self.metrics, self.policy
        for version, columns in zip(*np.unique(batch.versions, return_counts=True), strict=True):
            metrics.add_lag(int(version), policy.version, weight=int(columns))
        updates, rows = Updates(policy), batch.agent_steps
        stats = policy.learn_on_batch(batch)
        metrics.rollouts.end_rollout(policy.version)
        if rows:
            self.workers.faults.note_update(updates.num > 0, why="gradient of the whole batch")
        metrics.add_training(rows if updates.num else 0, updates.num, stats)
        metrics.add_update_rows(updates.num, updates.rows)

    def set_weights(self, weights: Weights) -> None:
        """Sets the weights of the driver's policy to weights from workers.

        The increase of the version counts as the number of updates. The driver keeps the moments of
        its own normaliser, because these already include the samples of all replies.
        """
        updates = weights.version - self.policy.version
        self.policy.set_weights(weights._replace(moments=None))
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        self.add_updates_of_workers(updates, self.policy.version)

    def add_updates_of_workers(self, updates: int, version: int) -> None:
        """Counts updates that workers have made, up to a version of the weights."""
        self.metrics.rollouts.end_rollout(version)
        self.metrics.add_training(0, updates, {})

    # ---- results --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns the `optimizer/` block of results. See `OptimizerStats.report`."""
        self.calls.count()  # the replies that the strategy has taken and not counted itself
        return {
            "name": self.title(),
            "learns_with": self.policy.learns_with,
            **self.metrics.report([handle.index for handle in self.workers.remote] or [0]),
            **self.workers.message_stats(),
            "requests_in_flight": self.calls.load.report(),
            "num_skipped_updates": self.num_skipped_updates,
            **self.extra_stats(),
        }

    @property
    def num_skipped_updates(self) -> int:
        """The number of updates that were skipped because the gradient was not finite, or was too
        large."""
        return self.policy.progress.skipped_updates

    def extra_stats(self) -> dict[str, Any]:
        """Returns the numbers that only this strategy reports. `numbers` declares them. Every
        result must have the same keys."""
        return {}

    # ---- state ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for the calls that workers are running, and keeps the replies for the next step."""
        self.calls.drain()

    def get_state(self) -> dict[str, Any]:
        """Drains the optimizer, and returns its state.

        The state consists of counters, episode statistics, the policy, and the running statistics
        of the environments' wrappers. Subclasses may add further parts. The values are of types
        that checkpoints can contain. `set_state` of any optimizer with the same policy
        accepts this state."""
        self.drain()
        return {**self.get_driver_state(), "workers": self.worker_states()}

    def get_driver_state(self) -> dict[str, Any]:
        """Returns the part of the state that the driver has now.

        This method does not drain the optimizer and does not call workers, so it does not disturb
        training. The running statistics of the environments' wrappers are the last statistics that
        each worker has reported.
        """
        return {
            **self.metrics.get_state(),
            "restore_count": self.workers.config.restore_count,
            "policy": self.policy.get_state(),
            "workers": latest_statistics(self.workers),
        }

    def worker_states(self) -> dict[str, Any]:
        """Returns the part of each worker's state that is saved in checkpoints. The keys are worker
        indices as strings."""
        return present_statistics(self.workers)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` of any optimizer returned. Drops the results of
        pending calls. Workers receive the restored weights with the next call that takes weights.

        Raises:
            ValueError: the state does not fit the policy, or the wrappers of the environments.
        """
        self.drain()
        self.calls.clear()
        # The policy comes first, because it raises if the state belongs to another network.
        self.policy.set_state(state["policy"])
        self.metrics.set_state(state)
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        restore_workers(self.workers, int(state["restore_count"]), state.get("workers", {}))

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in the driver, in all workers, and in the workers that
        sample for these workers (`num_workers_below`). The torch optimizers of these policies use
        the new value, too. Returns once all workers that are up have applied the change. A worker
        that is starting applies the change before any work.

        Raises:
            ConfigError: the name is unknown or the value is wrong. In this case, nothing changes.
        """
        self.drain()
        self.policy.set_option(name, value)
        update_algorithm_parameter(self.workers, name, value)

    def stop(self) -> None:
        """Drops pending calls. The caller stops the workers."""
        self.calls.clear()
