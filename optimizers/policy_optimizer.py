"""`PolicyOptimizer`: base class of all distribution strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from polopt.common.compression import PackedGradients, unpack_gradients
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics.machine import GpuReader
from polopt.metrics.optimizer_stats import OptimizerStats, StepResult
from polopt.metrics.tab import Tab
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.policies.policy import Policy
from polopt.replay.buffer_files import BufferFiles
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call_workers import (
    latest_statistics,
    present_statistics,
    restore_workers,
    update_algorithm_parameter,
)
from polopt.rollouts.workers.calls import AfterFailure, Calls, Reply
from polopt.rollouts.workers.worker_set import WorkerSet


class PolicyOptimizer(ABC):
    """Decides which process samples, which one computes gradients, which one applies them, and
    which one waits.

        optimizer = SyncSamples(workers, SyncSamplesConfig())
        while optimizer.metrics.num_env_steps_sampled < 100_000:
            optimizer.step()
        result = optimizer.stats()                  # the `optimizer/` block of a result
        optimizer.stop()
        workers.stop()

    A strategy has two halves in one file. The first half is functions that run in workers,
    `fn(worker, ...)`. The second half is `step`, which runs in the driver: it sends these functions
    to workers through `calls`, and uses the values that they return.
    `docs/write-an-optimizer.md` has complete examples.

    A strategy counts nothing by hand. Samples, seconds, faults and bytes are counted when a reply
    is taken. Updates are counted by `apply`, `learn` and `set_weights` in the driver, and by
    `RolloutWorker.learn` in workers.

    A subclass may name the phases of a step in `phases`, and time each with
    `with self.timers[phase]:`. Phases must not overlap, because results report their shares.

    Args:
        workers: the workers to use. The caller stops them.
        config: an instance of `config_class`.

    Attributes:
        policy: policy of the local worker. It is the one that is evaluated and saved.
        calls: sends functions to workers, and receives their replies.
        metrics: counters and statistics.
        timers: the timers of `metrics`, by phase.

    Raises:
        ConfigError: see `check_options`.
    """

    name: ClassVar[str] = ""
    config: Any  # an instance of `config_class`. A subclass declares the exact type
    config_class: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    #: The type of batch that this strategy gives to policies. A policy needs the same
    #: `learns_from`.
    learns_from: ClassVar[type] = SampleBatch
    #: Further types of batches, each with the option `(key, value)` that selects it.
    also_learns_from: ClassVar[Mapping[type, tuple[str, Any]]] = {}
    #: Whether a policy must define `compute_gradients`. See `Policy.gives_gradients`.
    needs_gradients: ClassVar[bool] = False
    phases: ClassVar[tuple[str, ...]] = ()
    #: Phases of calls in workers, besides `sample`, `gradient` and `learn`.
    worker_phases: ClassVar[tuple[str, ...]] = ()
    #: Whether the strategy also runs in one process, with `num_workers=0`.
    runs_in_process: ClassVar[bool] = False
    #: The optimizer that errors suggest for `num_workers=0` if this one needs remote workers.
    in_process_instead: ClassVar[str] = "sync_samples"
    #: What happens to the calls of a worker that fails. See `Calls`.
    after_failure: ClassVar[AfterFailure] = "send again"
    #: What dashboards show besides the panels that all optimizers have.
    tab: ClassVar[Tab] = Tab()
    #: Saves the strategy's replay buffer to files. None: the strategy has no buffer to save.
    buffer_files: BufferFiles | None = None

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        self.check_options(workers.config.rollout, config)
        self.workers = workers
        self.config = config
        self.policy: Policy = workers.local.policy
        actions, gpus = self.policy.dist.new_stats(), GpuReader(torch.cuda)
        self.metrics = OptimizerStats(self.phases, self.worker_phases, actions, gpus, workers.clock)
        self.timers = self.metrics.timers
        self.calls = Calls(
            workers,
            f"optimizer {self.title()!r}",
            count=self._count,
            after_failure=self.after_failure,
        )

    @classmethod
    def title(cls) -> str:
        """Name in results and messages."""
        return cls.name or cls.__name__

    @abstractmethod
    def step(self) -> StepResult:
        """Runs one round of optimization and returns its counts.

        A step should last at least some milliseconds, so that the cost of calling it is small
        beside its work.
        """

    # ---- options --------------------------------------------------------------------------------

    @classmethod
    def check_options(cls, rollout: RolloutConfig, config: Any) -> None:
        """Checks, before any actor starts, that the strategy supports these options.

        Args:
            rollout: options of sampling.
            config: an instance of `config_class`.

        Raises:
            ConfigError: an option is not supported. Names the option and the reason.
        """
        if rollout.num_workers == 0 and not cls.runs_in_process:
            raise ConfigError(
                f"optimizer {cls.title()!r} with num_workers=0: it needs remote workers. Allowed: "
                f"num_workers of 1 or more, or optimizer {cls.in_process_instead!r}"
            )
        cls.check(rollout, config)

    @classmethod
    def batches_of(cls, config: Any) -> type:
        """The type of batch that a policy must learn from under `config`, an instance of
        `config_class`."""
        for kind, (key, value) in cls.also_learns_from.items():
            if getattr(config, key) == value:
                return kind
        return cls.learns_from

    @classmethod
    def further_processes(cls, config: Any) -> list[dict[str, float]]:
        """The Ray resources of each process that the strategy starts besides the workers, such as
        `[{"CPU": 1.0}]` for one process. A trial reserves them. Empty by default.

        Args:
            config: an instance of `config_class`.
        """
        return []

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        """Checks of one strategy, which `check_options` calls. Same arguments and errors."""
        return

    # ---- counted once ---------------------------------------------------------------------------

    def _count(self, reply: Reply) -> None:
        """Counts a reply that was taken. Moves the policy's schedules on by the environment steps,
        and adds the moments of the new samples to its normaliser."""
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
            gradients: the gradient of a worker. None: it was not finite.
            lr_scale: factor on the learning rate. 0 drops the gradient. A gradient with a factor
                below 1 counts as stale.
            parts: the workers' gradients, if `gradients` is their mean. Empty if `gradients` is
                from one worker.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        metrics, policy = self.metrics, self.policy
        if gradients is None:
            metrics.add_gradients_skipped()
            return
        gradients = unpack_gradients(gradients)
        parts = parts or [gradients]
        metrics.add_gradients(parts, policy.version, stale=lr_scale < 1.0)
        if lr_scale > 0.0 and gradients.rows > 0:
            version = policy.version
            stats = gradients.stats | policy.apply_gradients(gradients, lr_scale)
            updates = policy.version - version
            self.workers.faults.note_update(updates > 0, why="norm of the gradient")
            metrics.add_gradient_update(gradients, len(parts), updates, stats)
        if gradients.ends_rollout:
            metrics.rollouts.end_rollout(policy.version)

    def learn(self, batch: SampleBatch) -> None:
        """Learns from a batch `[T, N]` with the driver's policy. Counts its lag and the updates.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        metrics, policy = self.metrics, self.policy
        for version, columns in zip(*np.unique(batch.versions, return_counts=True), strict=True):
            metrics.add_lag(int(version), policy.version, weight=int(columns))
        version, rows, env_steps = policy.version, policy.progress.rows_applied, batch.env_steps
        stats = policy.learn_on_batch(batch)
        metrics.rollouts.end_rollout(policy.version)
        updates = policy.version - version
        if env_steps:
            self.workers.faults.note_update(updates > 0, why="gradient of the whole batch")
        metrics.add_training(env_steps if updates else 0, updates, stats)
        metrics.add_update_rows(updates, policy.progress.rows_applied - rows)

    def set_weights(self, weights: Weights) -> None:
        """Copies weights that workers have learned to the driver's policy.

        Counts as many updates as the version grows by. The driver keeps its own moments, because
        they already include the samples of all replies.
        """
        updates = weights.version - self.policy.version
        self.policy.set_weights(weights._replace(moments=None))
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        self.metrics.rollouts.end_rollout(self.policy.version)
        self.metrics.add_training(0, updates, {})

    # ---- results --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """The `optimizer/` block of results. See `OptimizerStats.report`."""
        return {
            "name": self.title(),
            **self.metrics.report([worker.index for worker in self.workers.remote] or [0]),
            **self.workers.message_stats(),
            "requests_in_flight": self.calls.load.report(),
            "num_skipped_updates": self.num_skipped_updates,
            **self.extra_stats(),
        }

    @property
    def num_skipped_updates(self) -> int:
        """Updates of this run that were skipped because the gradient was not finite."""
        return self.policy.progress.skipped_updates

    def extra_stats(self) -> dict[str, Any]:
        """Numbers that only this strategy reports. Every result must have the same keys."""
        return {}

    # ---- state ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for the pending calls, and keeps their replies for the next step."""
        self.calls.drain()

    def get_state(self) -> dict[str, Any]:
        """Counters, episode statistics, policy, and running statistics of the environments'
        wrappers. Holds only tensors, numbers, strings, lists and dicts. `set_state` of any other
        optimizer accepts it. Drains first."""
        self.drain()
        return {**self.get_driver_state(), "workers": self.worker_states()}

    def get_driver_state(self) -> dict[str, Any]:
        """The part of `get_state` that the driver has at this moment.

        Drains nothing and calls no worker, so it does not disturb training. The statistics of the
        environments' wrappers come from each worker's last reply.
        """
        return {
            **self.metrics.get_state(),
            "restore_count": self.workers.config.restore_count,
            "policy": self.policy.get_state(),
            "workers": latest_statistics(self.workers),
        }

    def worker_states(self) -> dict[str, Any]:
        """The state of each worker that is saved, by worker index as text."""
        return present_statistics(self.workers)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` of any optimizer returned. Drops the results of
        pending calls. Workers get the restored weights with their next calls."""
        self.drain()
        self.calls.clear()
        self.policy.set_state(state["policy"])  # first: raises for another network
        self.metrics.set_state(state)
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        restore_workers(self.workers, int(state["restore_count"]), state.get("workers", {}))

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in the driver, in all workers and in the workers below
        them. Also changes their torch optimizers. Returns once all of them have applied it.

        Raises:
            ConfigError: the name is unknown or the value is wrong. Nothing has changed then.
        """
        self.drain()
        self.policy.set_option(name, value)
        update_algorithm_parameter(self.workers, name, value)

    def stop(self) -> None:
        """Drops pending calls. The caller stops the workers."""
        self.calls.clear()
