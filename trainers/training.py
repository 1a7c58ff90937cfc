"""`Training`: what an experiment becomes when it runs, with nothing of Tune in it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray
import torch

from polopt.common.config import ConfigError
from polopt.common.threads import limit_threads
from polopt.rollouts.collectors.gradient_worker import make_workers
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.trainers.checkpoint_fallback import name_previous, read_or_fall_back
from polopt.trainers.checkpoints import CheckpointError, write_checkpoint
from polopt.trainers.config import Experiment
from polopt.trainers.portable import portable_config
from polopt.trainers.preparation import prepare
from polopt.trainers.results import make_result


class Training:
    """Workers and the optimizer over them: trains an experiment, saves it and goes on with it.

    Tune drives one through `PolicyOptimizerTrainer`; the command line drives one itself, as a
    context manager, at whose end the workers end.

    Args:
        experiment: what to train.
        trainer: name of the preset, for checkpoints to tell.
        worker_config: what `prepare` made of the experiment; None: it is prepared here.

    Attributes:
        workers: that sample, the local one included, whose policy is the one that is saved.
        optimizer: that the experiment names.

    Raises:
        ConfigError: before any worker starts.
    """

    def __init__(
        self, experiment: Experiment, trainer: str, worker_config: WorkerConfig | None = None
    ) -> None:
        self.experiment = experiment
        self._trainer = trainer
        # As many threads as CPUs asked for: idle ones spin, at the workers' cost.
        threads = min(int(experiment.trainer.num_cpus_for_driver), os.cpu_count() or 1)
        limit_threads(max(1, threads))
        worker_config, device = worker_config or prepare(experiment), self._learner_device
        _ensure_ray(experiment)
        self.workers = make_workers(worker_config, device)
        try:
            self.optimizer = self._make_optimizer()
        except BaseException:
            self.workers.stop()
            raise

    @property
    def _learner_device(self) -> str:
        num_gpus = self.experiment.trainer.num_gpus
        if num_gpus and not torch.cuda.is_available():
            raise ConfigError(
                f"key 'num_gpus': got {num_gpus:g}, but torch finds no GPU; allowed: 0"
            )
        return "cuda" if num_gpus else "cpu"

    def _make_optimizer(self) -> Any:
        return self.experiment.optimizer_class(self.workers, self.experiment.optimizer)

    def step(self) -> dict[str, Any]:
        """One training iteration: optimizer steps until it is long enough."""
        limits = self.experiment.trainer
        started_s, sampled_before = time.perf_counter(), self.optimizer.num_env_steps_sampled
        steps = 0
        while True:
            self.optimizer.step()
            steps += 1
            sampled = self.optimizer.num_env_steps_sampled - sampled_before
            elapsed_s = time.perf_counter() - started_s
            if (
                sampled >= limits.min_sample_timesteps_per_iteration
                and elapsed_s >= limits.min_time_s_per_iteration
            ):
                return make_result(self.optimizer, sampled_before, elapsed_s, steps)

    def save(self, directory: str | Path) -> None:
        """Writes tensors and JSON; see `polopt.trainers.checkpoints`."""
        state = {
            "trainer": self._trainer,
            # With the seed that was drawn, where the config left it open.
            "config": portable_config(self.experiment) | {"seed": self.workers.config.seed},
            "optimizer": self.optimizer.get_state(),
        }
        write_checkpoint(directory, state)

    def load(self, directory: str | Path) -> None:
        """Takes back a checkpoint of any trainer whose policy has the same network; if it is
        damaged, the one before it, with a warning that names both.

        Raises:
            CheckpointError: missing, incomplete or damaged, and no whole one before it; or of
                another network, version or program.
        """
        found, state = read_or_fall_back(directory)
        try:
            self.optimizer.set_state(state["optimizer"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            network = self.workers.local.policy.get_state()["network"]
            previous = name_previous(
                found, lambda s: s["optimizer"]["policy"].get("network") == network
            )
            said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"checkpoint {found} does not fit: {said}{previous}") from None

    def reset(self, experiment: Experiment) -> None:
        """Becomes the training of another experiment; worker processes go on being used."""
        self.experiment = experiment
        self.optimizer.stop()
        worker_config = prepare(experiment)
        if not self.workers.reconfigure(worker_config, self._learner_device):
            self.workers.stop()
            self.workers = make_workers(worker_config, self._learner_device)
        self.optimizer = self._make_optimizer()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the workers."""
        try:
            self.optimizer.stop()
        finally:
            self.workers.stop()


def _ensure_ray(experiment: Experiment) -> None:
    """Where nobody has started it, as RLlib does: attaches to a cluster if `RAY_ADDRESS` names one,
    else starts Ray here, with as many logical CPUs as the workers need. Without workers nothing
    needs Ray."""
    rollout = experiment.rollout
    if ray.is_initialized() or rollout.num_workers == 0:
        return
    num_workers = rollout.num_workers * (1 + rollout.num_workers_below)
    needed = num_workers * rollout.num_cpus_per_worker
    cpus = None if "RAY_ADDRESS" in os.environ else max(os.cpu_count() or 1, int(needed) + 1)
    ray.init(num_cpus=cpus, include_dashboard=False if cpus else None)
