"""`WorkerHandle`: the driver's handle of one process of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polopt.rollouts.envs.env_sources import EnvSource
from polopt.rollouts.transport.channel import Channel

#: The place of a process among all processes of an owner: `WorkerHandle.who` and the index. A
#: replacement has the same seat as the process before it.
Seat = tuple[str, int]


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """The driver's data about one process that runs calls.

    Attributes:
        index: position in the group, from 1. A replacement has the same index. 0 is the object in
            the driver's own process.
        channel: sends calls to the process.
        started_s: time at which the process was started, on the group's clock.
        sent_snapshot: serial number of the last snapshot of weights that was sent to the process.
            None: no weights were sent yet.
        shares_weights: True if the process has the very policy whose weights are sent. It then
            needs no weights.
        last_answer_s: time of the last answer. None before the first answer.
        removed: True once the process was removed from the group or replaced. Its pending calls are
            dropped.
        set_up: calls `(function, arguments)` that the process runs after its start, before any
            work.
        who: the noun for the process in error messages. The group sets it.
    """

    index: int
    channel: Channel
    started_s: float = 0.0
    sent_snapshot: int | None = None
    shares_weights: bool = False
    last_answer_s: float | None = None
    removed: bool = False
    set_up: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    who: str = "worker"

    @property
    def seat(self) -> Seat:
        """The `who` of the group, and the index."""
        return self.who, self.index

    @property
    def up(self) -> bool:
        """Whether the process has started and was set up. Only such processes are given work."""
        return self.last_answer_s is not None


@dataclass(frozen=True)
class WorkerSpec:
    """How one worker differs from the config.

        workers.add_workers([WorkerSpec(num_envs=8), WorkerSpec(options={"num_cpus": 2})])

    Attributes:
        env: the environments of the worker. None: the environments of the config.
        num_envs: number of environments of the worker. None: the number in the config.
        options: options of the worker's actor. They override the options of the config (`num_cpus`,
            `num_gpus`, `memory`, `resources`, `runtime_env` and other arguments of
            `ActorClass.options`).
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


def select(workers: Sequence[WorkerHandle], which: int | Iterable[int]) -> list[WorkerHandle]:
    """Selects workers by the argument of `WorkerSet.remove_workers`.

    Args:
        workers: the workers, in order of index.
        which: the number of workers, of which the latest are selected. Or their indices.

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
