"""`Run`: the workers, the optimizer and the evaluation of a trainer, and one training iteration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from pyarrow import fs

from polopt.common.add_ons import RunListener
from polopt.common.threads import limit_threads
from polopt.metrics.timers import EVALUATION
from polopt.policies.policy import Policy
from polopt.rollouts.seeds import GlobalGenerators, kept_global_generators
from polopt.rollouts.workers.callbacks import CallbackCaller
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.best_checkpoint import BestCheckpoint
from polopt.trainers.evaluation import Evaluation
from polopt.trainers.experiment import Experiment, RunPlan, checked_plan
from polopt.trainers.tune_trial import in_directory

logger = logging.getLogger("polopt")

#: Seconds between two checks for a request to stop, during a long iteration.
_STOP_CHECK_S = 0.25
#: A warning says so if an iteration has made at least this number of optimizer steps in this number
#: of seconds, and has sampled nothing.
_STEPS_WITHOUT_SAMPLES, _WARN_AFTER_S = 100, 5.0


class Iteration(NamedTuple):
    """The counts of one training iteration.

    Attributes:
        sampled_before: environment steps that the run had sampled before the iteration.
        elapsed_s: duration of the iteration in seconds.
        steps: number of optimizer steps.
    """

    sampled_before: int
    elapsed_s: float
    steps: int


class Run:
    """The workers, the optimizer and the evaluation of one experiment.

        run = Run(experiment, None)
        run.begin(results)                # checks the options, and starts the workers
        run.iterate(lambda: False)        # several optimizer steps
        run.stop_optimizer()
        run.workers.stop()

    Args:
        experiment: the parsed config. If it is replaced, the next `begin` uses the new one.
        users_directory: see `in_directory`.

    Attributes:
        listeners: the listeners of add-ons.
        workers: the training workers. None before the first `begin`.
        optimizer: the policy optimizer. None before `begin` and after `stop_optimizer`.
        evaluation: None without the option `evaluation_interval`, and when `optimizer` is None.
        callbacks: calls the user's callbacks in the driver.
    """

    def __init__(self, experiment: Experiment, users_directory: str | None) -> None:
        self.experiment = experiment
        self.listeners: Sequence[RunListener] = ()
        self.workers: Any = None
        self.optimizer: Any = None
        self.evaluation: Evaluation | None = None
        self.callbacks: CallbackCaller
        self._users_directory = users_directory
        self._generators = GlobalGenerators()

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        policy: Policy = self.workers.local.policy
        return policy

    def own_generators(self) -> AbstractContextManager[None]:
        """A context manager in which environments of this process draw from global generators that
        belong to this run. Other trainers and evaluations in the process then do not change it."""
        rollout = self.experiment.rollout
        owns = rollout.num_workers == 0 and rollout.seed is not None
        return self._generators.in_use() if owns else nullcontext()

    def tell(self, event: Callable[..., None], *values: Any) -> None:
        """Calls the method `event` of each listener."""
        for listener in self.listeners:
            getattr(listener, event.__name__)(*values)

    # ---- start and stop -------------------------------------------------------------------------

    def begin(self, results: tuple[fs.FileSystem, str]) -> None:
        """Makes the workers, the optimizer and the evaluation from the experiment. Stops the
        previous ones, but reuses their worker processes where possible. If this method raises, the
        run has stopped.

        Args:
            results: file system and directory of the results. The best checkpoint is saved there.

        Raises:
            ConfigError: a check of the options fails. `trainers/experiment.py` lists all checks.
        """
        self.stop_optimizer()
        # Idle threads of torch use CPU time. The driver therefore gets one thread per reserved CPU.
        cpus = int(self.experiment.trainer.num_cpus_for_driver)
        limit_threads(max(1, min(cpus, os.cpu_count() or 1)))
        with in_directory(self._users_directory), self.own_generators():
            self._start(checked_plan(self.experiment), results)
        self.tell(RunListener.begin)

    def _start(self, plan: RunPlan, results: tuple[fs.FileSystem, str]) -> None:
        config = plan.workers
        for listener in self.listeners:
            config = listener.adapt(config)
        self.callbacks = CallbackCaller(config.callbacks, "driver")
        try:
            if not self._reuse_workers(config, plan.device):
                self.workers = plan.worker_set(config, plan.device)
            self.optimizer = self._make_optimizer()
            if plan.evaluation is not None:
                self._make_evaluation(plan.evaluation, plan.device, BestCheckpoint(*results))
        except BaseException:
            self.stop_optimizer()
            if self.workers is not None:
                self.workers.stop()
            raise

    def _reuse_workers(self, config: WorkerConfig, device: str) -> bool:
        """Makes new workers in the running processes, and returns True. Otherwise stops these
        processes, if any, and returns False."""
        if self.workers is None:
            return False
        # A wrapped transport sees a run from its first start, so the run needs new processes.
        wrapped = config.wrap_transport or self.workers.config.wrap_transport
        if not wrapped and self.workers.reconfigure(config, device):
            return True
        self.workers.stop()
        return False

    def _make_optimizer(self) -> Any:
        return self.experiment.optimizer_class(self.workers, self.experiment.optimizer)

    def _make_evaluation(self, config: WorkerConfig, device: str, best: BestCheckpoint) -> None:
        with kept_global_generators():  # new environments may draw global random numbers
            workers = WorkerSet(
                config,
                device,
                meanwhile="Training continues, but no evaluation ends before they start.",
            )
        self.evaluation = Evaluation(self.experiment.trainer, workers, best)

    def stop_optimizer(self) -> None:
        """Stops the optimizer and the evaluation, if there are any."""
        optimizer, self.optimizer = self.optimizer, None
        evaluation, self.evaluation = self.evaluation, None
        try:
            if optimizer is not None:
                optimizer.stop()
        finally:
            if evaluation is not None:
                evaluation.stop()

    # ---- training -------------------------------------------------------------------------------

    def iterate(self, is_stopped: Callable[[], bool]) -> Iteration:
        """Calls `optimizer.step()` until the iteration has at least
        `min_sample_timesteps_per_iteration` environment steps and has lasted for at least
        `min_time_s_per_iteration`.

        Args:
            is_stopped: called a few times per second. If it returns True, the iteration ends.
        """
        limits, metrics = self.experiment.trainer, self.optimizer.metrics
        self.tell(RunListener.begin_iteration)
        metrics.begin_iteration()
        clock = self.workers.clock
        started_s, sampled_before = clock(), metrics.num_env_steps_sampled
        next_check_s, steps, warn_after_s = _STOP_CHECK_S, 0, _WARN_AFTER_S
        while True:
            self.tell(RunListener.before_step)
            self.optimizer.step()
            self.tell(RunListener.after_step)
            steps += 1
            sampled = metrics.num_env_steps_sampled - sampled_before
            elapsed_s = clock() - started_s
            if not sampled and steps >= _STEPS_WITHOUT_SAMPLES and elapsed_s >= warn_after_s:
                warn_after_s *= 4
                self._warn_without_samples(steps, elapsed_s)
            if (
                sampled >= limits.min_sample_timesteps_per_iteration
                and elapsed_s >= limits.min_time_s_per_iteration
            ):
                break
            if elapsed_s >= next_check_s:
                next_check_s = elapsed_s + _STOP_CHECK_S
                if self.workers.transport.decide(is_stopped, lambda: None):
                    break
        return Iteration(sampled_before, elapsed_s, steps)

    def _warn_without_samples(self, steps: int, elapsed_s: float) -> None:
        logger.warning(
            "optimizer %s has made %d steps in %.0f s and sampled nothing. The iteration "
            "goes on until it has %d environment steps "
            "(min_sample_timesteps_per_iteration). If `step` never samples, this iteration "
            "does not end",
            self.experiment.optimizer_name,
            steps,
            elapsed_s,
            self.experiment.trainer.min_sample_timesteps_per_iteration,
        )

    def evaluate(
        self,
        iteration: int,
        state_of: Callable[[dict[str, Any]], dict[str, Any]],
        is_stopped: Callable[[], bool],
        before: Callable[[], None],
    ) -> None:
        """Takes the result of an evaluation in workers if this evaluation has ended. Then begins a
        new evaluation if one is due. Without evaluation workers, also plays its episodes. Does
        nothing without the option `evaluation_interval`.

        Args:
            iteration: index of the iteration that has ended. The first iteration has the index 1.
            state_of: a function from the state of the optimizer to the state for the best
                checkpoint.
            is_stopped: if it returns True, an evaluation in this process is dropped.
            before: called before an evaluation begins.
        """
        evaluation, decide = self.evaluation, self.workers.transport.decide
        if evaluation is None:
            return
        with self.optimizer.timers[EVALUATION]:
            decide(evaluation.poll, evaluation.finish)
            if evaluation.is_due(iteration):
                before()
                driver_state = self.optimizer.get_driver_state()
                statistics = [one["statistics"] for one in driver_state["workers"].values()]
                weights, state = self.policy.get_weights(), state_of(driver_state)
                evaluation.begin(weights, state, statistics)
                if evaluation.in_driver and not decide(
                    lambda: evaluation.run(is_stopped), evaluation.finish
                ):
                    evaluation.drop()
