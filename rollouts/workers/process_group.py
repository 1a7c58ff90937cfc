"""`ProcessGroup`: starts, replaces and stops the processes that run calls."""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from polopt.common.progress import PROGRESS
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
from polopt.rollouts.workers.answer import Answer
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.fault_log import FaultLog, WorkerFailure
from polopt.rollouts.workers.start_up import CHECK_INTERVAL_S, StartUp
from polopt.rollouts.workers.worker_handle import WorkerHandle

#: Time that a process gets to close what it has opened. It is killed after that.
STOP_TIMEOUT_S = 1.0


class ProcessGroup(ABC):
    """Processes of one kind. Each process holds an object, and runs calls on it.

    A process is up once it has reported its start and has run its set-up calls. Only processes that
    are up are given work. A process that fails is replaced by another with the same index. A
    subclass says how a process starts:

        class Shards(ProcessGroup):
            def _start_process(self, index):
                channel = self.transport.start(ReplayShard, (self.size,), options, f"shard {index}")
                return WorkerHandle(index, channel, self.clock())

    Args:
        transport: starts processes, and carries their calls. Several groups may share one.
        options: time limits, limits of failures, and resources of one process.
        who: the noun for a process in error messages, such as `worker`.
        meanwhile: see `StartUp`.

    Attributes:
        remote: the processes, in order of index. Indices count from 1. The index of a removed
            process is not used again.
        starting: the processes that are not up, by the ticket of the start or set-up call that each
            of them still has to answer.
        changes: how many times a process came up, was replaced, or was removed.
        started: True once as many processes have been up as the run needs to begin. From then on,
            the run goes on with one process.
        faults: the log of failures, and of faults in the answers of processes.
        restart_counts: how often a process was replaced, by index. A missing index means 0.
    """

    #: Provides the weights that replace `WEIGHTS` in calls to these processes. None: calls to them
    #: cannot use `WEIGHTS`.
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
        # The first number is random, because a gradient worker runs calls of the driver and makes
        # calls of its own, and no two of these calls may have the same number.
        self._call_numbers = itertools.count(1 + secrets.randbits(48))

    def _new_faults(self) -> FaultLog:
        options = self.options
        limits = options.max_consecutive_failures, options.max_consecutive_non_finite
        return FaultLog(*limits, who=self.who, clock=self.clock, event=lambda: self.transport.event)

    @abstractmethod
    def _start_process(self, index: int) -> WorkerHandle:
        """Starts the process with this index. Does not wait for it."""

    @property
    def members(self) -> list[WorkerHandle]:
        """All processes that can be called, in order of index."""
        return self.remote

    def note_answer(self, worker: WorkerHandle, record: Record) -> None:
        """Called with the record of each answer. A subclass keeps the parts that it needs later."""
        return

    def place_of(self, worker: WorkerHandle) -> str:
        """Names a process, for error messages about its calls."""
        return f"{self.who} {worker.index}"

    def describe_hang(self) -> str:
        """Names the time limit, for the message about a hang."""
        return f"worker_timeout_s={self.options.worker_timeout_s:g}"

    def next_call_number(self) -> int:
        """A number that no other call has."""
        return next(self._call_numbers)

    # ---- start ----------------------------------------------------------------------------------

    def _start(self, index: int) -> WorkerHandle:
        worker = self._start_process(index)
        worker.who = self.who
        self.starting[worker.channel.start] = worker
        return worker

    def _add_process(self) -> WorkerHandle:
        self._last_index += 1
        worker = self._start(self._last_index)
        self.remote.append(worker)
        return worker

    @property
    def num_needed(self) -> int:
        """Number of processes that have to be up for the run to begin."""
        return min(self.options.min_workers or len(self.remote), len(self.remote))

    def enough_up(self) -> bool:
        """Whether enough processes are up. To begin, the run needs `num_needed`. To go on, it needs
        one."""
        return sum(w.up for w in self.remote) >= (1 if self.started else self.num_needed)

    def up(self) -> list[WorkerHandle]:
        """The processes that can be given work, in order of index.

        The first call waits until enough processes are up for the run to begin. Later calls wait
        only while all processes are down.

        Raises:
            WorkersFailedError: processes keep failing, or all were removed.
        """
        while True:
            if self.starting:
                self.take_started(0.0)
            if not self.remote:
                raise WorkersFailedError(f"no {self.who}s remain")
            if self.enough_up():
                self.started = True
                return [worker for worker in self.remote if worker.up]
            self.take_started(CHECK_INTERVAL_S)

    def take_started(self, timeout_s: float) -> None:
        """Notes which processes have started, and replaces processes that failed to start. Waits up
        to `timeout_s` seconds for the first of them."""
        while self.starting:
            ended = self.transport.wait(list(self.starting), timeout_s)
            for ticket in ended:
                self.note_started(ticket)
            if not ended:
                break
            timeout_s = 0.0
        self.check_starting()

    def note_started(self, ticket: Ticket) -> None:
        """Takes the answer to the start or set-up call of a process. Sends the next set-up call. If
        none is left, the process is up."""
        worker = self.starting.pop(ticket)
        if worker.removed:
            return
        try:
            answer = ticket.result(self.options.worker_timeout_s)
        except ChannelError as error:
            self.replace(worker, failure_of(worker.index, error))
            return
        except Exception as error:  # `make` of the process can raise anything
            self.replace(worker, WorkerFailure("exception", worker.index, str(error)))
            return
        problem = answer.error if isinstance(answer, Answer) else None
        if problem is not None:
            failure = WorkerFailure("exception", worker.index, problem.message, at_start=True)
            self.replace(worker, failure)
            return
        if ticket is worker.channel.start:
            worker.channel.note_started(answer)
        self._start_up.came_up()
        worker.started_s = self.clock()
        if worker.set_up:
            function, args = worker.set_up.pop(0)
            number, name = self.next_call_number(), getattr(function, "__name__", "set-up")
            call = worker.channel.send(Message(number, name, function, args))
            self.starting[call] = worker
            return
        worker.last_answer_s = self.clock()
        self.changes += 1

    def check_starting(self) -> None:
        """Replaces processes that take too long to start. See `StartUp`."""
        PROGRESS.note()  # this process does not hang while it waits: a start has its own limit
        starting = [worker for worker in self.starting.values() if not worker.removed]
        for worker, why in self._start_up.overdue(starting, self.options, self.enough_up()):
            self.replace(worker, WorkerFailure("hang", worker.index, why))

    # ---- end and replacement --------------------------------------------------------------------

    def _remove(self, worker: WorkerHandle) -> None:
        self._retire(worker)
        self.remote.remove(worker)

    def _retire(self, worker: WorkerHandle) -> None:
        worker.removed = True
        self.changes += 1
        self.starting = {ticket: one for ticket, one in self.starting.items() if one is not worker}

    def replace(self, worker: WorkerHandle, failure: WorkerFailure) -> WorkerHandle | None:
        """Kills a failed process and starts another with the same index. Does not wait for the
        replacement.

        Returns:
            the replacement. None if the process was removed before, or if it is given up because it
            fails again and again while others succeed.

        Raises:
            WorkersFailedError: there were too many consecutive failures. Either all processes fail,
                or one fails that the run needs (`min_workers`).
        """
        if worker.removed:
            return None
        self.faults.failure(failure)
        self.transport.kill(worker.channel)
        self.restart_counts[worker.index] = self.restart_counts.get(worker.index, 0) + 1
        if self.faults.is_unrecoverable(worker.index):
            self._remove(worker)
            self.faults.give_up(failure, len(self.remote), self.options.min_workers)
            return None
        self.faults.num_restarts += 1
        self._retire(worker)
        replacement = self._start(worker.index)
        self.remote[self.remote.index(worker)] = replacement
        return replacement

    def _stop_processes(self, workers: list[WorkerHandle]) -> None:
        """Stops processes. A process that has not started is killed at once."""
        self.transport.stop([worker.channel for worker in workers if worker.up], STOP_TIMEOUT_S)
        for worker in workers:
            if not worker.up:
                self.transport.kill(worker.channel)

    def stats(self) -> dict[str, Any]:
        """The values of the `fault_tolerance/` result keys."""
        up = sum(worker.up for worker in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Stops all processes. The transport stays open."""
        for worker in self.remote:
            self._retire(worker)
        self._stop_processes(self.remote)
        self.remote = []


def failure_of(index: int, error: ChannelError) -> WorkerFailure:
    """The failure of a process, from the error of a call that got no usable answer."""
    if isinstance(error, UndecodableAnswerError):
        return WorkerFailure("exception", index, f"its answer cannot be unpickled: {error}")
    if isinstance(error, AnswerTimeoutError):
        return WorkerFailure("hang", index, str(error))
    if isinstance(error, LostProcessError) and error.at_start:
        return WorkerFailure("exception", index, str(error), at_start=True)
    return WorkerFailure("death", index, str(error))
