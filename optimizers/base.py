"""`PolicyOptimizer`: base class of all distribution strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from polopt.common.config import Config
from polopt.common.episodes import EpisodeStats
from polopt.metrics.optimizer_stats import OptimizerStats, StepResult
from polopt.optimizers.scheme import Scheme
from polopt.policies.policy import Policy
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.worker_set import WorkerSet


class OptimizerConfig(Config):
    """Base class of optimizers' options; it has none itself."""


class PolicyOptimizer(ABC):
    """Decides which process samples, computes gradients and applies them, and which of them wait.

    A subclass implements `step`. It may name the phases of a step in `phases`, and time each with
    `with self.timers[phase]:`. Phases must not overlap, because results report their shares.
    `docs/write-an-optimizer.md` has a complete example.

    Args:
        workers: the workers to use; the caller stops them.
        config: an instance of `config_class`.

    Attributes:
        policy: policy of the local worker, which is evaluated and saved.
        in_flight: pending calls.
        health: tracks which workers are up.
        metrics: counters and statistics.
        timers: of `metrics`, by phase.
        scheme: place in the scheme matrix.

    Raises:
        ConfigError: see `check`.
    """

    name: ClassVar[str] = ""
    config_class: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    phases: ClassVar[tuple[str, ...]] = ()
    #: Phases of the workers; their timers are filled with `push`.
    worker_phases: ClassVar[tuple[str, ...]] = ()

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        self.scheme = self.check(workers.config.rollout, config)
        self.workers = workers
        self.config = config
        self.policy: Policy = workers.local.policy
        self.in_flight = InFlight(workers)
        self.health = WorkerHealth(workers)
        self.metrics = OptimizerStats(self.phases, self.worker_phases)
        self.timers = self.metrics.timers

    @abstractmethod
    def step(self) -> StepResult:
        """One round of optimization. Should last milliseconds, so that a call costs little."""

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        """Refuses options that the strategy does not support, before any actor starts.

        Args:
            rollout: options of sampling.
            config: an instance of `config_class`.

        Returns:
            the strategy's place in the scheme matrix with these options.

        Raises:
            ConfigError: names the options and the reason.
        """
        return Scheme()

    def count_samples(self, env_steps: int, episodes: EpisodeStats) -> None:
        """Counts samples that arrived, and advances the clock of the policy's schedules."""
        self.metrics.add_samples(env_steps, episodes)
        self.policy.env_steps = self.metrics.num_env_steps_sampled

    def stats(self) -> dict[str, Any]:
        """The `optimizer/` block of results; see `OptimizerStats.report`."""
        return {
            "name": self.name or type(self).__name__,
            "transport": self.workers.transport,
            **{f"scheme_{part}": value for part, value in self.scheme._asdict().items()},
            **self.metrics.report([worker.index for worker in self.workers.remote] or [0]),
            "num_bytes_sent": self.workers.snapshots.num_bytes_sent,
            "requests_in_flight": self.in_flight.load.report(),
            "num_skipped_updates": self.num_skipped_updates,
            **self.extra_stats(),
        }

    @property
    def num_skipped_updates(self) -> int:
        """Updates of this run that were skipped because the gradient was not finite."""
        return self.policy.skipped_updates

    def extra_stats(self) -> dict[str, Any]:
        """Further numbers of this strategy; the same keys from the first result on."""
        return {}

    def drain(self) -> None:
        """Waits for pending calls. Here their results are dropped; a strategy that leaves calls
        pending between steps overrides this and counts them."""
        self.in_flight.gather()

    def get_state(self) -> dict[str, Any]:
        """Counters, episode statistics and policy: tensors, numbers, strings, lists and dicts.
        `set_state` of any other optimizer accepts it."""
        self.drain()
        restore_count = self.workers.config.restore_count
        policy = self.policy.get_state()
        return {**self.metrics.get_state(), "restore_count": restore_count, "policy": policy}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` of any optimizer returned. Results of pending calls are
        dropped, and workers get the weights with their next calls."""
        self.drain()
        self.in_flight.clear()  # of workers that are not up yet
        self.policy.set_state(state["policy"])  # first: raises for another network
        self.metrics.set_state(state)
        self.policy.env_steps = self.metrics.num_env_steps_sampled
        self.workers.snapshots.clear()
        if self.workers.remote:
            self.health.up()
        # Checkpoints before 0.2 call it `life`.
        restored = state["restore_count"] if "restore_count" in state else state["life"]
        self.workers.begin_restored_run(int(restored) + 1)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in this process, in all workers and in the workers below
        them, torch optimizers included. Returns once all have applied it.

        Raises:
            ConfigError: unknown name or wrong value; nothing has changed then.
        """
        self.drain()
        self.policy.set_option(name, value)
        self.workers.update_algorithm_parameter(name, value)

    def stop(self) -> None:
        """Drops pending calls. The caller stops the workers."""
        self.in_flight.clear()
