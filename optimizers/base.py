"""`PolicyOptimizer`: what every distribution strategy is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from polopt.common.config import Config
from polopt.common.data_faults import DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.metrics.episodes import EpisodeWindow
from polopt.metrics.lag import LagMeter, RolloutClock
from polopt.metrics.learner import LearnerStats
from polopt.metrics.timers import PhaseTimer
from polopt.optimizers.scheme import Scheme
from polopt.policies.policy import Policy
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.worker_set import WorkerSet


class OptimizerConfig(Config):
    """Options every optimizer has: none. Each adds its own beside itself."""


class StepResult(NamedTuple):
    """What one `step()` did.

    Attributes:
        env_steps_sampled: environment steps that arrived.
        env_steps_trained: of them, those that were learned from (counted once, whatever the
            number of epochs).
        updates: updates applied to the weights.
    """

    env_steps_sampled: int
    env_steps_trained: int
    updates: int


class PolicyOptimizer(ABC):
    """Who samples, who computes gradients, who applies them, who waits for whom.

    A subclass writes `step`, which reads as the algorithm does in its paper, names its phases in
    `phases` and times each under `with self.timers["..."]:`.

    Args:
        workers: to work with. The optimizer does not own them.
        config: an instance of `config_class`.

    Attributes:
        policy: the local worker's; the one that is evaluated and saved.
        in_flight: the calls under way.
        health: says who can be given work.

    Raises:
        ConfigError: see `check`.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    phases: ClassVar[tuple[str, ...]]

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        self.scheme = self.check(workers.config.rollout, config)
        self.workers = workers
        self.config = config
        self.policy: Policy = workers.local.policy
        self.in_flight = InFlight(workers)
        self.health = WorkerHealth(workers)
        self.timers = {phase: PhaseTimer() for phase in self.phases}
        self.lag = LagMeter()
        self.gradient_lag = LagMeter()
        self.rollouts = RolloutClock()
        self.episodes = EpisodeWindow()
        self.learner = LearnerStats()
        self.num_env_steps_sampled = 0
        self.num_env_steps_trained = 0
        self.num_updates = 0
        self._reported = (time.perf_counter(), 0, 0)

    @classmethod
    @abstractmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        """Refuses what the strategy can not work with, before any actor starts.

        Args:
            rollout: options of sampling.
            config: an instance of `config_class`.

        Returns:
            what strategy it is with those.

        Raises:
            ConfigError: says what has no meaning together, and why.
        """

    @abstractmethod
    def step(self) -> StepResult:
        """One round of optimization: long enough that calling it costs nothing beside it."""

    def count_samples(self, env_steps: int, episodes: EpisodeStats) -> None:
        """Takes note of samples that arrived, and sets the clock of schedules."""
        self.num_env_steps_sampled += env_steps
        self.policy.env_steps = self.num_env_steps_sampled
        self.episodes.add(episodes)

    def usable(self, worker_index: int, faults: DataFaults) -> bool:
        """Takes note of the faults that a fragment or gradient tells of; whether it may be learned
        from.

        Raises:
            NonFiniteError: it may not, and one time too many in a row.
        """
        return self.workers.faults.fragment(worker_index, faults)

    def count_lag(self, acted: int, differentiated: int | None = None) -> None:
        """Takes note of how old something is that is about to be learned from.

        Args:
            acted: version of the weights that sampled it.
            differentiated: of those that its gradient was computed from; None: the present ones.
        """
        now = self.policy.version
        self.lag.add(acted, now, self.rollouts)
        self.gradient_lag.add(now if differentiated is None else differentiated, now, self.rollouts)

    def count_training(
        self, env_steps: int, updates: int, stats: Mapping[str, float], rows: int | None = None
    ) -> None:
        """Takes note of what was learned from.

        Args:
            env_steps: that were not learned from before.
            updates: made with them.
            stats: of the learner.
            rows: that `stats` are means over; None: as many as `env_steps`.
        """
        self.num_env_steps_trained += env_steps
        self.num_updates += updates
        self.learner.add(stats, max(env_steps if rows is None else rows, 1))

    def _since(self, before: tuple[int, int, int]) -> StepResult:
        now = self._counts()
        return StepResult(*(b - a for a, b in zip(before, now, strict=True)))

    def _counts(self) -> tuple[int, int, int]:
        return self.num_env_steps_sampled, self.num_env_steps_trained, self.num_updates

    def stats(self) -> dict[str, Any]:
        """The `optimizer/` block of results: name, counts, rates since the last call, mean
        milliseconds of each phase, and lags since the last call: policy lag is how old the weights
        were that acted, gradient lag (PyTorchRL's gradient asynchrony) how old those were that a
        gradient was computed from, in updates and in rollouts; see `LagMeter`."""
        now_s = time.perf_counter()
        then_s, sampled, updates = self._reported
        elapsed_s = max(now_s - then_s, 1e-9)
        self._reported = (now_s, self.num_env_steps_sampled, self.num_updates)
        return {
            "name": self.name,
            "transport": self.workers.transport,
            **{f"scheme_{part}": value for part, value in self.scheme._asdict().items()},
            "num_env_steps_sampled": self.num_env_steps_sampled,
            "num_env_steps_trained": self.num_env_steps_trained,
            "num_updates": self.num_updates,
            "num_skipped_updates": self.policy.skipped_updates,
            "env_steps_per_s": (self.num_env_steps_sampled - sampled) / elapsed_s,
            "updates_per_s": (self.num_updates - updates) / elapsed_s,
            "policy_lag": self.lag.in_updates.report(),
            "policy_lag_rollouts": self.lag.in_rollouts.report(),
            "gradient_lag": self.gradient_lag.in_updates.report(),
            "gradient_lag_rollouts": self.gradient_lag.in_rollouts.report(),
            **{f"{phase}_time_ms": timer.mean_ms for phase, timer in self.timers.items()},
            **self.extra_stats(),
        }

    def extra_stats(self) -> dict[str, Any]:
        """What a strategy reports besides; the same keys from the first result on."""
        return {}

    def get_state(self) -> dict[str, Any]:
        """Counters, episode window and policy: tensors, numbers, strings, lists and dicts.

        Other optimizers can take it, and go on where this one was.
        """
        self.drain()
        return {
            "num_env_steps_sampled": self.num_env_steps_sampled,
            "num_env_steps_trained": self.num_env_steps_trained,
            "num_updates": self.num_updates,
            "restore_count": self.workers.config.restore_count,
            "episodes": self.episodes.get_state(),
            "policy": self.policy.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `get_state` of any optimizer gave; workers get the weights with the
        next calls. What is in flight is finished and thrown away."""
        self.drain()
        self.in_flight.clear()  # of calls to workers that have not come up
        self.policy.set_state(state["policy"])  # first: it refuses what is of another network
        self.num_env_steps_sampled = int(state["num_env_steps_sampled"])
        self.num_env_steps_trained = int(state["num_env_steps_trained"])
        self.num_updates = int(state["num_updates"])
        self.episodes.set_state(state["episodes"])
        self.policy.env_steps = self.num_env_steps_sampled
        self._reported = (time.perf_counter(), self.num_env_steps_sampled, self.num_updates)
        self.workers.forget_sent_weights()
        self.rollouts.clear()
        if self.workers.remote:
            self.health.up()
        self.workers.begin_restored_run(_restore_count(state) + 1)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in this process, in all workers and in the workers below
        them, torch optimizers included. Returns once each has it.

        Args:
            name: key of an option of the policy, for example `lr`.
            value: its new value.

        Raises:
            ConfigError: unknown name or wrong value; nothing has changed then.
        """
        self.drain()
        self.policy.set_option(name, value)
        self.workers.update_algorithm_parameter(name, value)

    @abstractmethod
    def drain(self) -> None:
        """Waits for what is in flight and counts it, so that nothing is lost by a save."""

    def stop(self) -> None:
        """Forgets what is in flight. The workers are stopped by who made them."""
        self.in_flight.clear()


def _restore_count(state: Mapping[str, Any]) -> int:
    """How often the saved run had been restored; checkpoints before 0.2 call it `life`."""
    return int(state["restore_count"] if "restore_count" in state else state["life"])
