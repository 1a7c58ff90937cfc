"""`PolicyOptimizerTrainer`: the Tune trainable around one policy optimizer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ray import tune

from polopt.common.threads import limit_threads
from polopt.policies.policy import Policy
from polopt.rollouts.collectors.gradient_worker import make_workers
from polopt.rollouts.ray_session import attach_or_start
from polopt.trainers.checkpoints import CheckpointError, write_checkpoint
from polopt.trainers.config import Experiment
from polopt.trainers.prometheus import PrometheusExporter
from polopt.trainers.restoring import (
    misfit,
    name_previous,
    read_or_fall_back,
    refuse_pickled,
)
from polopt.trainers.results import make_result
from polopt.trainers.run_context import RunContext, finish_despite_sigterm
from polopt.trainers.trace_file import StepTrace

#: Interval at which a long iteration looks for the stop file.
_STOP_CHECK_S = 0.25


class PolicyOptimizerTrainer(tune.Trainable):
    """Trains the policy that the config names with the optimizer that the config names.

        tune.Tuner(
            PolicyOptimizerTrainer,
            param_space={
                "env": "CartPole-v1",
                "policy": "ppo",
                "optimizer": tune.grid_search(["sync_samples", "decentralized_allreduce"]),
            },
        ).fit()

    Also works without Tune: `trainer = PolicyOptimizerTrainer(config); trainer.train()`. With
    `num_workers=0` that needs no Ray either.

    Checkpoints hold weights, torch optimizer, schedules, counters and random generators, and can be
    restored under another optimizer. `get_state` of each optimizer documents what a resumed run
    repeats bit for bit.

    Class attribute `preset`: options that differ from the defaults of the config classes.

    Attributes:
        experiment: the parsed config.
        workers: the WorkerSet; its local worker holds the policy that is saved.
        optimizer: the policy optimizer; None after `stop`.

    Raises:
        ConfigError: before any worker starts.
    """

    preset: ClassVar[dict[str, Any]] = {}
    experiment: Experiment
    workers: Any = None
    optimizer: Any = None
    _run: RunContext | None = None
    _log_handler: logging.Handler | None = None
    _trace: StepTrace
    #: Counted before `restore`, where Tune does not go on counting by itself.
    _earlier_iterations = 0
    _earlier_s = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # `tune.with_resources` overrides `default_resource_request`, the only method that Tune
        # calls before it starts an actor. The subclass still has to refuse bad configs there.
        super().__init_subclass__(**kwargs)
        request = cls.__dict__.get("default_resource_request")
        if request is not None:
            cls.default_resource_request = _checked_first(request.__func__)  # type: ignore[method-assign]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Returns one bundle for the driver and one for each worker that the run cannot start
        without, the workers below them included."""
        experiment = Experiment.parse(config, cls.preset)
        driver, rollout = experiment.trainer, experiment.rollout
        head = {"CPU": driver.num_cpus_for_driver, "GPU": driver.num_gpus}
        worker = {
            "CPU": rollout.num_cpus_per_worker,
            "GPU": rollout.num_gpus_per_worker,
            "memory": rollout.memory_per_worker,
            **rollout.custom_resources_per_worker,
        }
        places = rollout.workers_needed * (1 + rollout.num_workers_below)
        bundles = [head, *([worker] * places)]
        nonzero = [{k: v for k, v in bundle.items() if v} for bundle in bundles]
        if not any(nonzero):
            nonzero = [{"CPU": 0.001}]  # Tune does not accept an empty request
        return tune.PlacementGroupFactory([nonzero[0], *(b for b in nonzero[1:] if b)])

    def setup(self, config: dict[str, Any], run: RunContext | None = None) -> None:
        """Creates workers and optimizer.

        Args:
            config: flat dict; see `Experiment.parse`.
            run: set by the command line.
        """
        self._exporter = PrometheusExporter()
        if run is not None:
            self._run = run
            self._log_handler = run.enter()
        self.experiment = Experiment.parse(config, self.preset)
        self._build()
        if run is not None and run.restore is not None:
            self.load_checkpoint(run.restore)

    def _build(self) -> None:
        experiment = self.experiment
        device = experiment.learner_device()
        # torch's idle threads spin, so the driver uses no more threads than it reserves CPUs.
        threads = min(int(experiment.trainer.num_cpus_for_driver), os.cpu_count() or 1)
        limit_threads(max(1, threads))
        worker_config = experiment.make_worker_config()
        rollout = experiment.rollout
        if rollout.num_workers:
            num_workers = rollout.num_workers * (1 + rollout.num_workers_below)
            attach_or_start(num_workers * rollout.num_cpus_per_worker)
        self.workers = make_workers(worker_config, device)
        try:
            self.optimizer = self._make_optimizer()
        except BaseException:
            self.workers.stop()
            raise
        self._trace = StepTrace(experiment.trainer, Path(self.logdir))

    def _make_optimizer(self) -> Any:
        self._exporter.restart()
        return self.experiment.optimizer_class(self.workers, self.experiment.optimizer)

    def step(self) -> dict[str, Any]:
        """Runs one training iteration: optimizer steps until it holds
        `min_sample_timesteps_per_iteration` and lasts `min_time_s_per_iteration`."""
        limits, metrics = self.experiment.trainer, self.optimizer.metrics
        metrics.begin_iteration()
        started_s, sampled_before = time.perf_counter(), metrics.num_env_steps_sampled
        next_check_s, steps = _STOP_CHECK_S, 0
        while True:
            self._trace.before_step(self.optimizer)
            self.optimizer.step()
            self._trace.after_step(self.optimizer)
            steps += 1
            sampled = metrics.num_env_steps_sampled - sampled_before
            elapsed_s = time.perf_counter() - started_s
            if (
                sampled >= limits.min_sample_timesteps_per_iteration
                and elapsed_s >= limits.min_time_s_per_iteration
            ):
                break
            if self._run is not None and elapsed_s >= next_check_s:
                next_check_s = elapsed_s + _STOP_CHECK_S
                if self._run.stop_file.exists():
                    break
        result = make_result(self.optimizer, sampled_before, elapsed_s, steps)
        # `Trainable.train` keeps what is there already.
        result["training_iteration"] = self.iteration + 1
        result["timesteps_total"] = metrics.num_env_steps_sampled
        self._exporter.add(result, self.trial_id)
        return result

    @property
    def iteration(self) -> int:
        """Iterations trained, those before `restore` included."""
        return int(super().iteration) + self._earlier_iterations

    @property
    def training_iteration(self) -> int:
        """As `iteration`."""
        return self.iteration

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the seconds before `restore` to Tune's own metrics."""
        metrics: dict[str, Any] = super().get_auto_filled_metrics(*args, **kwargs)
        if "time_total_s" in metrics:
            metrics["time_total_s"] += self._earlier_s
        return metrics

    def _counted_s(self) -> float:
        state: dict[str, Any] = super().get_state()  # type: ignore[no-untyped-call]
        return float(state["time_total"])

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes tensors and JSON; see `polopt.trainers.checkpoints`."""
        state = {
            "trainer": type(self).__name__,
            # With the seed that was drawn, where the config leaves it open.
            "config": self.experiment.to_dict() | {"seed": self.workers.config.seed},
            "training_iteration": self.iteration,
            "time_total_s": self._counted_s() + self._earlier_s,
            "optimizer": self.optimizer.get_state(),
        }
        write_checkpoint(checkpoint_dir, state)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Restores a checkpoint of any trainer whose policy has the same network. If it is
        damaged, restores the one before it, with a warning that names both.

        Args:
            checkpoint: its directory.

        Raises:
            CheckpointError: missing, incomplete or damaged, and no whole one before it; or of
                another network, version or program.
        """
        found, state = read_or_fall_back(checkpoint)
        policy = self.get_policy()
        problem = misfit(state, policy, lambda: self.optimizer.set_state(state["optimizer"]))
        if problem:
            previous = name_previous(found, lambda older: not misfit(older, policy))
            raise CheckpointError(f"checkpoint {found} does not fit: {problem}{previous}")
        self._exporter.restart(restored=True)
        # Checkpoints before 0.2 do not hold these two.
        counted, seconds = super().iteration, self._counted_s()
        self._earlier_iterations = int(state.get("training_iteration", counted)) - counted
        self._earlier_s = float(state.get("time_total_s", seconds)) - seconds

    def restore(self, checkpoint_path: Any) -> None:
        """Restores a checkpoint, and goes on counting its iterations, steps and seconds.

        Args:
            checkpoint_path: a directory, a Tune checkpoint, or what `save` returned.

        Raises:
            CheckpointError: see `load_checkpoint`; also for a checkpoint with the pickle file that
                Tune would load.
        """
        if isinstance(checkpoint_path, str | Path) and not Path(checkpoint_path).is_dir():
            checkpoint_path = str(read_or_fall_back(checkpoint_path)[0])
        refuse_pickled(checkpoint_path)
        super().restore(checkpoint_path)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Becomes the trainer of `new_config`; worker processes are reused where they fit."""
        self.experiment = Experiment.parse(new_config, self.preset)
        self._earlier_iterations, self._earlier_s = 0, 0.0
        device = self.experiment.learner_device()
        self.optimizer.stop()
        worker_config = self.experiment.make_worker_config()
        if not self.workers.reconfigure(worker_config, device):
            self.workers.stop()
            self.workers = make_workers(worker_config, device)
        self.optimizer = self._make_optimizer()
        self._trace = StepTrace(self.experiment.trainer, Path(self.logdir))
        return True

    def cleanup(self) -> None:
        """Stops the workers, and releases the handles of their actors while Ray is still up."""
        finish_despite_sigterm()
        optimizer, self.optimizer = self.optimizer, None
        try:
            if optimizer is not None:
                optimizer.stop()
            self._exporter.record()
        finally:
            if self.workers is not None:
                self.workers.stop()
            if self._log_handler is not None:
                logging.getLogger("polopt").removeHandler(self._log_handler)
                self._log_handler.close()

    def get_policy(self) -> Policy:
        """Returns the policy that is learned."""
        policy: Policy = self.workers.local.policy
        return policy

    def compute_single_action(self, observation: Any, explore: bool = False) -> Any:
        """Returns the action for one observation of the environment's space, for `env.step`."""
        policy = self.get_policy()
        encoded = policy.encoder.encode_one(observation)[None]
        actions, _, _ = policy.compute_actions(encoded, explore=explore)
        return actions[0]


def _checked_first(request: Callable[..., Any]) -> Any:
    def checked(cls: type[PolicyOptimizerTrainer], config: dict[str, Any]) -> Any:
        Experiment.parse(config, cls.preset)
        return request(cls, config)

    return classmethod(checked)
