"""`WorkerHandle`: the driver's side of one process of a group, and the state of this process.

    start --> starting --has run its set-up calls--> up --announces its end--> leaving
                 |                                    |                           |
                 +-------------- fails ---------------+---> down --new process--> replaced
                 |                                    |       |
                 +------ stopped, or given up --------+-------+-----------------> removed

    up, down --makes its object again, from a new config--> starting
    leaving --stopped--> removed

- `starting`: the process makes its object, or runs set-up calls. Its work waits in the driver.
- `up`: the process gets work.
- `leaving`: the node of the process, or the process itself, has announced its end. The process gets
  no new calls, and runs the calls that it has. A new process with the same index has already been
  started. Once the work has come back, the process is stopped and counts as replaced.
- `down`: the process has failed, and gets no work. If the failure ends the run, the process stays
  down until the group stops, or until a new config makes its object again.
- `replaced`: a new process with the same index has its place.
- `removed`: the process has left the group, and nothing has its place.

The driver is the process that sends the calls. A gradient worker is the driver of its own rollout
workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from polopt.rollouts.transport.channel import Channel

#: Identifies a process among the groups that one `Calls` object calls: `WorkerHandle.who`, and the
#: index. A replacement has the same seat as the process that it replaces.
Seat = tuple[str, int]


class ProcessState(Enum):
    """The state of a process, see the diagram above."""

    STARTING = "starting"
    UP = "up"
    LEAVING = "leaving"
    DOWN = "down"
    REPLACED = "replaced"
    REMOVED = "removed"


_STARTING, _UP, _LEAVING, _DOWN, _REPLACED, _REMOVED = ProcessState
#: The states that may follow each state.
_NEXT = {
    _STARTING: (_UP, _DOWN, _REMOVED),
    _UP: (_STARTING, _LEAVING, _DOWN, _REMOVED),
    _LEAVING: (_REPLACED, _REMOVED),
    _DOWN: (_STARTING, _REPLACED, _REMOVED),
    _REPLACED: (),
    _REMOVED: (),
}


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """The driver's data about one process that runs calls. The object in the process is the worker.

    Attributes:
        index: index in the group. Processes count from 1, and a replacement has the same index as
            the process that it replaces. 0 is the object in the driver's own process.
        channel: sends calls to the process.
        state: the state of the process. Only `to` changes it.
        started_s: time at which the process was started, or last answered its start or a set-up
            call, on the group's clock.
        sent_snapshot: serial number of the last snapshot of weights that the driver sent to the
            process. None means that the next call with the argument `WEIGHTS` has to carry weights.
        shares_weights: True if the process uses the driver's own policy object. Calls to this
            process then carry no weights.
        last_answer_s: time of the last answer, or time at which the process came up.
        unanswered: number of calls that any `Calls` has sent to the process, and that have no
            answer yet.
        set_up: calls `(function, arguments)` that the process still has to run before any work.
        who: the noun for the process in error messages. The group sets this attribute.
        began_s: time at which the process was started. The group sets this attribute.
    """

    index: int
    channel: Channel
    started_s: float = 0.0
    sent_snapshot: int | None = None
    shares_weights: bool = False
    last_answer_s: float = 0.0
    unanswered: int = 0
    set_up: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    who: str = "worker"
    state: ProcessState = ProcessState.STARTING
    began_s: float = 0.0

    @property
    def seat(self) -> Seat:
        """`who` and `index`, which identify the process and its replacements."""
        return self.who, self.index

    @property
    def up(self) -> bool:
        """True once the process has started and has run its set-up calls. The driver sends work
        only to processes that are up."""
        return self.state is _UP

    @property
    def removed(self) -> bool:
        """True once the process was replaced, or has left the group. `Calls` then no longer waits
        for answers of this process."""
        return self.state is _REPLACED or self.state is _REMOVED

    def to(self, state: ProcessState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: this state cannot follow the current state. For example, a process that
                was removed cannot come up again.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"{self.who} {self.index} is {self.state.value}, and cannot be {state.value}"
            )
        self.state = state
