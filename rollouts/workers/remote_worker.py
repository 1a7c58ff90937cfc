"""`RemoteWorker`: the driver's record of a worker in another process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polopt.rollouts.envs.resolving import EnvSource
from polopt.rollouts.transport.rpc_channel import RpcChannel


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """A rollout worker in a process of its own.

    Attributes:
        index: position in the `WorkerSet`, from 1; a replacement has the same.
        handle: handle of the Ray actor, a `RolloutWorker`.
        known_version: version of the weights last sent to it; None: none yet.
        last_answer_s: monotonic time of its last answer; None before the first.
        removed: it was removed from the `WorkerSet`; results of its pending calls are dropped.
        checked_s: monotonic time of the last check of its placement while it had not answered; at
            first of its start.
        reserved: a placement group has reserved its resources.
        channel: connection for calls over ZeroMQ; None: there were no such calls yet.
    """

    index: int
    handle: Any
    known_version: int | None = None
    last_answer_s: float | None = None
    removed: bool = False
    checked_s: float = field(default_factory=time.monotonic)
    reserved: bool = False
    channel: RpcChannel | None = None

    @property
    def actor(self) -> Any:
        """The handle, to call methods through Ray. The worker answers these calls once `serve` has
        returned, so this property ends `serve`, after the calls made over ZeroMQ so far."""
        if self.channel is not None:
            self.channel.pause()
        return self.handle

    def stop_early(self, number: int, keep_steps: int) -> None:
        """Ends a fragment early; does not wait. The call goes through Ray in a concurrency group of
        its own and reaches the worker while it samples, also within `serve`, which continues. Any
        thread may call this.

        Args:
            number: of the request.
            keep_steps: least number of steps of the fragment.
        """
        call = self.handle.stop_early.options(concurrency_group="control")
        call.remote(number, keep_steps)

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


def select(workers: Sequence[RemoteWorker], which: int | Iterable[int]) -> list[RemoteWorker]:
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
