"""`OptimizerStats`: the counters, lags, statistics and timers of a policy optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polopt.common.tracer import TRACER
from polopt.common.weights import Gradients
from polopt.metrics import actions, lag, machine, worker_times
from polopt.metrics.actions import ActionStats
from polopt.metrics.custom_metrics import CustomMetrics
from polopt.metrics.episode_window import EpisodeWindow
from polopt.metrics.lag import LagMeter, LearnedVersions
from polopt.metrics.learner import LEARNER_KEYS, LearnerStats
from polopt.metrics.machine import GpuUse, MachineMeter
from polopt.metrics.number import declare, within
from polopt.metrics.record import Record
from polopt.metrics.timers import EVALUATION, MAX_DURATIONS, REPORT, STARTUP, PhaseTimer
from polopt.metrics.worker_times import WorkerTimes

#: The numbers of `OptimizerStats.report`.
NUMBERS = (
    *declare("""
        num_env_steps_sampled (environment steps, counter, metric=env_steps): steps that were
            sampled
        num_agent_steps_sampled (agent steps, counter, metric=agent_steps): steps of agents that
            were sampled. With one agent, these are the environment steps
        num_env_steps_discarded (environment steps, total, metric=): steps that were discarded
            because values of their environment were not finite. `num_env_steps_sampled` does not
            include these steps
        num_env_steps_trained (environment steps, counter): steps from which the policy learned.
            Each step counts once. With a replay buffer, a row counts each time the learner learns
            from it. With several agents, each step of an agent counts
        num_updates (updates, counter): updates of the weights
        rows_per_update (rows, metric=): rows in the gradient of an update, for all learners or
            workers together. Mean over the interval, 0 without updates
        env_steps_per_s (environment steps/s): sampling rate in the interval, excluding start-up and
            evaluation
        updates_per_s (updates/s): update rate in the same time
        startup_s (s, total, metric=): wall time of the start-up
        training_s (s, total, metric=): wall time since the end of the start-up, excluding
            evaluation
        interval_s (s, metric=): wall time of the interval. To combine the shares of several
            results, weight them by this number
    """),
    *within("actions", actions.NUMBERS),
    *lag.NUMBERS,
    *declare(f"""
        <phase>_time_ms (ms, metric=): mean of the last 100 timings of the phase. Phases that a
            strategy measures in workers have this key, too
        driver/share/<phase> (share): share of the driver's wall time of the interval. The shares of
            all phases sum to 1
        driver/p50_ms/<phase> (ms): median of the timings of the interval (at most the last
            {MAX_DURATIONS:,}). 0 without timings
        driver/p99_ms/<phase> (ms): 99th percentile of the same timings
    """),
    *within("workers", worker_times.NUMBERS),
    *within("machine", machine.NUMBERS),
    *declare("""
        num_bytes_received (bytes, counter, metric=bytes{direction=received}): gradients and
            batches from remote workers, and weights from ranks. Gradients count after compression,
            and batches count before compression
        num_gradients (gradients, counter, metric=): gradients of workers, including gradients that
            workers did not send because they were not finite
        num_gradients_accepted (gradients, counter, metric=gradients{outcome=accepted}): gradients
            that were applied, alone or in a mean over workers
        num_gradients_stale (gradients, counter, metric=gradients{outcome=stale}): gradients older
            than `max_policy_lag`, which were dropped or scaled. Scaled gradients also count as
            accepted
        num_gradients_skipped (gradients, counter, metric=gradients{outcome=skipped}): gradients
            that were not applied because the gradient or the update was not finite or was too
            large
        num_early_stopped (fragments, total, title=Early-stopped fragments): fragments that ended
            early because enough workers had finished. Strategies with the option `fraction_workers`
            fill this key
    """),
)
#: The attributes of `OptimizerStats` that results contain as they are.
_COUNTS = tuple(number.key for number in NUMBERS if number.kind in ("counter", "total"))


class StepResult(NamedTuple):
    """Counts of one `step()` of an optimizer.

    Attributes:
        env_steps_sampled: number of environment steps in the replies that `step()` processed.
        env_steps_trained: number of environment steps that the learner used. A step counts once,
            even if several epochs use it. With a replay buffer, a step counts each time that the
            learner uses a batch that contains it.
        updates: number of updates of the weights.
    """

    env_steps_sampled: int
    env_steps_trained: int
    updates: int


class OptimizerStats:
    """Collects the counters and statistics of a policy optimizer.

    Start-up is the time in which processes start, environments are made and libraries are imported.
    Start-up begins when this object is constructed. Start-up ends when a worker begins the call
    whose reply arrives first. The other phases, the rates and the training time do not include
    start-up. The rates and the training time do not include the phase `evaluation` either, because
    training pauses during this phase.

    Args:
        phases: names of the timed phases of a step in the driver. Phases do not overlap. This class
            adds the phases `report` and `evaluation`.
        worker_phases: names of further phases in which only workers spend time.
        actions: collects statistics of the sampled actions.
        read_gpus: a function, such as a `GpuReader`, that returns the current use of the driver's
            GPUs. `None` means that the driver uses no GPU.
        clock: returns the seconds of a monotonic clock.
        learner_keys: see `LearnerStats`.

    Attributes:
        num_env_steps_sampled: environment steps sampled so far.
        num_agent_steps_sampled: steps of agents sampled so far.
        num_env_steps_discarded: environment steps of fragments that were not finite.
            `num_env_steps_sampled` does not include these steps.
        num_env_steps_trained: environment steps that learning has used. See `StepResult`.
        num_updates: updates of the weights so far.
        lag: policy lag of the weights that chose the actions. See `LagMeter`.
        gradient_lag: lag of the weights that computed gradients.
        rollouts: for each rollout, the version of the weights at the end of learning from it.
        episodes: statistics of the last episodes.
        actions: statistics of the sampled actions.
        custom_metrics: numbers that callbacks have returned for episodes.
        learner: statistics of the learner.
        timers: a timer for each phase of the driver, followed by a timer for each further phase of
            the workers.
        worker_times: times that the workers have measured.
        machine: measures the use of the driver's machine.
        startup_s: seconds of start-up so far, including the start-up before a restore.
        training_s: seconds since the end of start-up, without evaluation. Includes the training
            time before a restore.
        num_bytes_received: payload bytes of gradients, batches and weights from workers.
        num_gradients: gradients that the driver has received from workers. Includes gradients that
            workers did not send because they were not finite
        num_gradients_accepted: number of gradients that were applied, alone or in a mean.
        num_gradients_stale: gradients with a lag above the optimizer's limit. The optimizer drops
            or scales these gradients.
        num_gradients_skipped: gradients that were not applied because they were not finite or too
            large
        num_early_stopped: fragments that ended early because enough workers had finished.
    """

    def __init__(
        self,
        phases: Iterable[str] = (),
        worker_phases: Iterable[str] = (),
        actions: ActionStats | None = None,
        read_gpus: Callable[[], GpuUse] | None = None,
        clock: Callable[[], float] = time.monotonic,
        learner_keys: Iterable[str] = LEARNER_KEYS,
    ) -> None:
        self._clock = clock
        self.num_env_steps_sampled = 0
        self.num_agent_steps_sampled = 0
        self.num_env_steps_discarded = 0
        self.num_env_steps_trained = 0
        self.num_updates = 0
        self.lag = LagMeter()
        self.gradient_lag = LagMeter()
        self.rollouts = LearnedVersions()
        self.episodes = EpisodeWindow()
        self.actions = actions or ActionStats()
        self.custom_metrics = CustomMetrics()
        self.learner = LearnerStats(learner_keys)
        self._driver_phases = (*phases, REPORT, EVALUATION)
        every_phase = (*self._driver_phases, *worker_phases)
        self.timers = {phase: PhaseTimer(name=phase, clock=clock) for phase in every_phase}
        self.worker_times = WorkerTimes(worker_phases, self._end_startup, clock)
        self.machine = MachineMeter(read_gpus)
        self.num_bytes_received = 0
        self.num_gradients = 0
        self.num_gradients_accepted = 0
        self.num_gradients_stale = 0
        self.num_gradients_skipped = 0
        self.num_early_stopped = 0
        self._created_s = self._clock()
        self._begun_s: float | None = None  # when start-up ended and training began
        self._earlier_startup_s = self._earlier_training_s = 0.0  # before a restore
        # Seconds of evaluation in this process before a restore.
        self._earlier_evaluation_s = 0.0
        self._begin_interval()

    def _begin_interval(self) -> None:
        for timer in self.timers.values():
            timer.take_percentiles_ms()
        self._rows = self._updates_of_rows = 0
        self._reported = (self._clock(), self.num_env_steps_sampled, self.num_updates)

    def _end_startup(self, busy_s: float = 0.0) -> None:
        """Records that start-up ended `busy_s` seconds ago. Only the first call has an effect."""
        if self._begun_s is None:
            self._begun_s = max(self._clock() - busy_s, self._created_s, self._reported[0])
            for timer in self.timers.values():
                timer.restart(self._begun_s)

    @property
    def startup_s(self) -> float:
        ended_s = self._clock() if self._begun_s is None else self._begun_s
        return self._earlier_startup_s + ended_s - self._created_s

    @property
    def training_s(self) -> float:
        if self._begun_s is None:
            return self._earlier_training_s
        evaluation_s = self.timers[EVALUATION].total_s - self._earlier_evaluation_s
        return self._earlier_training_s + self._clock() - self._begun_s - evaluation_s

    def begin_iteration(self) -> None:
        """Ends the phase `report`, which began with the last call of `report`.

        In this phase, Tune processes the result, its loggers write the result, and Tune may save a
        checkpoint.
        """
        self.timers[REPORT].push(self._clock() - self._reported[0])

    def counts(self) -> StepResult:
        """Returns the counters since the start of the run."""
        return StepResult(self.num_env_steps_sampled, self.num_env_steps_trained, self.num_updates)

    def counts_since(self, before: StepResult) -> StepResult:
        """Returns the increase of the counters since `before`, an earlier result of `counts`."""
        return StepResult(*(b - a for a, b in zip(before, self.counts(), strict=True)))

    def add_record(self, worker_index: int, record: Record, in_driver: bool) -> None:
        """Adds the record of a call. The optimizer runs this method when it takes the call's reply.

        Args:
            worker_index: index of the worker that ran the call.
            record: the record of the call.
            in_driver: True if the call ran in the driver's process. The updates of such a call
                have already changed the driver's policy. The optimizer counts updates in other
                processes separately, with `add_training`.
        """
        self.num_env_steps_sampled += record.env_steps
        self.num_agent_steps_sampled += record.agent_steps
        self.num_env_steps_discarded += record.env_steps_discarded
        self.episodes.add(record.episodes)
        self.actions.add(record.actions)
        self.custom_metrics.add(record.custom_metrics)
        self.worker_times.add(worker_index, record.seconds, record.env_steps, record.use)
        if not in_driver:
            self.num_bytes_received += record.num_bytes
        self.num_early_stopped += record.num_early_stopped
        for updates, rollouts in record.lags:
            self._add_lag_of_worker(updates, rollouts)
        if record.learned is not None:
            updates = record.updates if in_driver else 0
            self.add_training(record.env_steps_trained, updates, record.learned)
            self.add_update_rows(record.updates, record.rows_applied)

    def add_lag(self, acted: int, now: int, computed: int | None = None, weight: int = 1) -> None:
        """Counts the lag of a batch or gradient right before the learner uses it.

        Args:
            acted: version of the weights that chose the actions.
            now: version of the learner's weights.
            computed: version of the weights that computed the gradient. `None` means `now`.
            weight: number of environments in the batch whose rows have this lag. 1 for a gradient.
        """
        TRACER.count("policy lag", now - acted)
        self.lag.add(acted, now, self.rollouts, weight)
        computed = now if computed is None else computed
        self.gradient_lag.add(computed, now, self.rollouts, weight)

    def _add_lag_of_worker(self, updates: int, rollouts: int) -> None:
        """Counts the lag of a batch that a worker used for its own learning.

        Args:
            updates: the lag, counted in updates that this worker made.
            rollouts: the lag, counted in batches from which this worker learned.
        """
        TRACER.count("policy lag", updates)
        self.lag.in_updates.add(updates)
        self.lag.in_rollouts.add(rollouts)
        self.gradient_lag.in_updates.add(0)
        self.gradient_lag.in_rollouts.add(0)

    def add_gradients(self, parts: Sequence[Gradients], now: int, stale: bool) -> None:
        """Counts gradients that the driver has received from workers, and their lags.

        Args:
            parts: one gradient per worker, even if the optimizer applies only the mean of these
                gradients.
            now: version of the weights before the gradients are applied.
            stale: whether the lag of the gradients is above the optimizer's limit.
        """
        self.num_gradients += len(parts)
        self.num_gradients_stale += len(parts) * stale
        for part in parts:
            self.add_lag(part.acted, now, computed=part.version)

    def add_gradients_skipped(self) -> None:
        """Counts a gradient that a worker did not send because it was not finite."""
        self.num_gradients += 1
        self.num_gradients_skipped += 1

    def add_gradient_update(
        self, gradients: Gradients, num_parts: int, updates: int, stats: Mapping[str, float]
    ) -> None:
        """Counts a gradient as applied or skipped.

        Args:
            gradients: the gradient of one worker, or the mean over several workers.
            num_parts: number of these workers.
            updates: number of updates made with the gradient. 0 means that the gradient was skipped
                because it was not finite or too large.
            stats: statistics of the learner.
        """
        if updates:
            self.num_gradients_accepted += num_parts
        else:
            self.num_gradients_skipped += num_parts
        new_rows = gradients.new_rows if updates else 0
        self.add_training(new_rows, updates, stats, gradients.rows)
        self.add_update_rows(updates, updates * gradients.rows)

    def add_training(
        self, env_steps: int, updates: int, stats: Mapping[str, float], rows: int | None = None
    ) -> None:
        """Counts updates, and the environment steps that these updates used.

        Args:
            env_steps: number of environment steps that no earlier update has used. For a batch from
                a replay buffer, the number of rows of the batch.
            updates: number of updates made with these steps.
            stats: statistics of the learner, as means over `rows` rows.
            rows: number of rows. `None` means `env_steps`.
        """
        self._end_startup()
        self.num_env_steps_trained += env_steps
        self.num_updates += updates
        self.learner.add(stats, max(env_steps if rows is None else rows, 1))

    def add_update_rows(self, updates: int, rows: int) -> None:
        """Counts the rows of the gradients that updates applied.

        With an all-reduce, several learners make the same updates with the sum of their gradients.
        Then `rows` includes the rows of all these learners.
        """
        self._updates_of_rows += updates
        self._rows += rows

    def report(self, worker_indices: Iterable[int] = (0,)) -> dict[str, Any]:
        """Returns the counters of the run, and the rates, lags and times since the last call.

        `NUMBERS` describes the keys. Every call returns the same keys.

        Args:
            worker_indices: indices of the workers of the run. 0 is the local worker.
        """
        now_s = self._clock()
        then_s, sampled, updates = self._reported
        interval_s = max(now_s - then_s, 1e-9)
        startup_s = (now_s if self._begun_s is None else max(self._begun_s, then_s)) - then_s
        evaluation_s = self.timers[EVALUATION].interval_s
        training_s = max(interval_s - startup_s - evaluation_s, 1e-9)
        report = {
            **{key: getattr(self, key) for key in _COUNTS},
            "rows_per_update": self._rows / max(self._updates_of_rows, 1),
            "env_steps_per_s": (self.num_env_steps_sampled - sampled) / training_s,
            "updates_per_s": (self.num_updates - updates) / training_s,
            "interval_s": interval_s,
            "actions": self.actions.report(),
            "policy_lag": self.lag.in_updates.report(),
            "policy_lag_rollouts": self.lag.in_rollouts.report(),
            "gradient_lag": self.gradient_lag.in_updates.report(),
            "gradient_lag_rollouts": self.gradient_lag.in_rollouts.report(),
            **{f"{phase}_time_ms": timer.mean_ms for phase, timer in self.timers.items()},
            "driver": self._report_driver(startup_s, training_s),
            "workers": self.worker_times.report(worker_indices, training_s),
            "machine": self.machine.report(),
        }
        self._begin_interval()
        return report

    def _report_driver(self, startup_s: float, training_s: float) -> dict[str, dict[str, float]]:
        timers = {phase: self.timers[phase] for phase in self._driver_phases}
        if self._begun_s is None:
            for timer in timers.values():
                timer.restart(self._clock())
        measured_s = {phase: timer.interval_s for phase, timer in timers.items()}
        total_s = max(training_s + measured_s[EVALUATION], sum(measured_s.values())) + startup_s
        measured_s[STARTUP] = startup_s
        share = {phase: duration_s / total_s for phase, duration_s in measured_s.items()}
        percentiles = {phase: timer.take_percentiles_ms() for phase, timer in timers.items()}
        return {
            "share": {**share, "other": max(0.0, 1.0 - sum(share.values()))},
            "p50_ms": {phase: p50 for phase, (p50, _) in percentiles.items()},
            "p99_ms": {phase: p99 for phase, (_, p99) in percentiles.items()},
        }

    def get_state(self) -> dict[str, Any]:
        """Returns the counters and episode statistics for a checkpoint."""
        return {
            "num_env_steps_sampled": self.num_env_steps_sampled,
            "num_agent_steps_sampled": self.num_agent_steps_sampled,
            "num_env_steps_trained": self.num_env_steps_trained,
            "num_updates": self.num_updates,
            "startup_s": self.startup_s,
            "training_s": self.training_s,
            "episodes": self.episodes.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`. Ignores unknown keys."""
        self.num_env_steps_sampled = sampled = int(state["num_env_steps_sampled"])
        # Older versions had only environments with one agent.
        self.num_agent_steps_sampled = int(state.get("num_agent_steps_sampled", sampled))
        self.num_env_steps_trained = int(state["num_env_steps_trained"])
        self.num_updates = int(state["num_updates"])
        self.episodes.set_state(state["episodes"])
        # If start-up has not ended yet, its seconds are added to the saved `startup_s`. Otherwise,
        # both times continue from the saved values.
        self._earlier_startup_s = float(state.get("startup_s", 0.0))
        self._earlier_training_s = float(state.get("training_s", 0.0))
        if self._begun_s is not None:
            self._created_s = self._begun_s = self._clock()
            self._earlier_evaluation_s = self.timers[EVALUATION].total_s
        self.rollouts.clear()
        self.worker_times.clear()
        self._begin_interval()
