"""The driver's handle of a worker, and the start and end of its process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polopt.rollouts.envs.env_sources import EnvSource
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.rpc_client import RpcChannel
from polopt.rollouts.workers.placement import (
    Request,
    actor_argument,
    actor_options,
    cluster_request,
)
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


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A rollout worker in a process of its own, or the local one.

    Attributes:
        index: position in the `WorkerSet`, from 1; a replacement has the same. 0: the local worker.
        actor: handle of the Ray actor, a `RolloutWorker`; None for the local worker.
        started_s: time of its start, of the clock of the `WorkerSet`.
        sent_weights: serial number of the snapshot of weights last sent to it; None: none yet.
        last_answer_s: time of its last answer; None before the first.
        removed: it was removed from the `WorkerSet` or replaced; its pending calls are dropped.
        request: what it requests of the cluster; None: a placement group has reserved it.
        channel: connection for calls over ZeroMQ; None: there were no such calls yet.
        set_up: calls `(function, arguments)` that it runs once it is up, before any work.
    """

    index: int
    actor: Any
    started_s: float = 0.0
    sent_weights: int | None = None
    last_answer_s: float | None = None
    removed: bool = False
    request: Request | None = None
    channel: RpcChannel | None = None
    set_up: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def stop_early(self, call: int, keep_steps: int) -> None:
        """Ends the fragments of a call early; does not wait. The request goes through Ray in a
        concurrency group of its own and reaches the worker while it samples, also within `serve`,
        which continues. Any thread may call this.

        Args:
            call: number of the call.
            keep_steps: least number of steps of each fragment.
        """
        self.actor.stop_early.options(concurrency_group="control").remote(call, keep_steps)

    def close_channel(self) -> None:
        """Closes the connection for calls over ZeroMQ, if there is one."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    @property
    def up(self) -> bool:
        """Whether the worker has answered a call. Only such workers are given work."""
        return self.last_answer_s is not None


@dataclass(frozen=True)
class WorkerSpec:
    """Differences of one worker from the config.

    Attributes:
        env: its environments; None: those of the config.
        num_envs: number of its environments; None: as in the config.
        options: options of its actor, which override those of the config (`num_cpus`, `num_gpus`,
            `memory`, `resources`, `runtime_env` and other arguments of `ActorClass.options`).
    """

    env: EnvSource | None = None
    num_envs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class WorkerProcesses:
    """Starts and ends actors, each made from the config, its own differences from it, and its
    restart count.

    Args:
        ray: the module, or a fake of it.
        actor_class: class of the workers.
        specs: differences of the first workers from the config, in order of index from 1.

    Attributes:
        specs: differences by worker index.
        restart_counts: number of earlier workers by index; 0 where missing.
    """

    def __init__(
        self, ray: Any, actor_class: type[RolloutWorker], specs: Sequence[WorkerSpec]
    ) -> None:
        self._ray = ray
        self._actor_class = actor_class
        self.specs = dict(enumerate(specs, start=1))
        self.restart_counts: dict[int, int] = {}

    @functools.cached_property
    def _ray_class(self) -> Any:
        """Made once: Ray exports each actor class to its control service, and waits for that
        without a limit."""
        # Calls in the group "control" run while a long call runs in the default group.
        return self._ray.remote(concurrency_groups={"control": 1})(self._actor_class)

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

    def start(self, config: WorkerConfig, index: int, now_s: float) -> WorkerHandle:
        """Starts the actor of the worker with this index; does not wait for it."""
        own = self.config_of(config, index)
        options = actor_options(own.rollout, index)
        if index in self.specs:
            options.update(self.specs[index].options)
        actor = self._ray_class.options(**options).remote(actor_argument(own), index)
        return WorkerHandle(index, actor, now_s, request=cluster_request(options))

    def kill_failed(self, worker: WorkerHandle) -> None:
        """Kills the process of a failed worker, and counts its restart."""
        worker.close_channel()
        self._ray.kill(worker.actor, no_restart=True)
        self.restart_counts[worker.index] = self.restart_counts.get(worker.index, 0) + 1

    def stop(self, workers: Sequence[WorkerHandle]) -> None:
        """Stops workers: their environments close within `STOP_TIMEOUT_S`, then their processes
        end. Processes that have not started are killed at once."""
        for worker in workers:
            worker.close_channel()
        stopping = [worker.actor.stop.remote() for worker in workers if worker.up]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        for worker in workers:
            self._ray.kill(worker.actor, no_restart=True)


def specs_of(more: int | Iterable[WorkerSpec]) -> list[WorkerSpec]:
    """One spec for each worker to add, from the argument of `WorkerSet.add_workers`.

    Raises:
        ValueError: `more` is negative.
    """
    if not isinstance(more, int):
        return list(more)
    if more < 0:
        raise ValueError(f"number of workers to add: got {more}. Allowed: 0 or more")
    return [WorkerSpec()] * more


def select(workers: Sequence[WorkerHandle], which: int | Iterable[int]) -> list[WorkerHandle]:
    """The workers that the argument of `WorkerSet.remove_workers` denotes.

    Args:
        workers: in order of index.
        which: number of workers, the latest first; or their indices.

    Raises:
        KeyError: an index does not exist.
        ValueError: there are fewer workers than `which`.
    """
    by_index = {worker.index: worker for worker in workers}
    if not isinstance(which, int):
        return [by_index[index] for index in dict.fromkeys(which)]
    if not 0 <= which <= len(workers):
        raise ValueError(f"number of workers to remove: got {which}. Allowed: 0 to {len(workers)}")
    return list(workers[len(workers) - which :])


def same_processes(old: RolloutConfig, new: RolloutConfig) -> bool:
    """Whether processes started with one config can run the other."""
    return all(getattr(old, key) == getattr(new, key) for key in _PROCESS_KEYS)
