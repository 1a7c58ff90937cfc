"""`ProcessGroup`: starts, replaces and stops the processes that run calls."""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from polopt.common.progress import PROGRESS
from polopt.metrics.number import Number
from polopt.metrics.record import Record
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import (
    AnswerTimeoutError,
    ChannelError,
    LostProcessError,
    Message,
    Ticket,
    Transport,
    UndecodableAnswerError,
)
from polopt.rollouts.workers import fault_log
from polopt.rollouts.workers.answer import Answer
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.fault_log import FaultLog, WorkerFailure
from polopt.rollouts.workers.start_up import CHECK_INTERVAL_S, StartUp
from polopt.rollouts.workers.worker_handle import WorkerHandle

#: The time in which a process can close its resources after a request to stop. After this time, the
#: driver kills the process.
STOP_TIMEOUT_S = 1.0
#: The numbers of `ProcessGroup.stats`.
NUMBERS = (
    Number("num_healthy_workers", "workers", "workers that are up"),
    *fault_log.NUMBERS,
)


class ProcessGroup(ABC):
    """A group of processes of one kind. Each process holds an object, and runs calls on it.

    A process is up once it has reported its start and has run its set-up calls, which are the calls
    in `WorkerHandle.set_up`. Only processes that are up get work. If a process fails, the group
    replaces it by a new process with the same index, unless it failed too often (see `replace`). A
    subclass defines how a process starts:

        class Shards(ProcessGroup):
            def _start_process(self, index):
                channel = self.transport.start(ReplayShard, (self.size,), options, f"shard {index}")
                return WorkerHandle(index, channel, self.clock())

    Args:
        transport: starts processes, and carries their calls. Several groups may share a transport.
        options: the options with time limits, limits on failures, and the resources of one process.
        who: the noun for a process in error messages, such as `worker`.
        meanwhile: see `StartUp`.

    Attributes:
        remote: the processes, in order of index. Indices count from 1. The group never reuses the
            index of a removed process.
        starting: the processes that are not up. The key is the ticket of the start or set-up call
            that the process has not answered yet.
        changes: a count of the times that a process came up, was replaced, or was removed.
        started: True once `up` has found that `num_needed` processes are up. From then on, `up`
            waits only while no process is up.
        faults: the log of failures of processes, and of faults in the data of their answers.
        restart_counts: the number of failures of each process and its replacements, by index. A
            missing index means 0.
    """

    #: Provides the weights that replace `WEIGHTS` in calls to these processes. None means that
    #: calls to these processes cannot use `WEIGHTS`.
    weights: Any = None

    def __init__(
        self, transport: Transport, options: RolloutConfig, who: str, meanwhile: str = ""
    ) -> None:
        self.transport = transport
        self.clock: Callable[[], float] = transport.clock
        self.options = options
        self.who = who
        self.remote: list[WorkerHandle] = []
        self.starting: dict[Ticket, WorkerHandle] = {}
        self.changes = 0
        self.started = False
        self.restart_counts: dict[int, int] = {}
        self.faults = self._new_faults()
        self._start_up = StartUp(who, meanwhile, transport)
        self._last_index = 0
        # A gradient worker runs calls from the driver, and also numbers its own calls. The first
        # number is random, so that these calls have different numbers.
        self._call_numbers = itertools.count(1 + secrets.randbits(48))

    def _new_faults(self) -> FaultLog:
        options = self.options
        limits = options.max_consecutive_failures, options.max_consecutive_non_finite
        return FaultLog(*limits, who=self.who, clock=self.clock, event=lambda: self.transport.event)

    @abstractmethod
    def _start_process(self, index: int) -> WorkerHandle:
        """Starts the process with this index. Does not wait until the process is up."""

    @property
    def members(self) -> list[WorkerHandle]:
        """All processes that can get work, now or once they are up, in order of index."""
        return self.remote

    def note_answer(self, worker: WorkerHandle, record: Record) -> None:
        """Called with the record of each successful call. A subclass can keep parts of it here."""
        return

    def place_of(self, worker: WorkerHandle) -> str:
        """Returns the name of a process for error messages about its calls."""
        return f"{self.who} {worker.index}"

    def describe_hang(self, worker: WorkerHandle) -> str:
        """Returns the time limit of a process as text, for messages about hangs."""
        return f"worker_timeout_s={self.options.worker_timeout_s:g}"

    def next_call_number(self) -> int:
        """Returns a number that no other call has."""
        return next(self._call_numbers)

    # ---- start ----------------------------------------------------------------------------------

    def _start(self, index: int) -> WorkerHandle:
        worker = self._start_process(index)
        worker.who, worker.began_s = self.who, worker.started_s
        self.starting[worker.channel.start] = worker
        return worker

    def _add_process(self) -> WorkerHandle:
        self._last_index += 1
        worker = self._start(self._last_index)
        self.remote.append(worker)
        return worker

    @property
    def num_needed(self) -> int:
        """The number of processes that must be up before the run can begin."""
        return min(self.options.min_workers or len(self.remote), len(self.remote))

    def enough_up(self) -> bool:
        """Returns True if enough processes are up. The run needs `num_needed` processes to begin,
        and one process to continue."""
        return sum(w.up for w in self.remote) >= (1 if self.started else self.num_needed)

    def up(self) -> list[WorkerHandle]:
        """Returns the processes that are up, in order of index.

        Waits until `num_needed` processes are up. Once this has happened, later calls wait only
        while no process is up.

        Raises:
            WorkersFailedError: see `replace`. Also raised if all processes were removed.
            TransportError: see `Channel.send`.
        """
        while True:
            if self.starting:
                self.take_started(0.0)
            if not self.remote:
                raise WorkersFailedError(f"no {self.who}s remain")
            if self.enough_up():
                self.started = True
                return [worker for worker in self.remote if worker.up]
            if not self.starting:  # after an earlier WorkersFailedError
                why = "" if self.faults.last is None else f":\n{self.faults.last.message}"
                raise WorkersFailedError(f"too few {self.who}s are up, and none is starting{why}")
            self.take_started(CHECK_INTERVAL_S)

    def take_started(self, timeout_s: float) -> None:
        """Handles the answers of starting processes, and replaces processes that failed to start.
        Waits up to `timeout_s` seconds for the first answer. Raises the errors of `replace`."""
        while self.starting:
            ended = self.transport.wait(list(self.starting), timeout_s)
            for ticket in ended:
                self.note_started(ticket)
            if not ended:
                break
            timeout_s = 0.0
        self.check_starting()

    def note_started(self, ticket: Ticket) -> None:
        """Handles the answer to the start or set-up call of a process. Then sends the next set-up
        call. If no set-up call is left, the process is up."""
        worker = self.starting.pop(ticket)
        if worker.removed:
            return
        try:
            answer = ticket.result(self.options.worker_timeout_s)
        except ChannelError as error:
            self.replace(worker, failure_of(worker.index, error))
            return
        except Exception as error:  # the constructor in the process can raise anything
            self.replace(worker, WorkerFailure("exception", worker.index, str(error)))
            return
        problem = answer.error if isinstance(answer, Answer) else None
        if problem is not None:
            failure = WorkerFailure("exception", worker.index, problem.message, at_start=True)
            self.replace(worker, failure)
            return
        if ticket is worker.channel.start:
            worker.channel.note_started(answer)
        self._start_up.came_up(worker, self.starting.values())
        worker.started_s = self.clock()
        if worker.set_up:
            function, args = worker.set_up.pop(0)
            number, name = self.next_call_number(), getattr(function, "__name__", "set-up")
            call = worker.channel.send(Message(number, name, function, args))
            self.starting[call] = worker
            return
        worker.came_up(self.clock())
        self.changes += 1

    def check_starting(self) -> None:
        """Replaces processes that take too long to start. See `StartUp`."""
        # While a gradient worker waits here for a start, it counts as making progress, because
        # starts have a time limit of their own.
        PROGRESS.note()
        tickets = {worker: t for t, worker in self.starting.items() if not worker.removed}
        for worker, why in self._start_up.overdue([*tickets], self.options, self.enough_up()):
            # The driver may have been busy since the process answered.
            if not tickets[worker].ended() and not self.transport.wait([tickets[worker]], 0.0):
                self.replace(worker, WorkerFailure("hang", worker.index, why))

    # ---- end and replacement --------------------------------------------------------------------

    def _leave(self, worker: WorkerHandle) -> None:
        """Takes a removed process off the list."""
        self.remote.remove(worker)

    def _retire(self, worker: WorkerHandle, state: Literal["replaced", "removed"]) -> None:
        worker.state = state
        self.changes += 1
        self.starting = {ticket: one for ticket, one in self.starting.items() if one is not worker}

    def replace(self, worker: WorkerHandle, failure: WorkerFailure) -> WorkerHandle | None:
        """Kills a failed process and starts a new process with the same index. Does not wait until
        the replacement is up.

        Returns:
            the replacement. None if the process was removed before, or if the process and its
            replacements failed too often while other processes succeeded. In the second case, the
            run continues without the process.

        Raises:
            WorkersFailedError: there were too many consecutive failures. Either all processes fail,
                or a process fails that the run needs (`min_workers`). Also raised if no call has
                succeeded yet and a process or an environment cannot be made (`FaultLog.failure`).
        """
        if worker.removed:
            return None
        self.faults.failure(failure)
        self.transport.kill(worker.channel)
        self.restart_counts[worker.index] = self.restart_counts.get(worker.index, 0) + 1
        if self.faults.is_unrecoverable(worker.index):
            self._retire(worker, "removed")
            self._leave(worker)
            self.faults.give_up(failure, len(self.remote), self.options.min_workers)
            return None
        self.faults.num_restarts += 1
        self._retire(worker, "replaced")
        replacement = self._start(worker.index)
        self.remote[self.remote.index(worker)] = replacement
        return replacement

    def _stop_processes(
        self, workers: list[WorkerHandle], state: Literal["replaced", "removed"]
    ) -> None:
        """Stops processes. A process that is not up is killed without a request to stop."""
        starting = [worker for worker in workers if not worker.up]
        running = [worker.channel for worker in workers if worker.up]
        for worker in workers:
            self._retire(worker, state)
        self.transport.stop(running, STOP_TIMEOUT_S)
        for worker in starting:
            self.transport.kill(worker.channel)

    def stats(self) -> dict[str, Any]:
        """Returns the values of the `fault_tolerance/` result keys. See `NUMBERS`."""
        up = sum(worker.up for worker in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Stops all processes. The transport stays open."""
        self._stop_processes(self.remote, "removed")
        self.remote = []


def failure_of(index: int, error: ChannelError) -> WorkerFailure:
    """Returns the failure of a process for an error of a call that got no usable answer."""
    if isinstance(error, UndecodableAnswerError):
        return WorkerFailure("exception", index, f"its answer cannot be unpickled: {error}")
    if isinstance(error, AnswerTimeoutError):
        return WorkerFailure("hang", index, str(error))
    if isinstance(error, LostProcessError) and error.at_start:
        return WorkerFailure("exception", index, str(error), at_start=True)
    return WorkerFailure("death", index, str(error))
