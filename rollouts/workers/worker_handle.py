"""`WorkerHandle`: the driver's handle of one process of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polopt.rollouts.envs.env_sources import EnvSource
from polopt.rollouts.transport.channel import Channel

#: The place of a process among all that an owner calls: `WorkerHandle.who` and its index. Its
#: replacement has the same.
Seat = tuple[str, int]


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """A process that runs calls, as its group knows it.

    Attributes:
        index: position in the group, from 1. A replacement has the same. 0: the object in the
            driver's own process.
        channel: sends it calls.
        started_s: time of its start, of the group's clock.
        sent_snapshot: serial number of the snapshot of weights last sent to it. None: none yet.
        shares_weights: its policy is the one whose weights are sent, so it needs none.
        last_answer_s: time of its last answer. None before the first.
        removed: it was removed from the group or replaced. Its pending calls are dropped.
        set_up: calls `(function, arguments)` that it runs once it has started, before any work.
        who: what it is called in messages, which its group sets.
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
        """Its group and index."""
        return self.who, self.index

    @property
    def up(self) -> bool:
        """Whether the process has started and was set up. Only such processes are given work."""
        return self.last_answer_s is not None


@dataclass(frozen=True)
class WorkerSpec:
    """Differences of one worker from the config.

    Attributes:
        env: its environments. None: the environments of the config.
        num_envs: number of its environments. None: as in the config.
        options: options of its actor, which override the config's (`num_cpus`, `num_gpus`,
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


def select(workers: Sequence[WorkerHandle], which: int | Iterable[int]) -> list[WorkerHandle]:
    """The workers that the argument of `WorkerSet.remove_workers` denotes.

    Args:
        workers: in order of index.
        which: number of workers, the latest first. Or their indices.

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
