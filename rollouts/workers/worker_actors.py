"""`WorkerActors`: starts and stops the Ray actors of a `WorkerSet`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import ray

from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers.in_flight import wait_all
from polopt.rollouts.workers.placement import actor_argument, actor_options, in_reservation
from polopt.rollouts.workers.remote_worker import RemoteWorker, WorkerSpec
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

#: Time for environments to close before the process of their worker is killed.
STOP_TIMEOUT_S = 1.0
#: Options that a worker's process is started with; a change needs other processes.
_PROCESS_KEYS = (
    "num_workers",
    "min_workers",
    "num_workers_below",
    "num_cpus_per_worker",
    "num_gpus_per_worker",
    "custom_resources_per_worker",
    "memory_per_worker",
)


class WorkerActors:
    """Starts actors, each from the config, its own differences from it, and its restart count.

    Args:
        actor_class: class of the workers.
        specs: differences of the first workers from the config, in order of index from 1.

    Attributes:
        specs: differences by worker index.
        restart_counts: number of earlier workers by index; 0 where missing.
    """

    def __init__(self, actor_class: type[RolloutWorker], specs: Sequence[WorkerSpec]) -> None:
        self._actor_class = actor_class
        self.specs = dict(enumerate(specs, start=1))
        self.restart_counts: dict[int, int] = {}

    @functools.cached_property
    def _ray_class(self) -> Any:
        """Made once: Ray exports each actor class to its control service, and waits for that
        without a limit."""
        # Calls in the group "control" run while a long call runs in the default group.
        as_actor: Any = ray.remote  # its annotations lack the option
        return as_actor(concurrency_groups={"control": 1})(self._actor_class)

    def config_of(self, config: WorkerConfig, index: int) -> WorkerConfig:
        """The config of the worker with this index."""
        spec = self.specs.get(index, WorkerSpec())
        rollout = config.rollout
        if spec.num_envs is not None:
            rollout = rollout.model_copy(update={"num_envs_per_worker": spec.num_envs})
        return dataclasses.replace(
            config,
            rollout=rollout,
            env=config.env if spec.env is None else spec.env,
            restart_count=self.restart_counts.get(index, 0),
        )

    def start(self, config: WorkerConfig, index: int) -> RemoteWorker:
        """Starts the actor of the worker with this index; does not wait for it."""
        own = self.config_of(config, index)
        options = actor_options(own.rollout, index)
        if index in self.specs:
            options.update(self.specs[index].options)
        actor = self._ray_class.options(**options).remote(actor_argument(own), index)
        return RemoteWorker(index, actor, reserved=in_reservation(options))

    def kill_failed(self, worker: RemoteWorker) -> None:
        """Kills the process of a failed worker, and counts its restart."""
        worker.close_channel()
        ray.kill(worker.handle, no_restart=True)
        self.restart_counts[worker.index] = self.restart_counts.get(worker.index, 0) + 1

    def stop(self, workers: Sequence[RemoteWorker]) -> None:
        """Stops workers: their environments close within `STOP_TIMEOUT_S`, then their processes
        end."""
        wait_all([worker.actor.stop.remote() for worker in workers], STOP_TIMEOUT_S)
        for worker in workers:
            worker.close_channel()
            ray.kill(worker.handle, no_restart=True)


def same_processes(old: RolloutConfig, new: RolloutConfig) -> bool:
    """Whether processes started with one config can run the other."""
    return all(getattr(old, key) == getattr(new, key) for key in _PROCESS_KEYS)
