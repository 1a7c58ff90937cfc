"""`ProcessGroup`: starts, replaces and stops the processes that run calls."""

from __future__ import annotations

import bisect
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polopt.common.faults import Fault
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
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.fault_log import FaultLog
from polopt.rollouts.workers.worker_handle import ProcessState, WorkerHandle

#: The time in which a process can close its resources after a request to stop. After this time, the
#: driver kills the process.
STOP_TIMEOUT_S = 1.0
#: The numbers of `ProcessGroup.stats`.
NUMBERS = (
    Number("num_healthy_workers", "workers", "workers that are up"),
    *fault_log.NUMBERS,
)
#: The least time between two checks of starting processes, unless the time limit of a start is
#: shorter. Also the first interval between warnings, which doubles with each warning, up to
#: `MAX_CHECK_INTERVAL_S`.
CHECK_INTERVAL_S = 5.0
MAX_CHECK_INTERVAL_S = 60.0

logger = logging.getLogger("polopt")


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
        starting: the processes that are starting. The key is the ticket of the start or set-up call
            that the process has not answered yet.
        leaving: the processes that have announced their end, and whose work has not come back yet.
            Their replacements are in `remote`.
        changes: a count of the changes of the states of processes.
        started: True once `up` has found that `num_needed` processes are up. From then on, `up`
            waits only while no process is up.
        faults: the log of failures of processes, and of faults in the data of their answers.
        restart_counts: the number of failures and preemptions of each process and its replacements,
            by index. A missing index means 0.
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
        self.leaving: list[WorkerHandle] = []
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

    def note_answer(self, handle: WorkerHandle, record: Record) -> None:
        """Called with the record of each successful call. A subclass can keep parts of it here."""
        return

    def place_of(self, handle: WorkerHandle) -> str:
        """Returns the name of a process for error messages about its calls."""
        return f"{self.who} {handle.index}"

    def describe_hang(self, handle: WorkerHandle) -> str:
        """Returns the time limit of a process as text, for messages about hangs."""
        return f"worker_timeout_s={self.options.worker_timeout_s:g}"

    def next_call_number(self) -> int:
        """Returns a number that no other call has."""
        return next(self._call_numbers)

    # ---- start ----------------------------------------------------------------------------------

    def _start(self, index: int) -> WorkerHandle:
        handle = self._start_process(index)
        handle.who, handle.began_s = self.who, handle.started_s
        self.starting[handle.channel.start] = handle
        return handle

    def _add_process(self) -> WorkerHandle:
        self._last_index += 1
        handle = self._start(self._last_index)
        self.remote.append(handle)
        return handle

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
        self.take_leaving()
        while True:
            if self.starting:
                self.take_started(0.0)
            if not self.remote:
                raise WorkersFailedError(f"no {self.who}s remain")
            if self.enough_up():
                self.started = True
                return [handle for handle in self.remote if handle.up]
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
        handle = self.starting.pop(ticket)
        try:
            answer = ticket.result(self.options.worker_timeout_s)
        except ChannelError as error:
            self.replace(handle, failure_of(error))
            return
        except Exception as error:  # the constructor in the process can raise anything
            self.replace(handle, Fault("exception", str(error)))
            return
        problem = answer.error if isinstance(answer, Answer) else None
        if problem is not None:
            failure = Fault("exception", problem.message, at_start=True)
            self.replace(handle, failure)
            return
        if ticket is handle.channel.start:
            handle.channel.note_started(answer)
        self._start_up.came_up(handle)
        handle.started_s = self.clock()
        if handle.set_up:
            function, args = handle.set_up.pop(0)
            number, name = self.next_call_number(), getattr(function, "__name__", "set-up")
            call = handle.channel.send(Message(number, name, function, args))
            self.starting[call] = handle
            return
        handle.last_answer_s = self.clock()
        self._to(handle, ProcessState.UP)

    def check_starting(self) -> None:
        """Replaces processes that take too long to start. See `StartUp`."""
        # While a gradient worker waits here for a start, it counts as making progress, because
        # starts have a time limit of their own.
        PROGRESS.note()
        tickets = {handle: ticket for ticket, handle in self.starting.items()}
        for handle, why in self._start_up.overdue([*tickets], self.options, self.enough_up()):
            # The driver may have been busy since the process answered.
            if not tickets[handle].ended() and not self.transport.wait([tickets[handle]], 0.0):
                self.replace(handle, Fault("hang", why))

    # ---- end and replacement --------------------------------------------------------------------

    def take_leaving(self) -> None:
        """Makes the processes leave whose nodes have announced their end. See `leave`."""
        up = (handle.channel for handle in self.remote if handle.up)
        channels = self.transport.leaving(up)
        if channels:
            for handle in [one for one in self.remote if one.channel in channels]:
                node = handle.channel.started.node
                self.leave(handle, f"Ray drains its node {node}")

    def leave(self, handle: WorkerHandle, why: str) -> None:
        """Starts a new process in the place of a process that has announced its end. The old
        process gets no new calls, and stays until its work has come back (`let_go`). This is no
        failure. Does nothing if the process is not up.

        Args:
            handle: the process.
            why: who announced the end, for the log and the results.
        """
        if not handle.up:
            return
        self._to(handle, ProcessState.LEAVING)
        self.leaving.append(handle)
        self.faults.failure(handle.index, Fault("preemption", why))
        self._start_again(handle)

    def let_go(self, handle: WorkerHandle, kill: bool = False) -> None:
        """Stops a process that leaves.

        Args:
            handle: the process.
            kill: if True, kills the process, because it has failed.
        """
        self.leaving.remove(handle)
        self._to(handle, ProcessState.REPLACED)
        if kill:
            self.transport.kill(handle.channel)
        else:
            self.transport.stop([handle.channel], STOP_TIMEOUT_S)

    def _leave(self, handle: WorkerHandle) -> None:
        """Takes a removed process off the list."""
        self.remote.remove(handle)

    def _to(self, handle: WorkerHandle, state: ProcessState) -> None:
        """Changes the state of a process. All changes are made here."""
        if handle.state is ProcessState.STARTING and state is not ProcessState.UP:
            kept = {ticket: one for ticket, one in self.starting.items() if one is not handle}
            self.starting = kept
        handle.to(state)
        self.changes += 1

    def replace(self, handle: WorkerHandle, failure: Fault) -> WorkerHandle | None:
        """Kills a failed process and starts a new process with the same index. Does not wait until
        the replacement is up. If the process was leaving, its replacement was started before, and
        its end is no failure.

        Returns:
            the replacement. None if the process was down, replaced or removed before, or if the
            process and its replacements failed too often while other processes succeeded. In the
            second case, the run continues without the process.

        Raises:
            WorkersFailedError: there were too many consecutive failures. Either all processes fail,
                or a process fails that the run needs (`min_workers`). Also raised if no call has
                succeeded yet and a process or an environment cannot be made (`FaultLog.failure`).
        """
        if handle.state is ProcessState.LEAVING:
            self.let_go(handle, kill=True)
            return next((one for one in self.remote if one.index == handle.index), None)
        if not (handle.up or handle.state is ProcessState.STARTING):
            return None
        self._to(handle, ProcessState.DOWN)
        self.faults.failure(handle.index, failure)
        self.transport.kill(handle.channel)
        if self.faults.is_unrecoverable(handle.index):
            self._to(handle, ProcessState.REMOVED)
            self._leave(handle)
            self.faults.give_up(handle.index, failure, len(self.remote), self.options.min_workers)
            return None
        self._to(handle, ProcessState.REPLACED)
        return self._start_again(handle)

    def _start_again(self, handle: WorkerHandle) -> WorkerHandle:
        """Starts and counts a new process in the place of a process that has failed or leaves."""
        self.faults.num_restarts += 1
        self.restart_counts[handle.index] = self.restart_counts.get(handle.index, 0) + 1
        return self._start_in_place_of(handle)

    def _start_in_place_of(self, handle: WorkerHandle) -> WorkerHandle:
        replacement = self._start(handle.index)
        self.remote[self.remote.index(handle)] = replacement
        return replacement

    def _stop_processes(self, handles: list[WorkerHandle]) -> None:
        """Stops processes, which are then removed. A process that is starting is killed without a
        request to stop."""
        starting = [one.channel for one in handles if one.state is ProcessState.STARTING]
        running = [one.channel for one in handles if one.state is not ProcessState.STARTING]
        for handle in handles:
            self._to(handle, ProcessState.REMOVED)
        self.transport.stop(running, STOP_TIMEOUT_S)
        for channel in starting:
            self.transport.kill(channel)

    def stats(self) -> dict[str, Any]:
        """Returns the values of the `fault_tolerance/` result keys. See `NUMBERS`."""
        up = sum(handle.up for handle in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Stops all processes. The transport stays open."""
        self._stop_processes([*self.remote, *self.leaving])
        self.remote, self.leaving = [], []


def failure_of(error: ChannelError) -> Fault:
    """Returns the failure of a process for an error of a call that got no usable answer."""
    if isinstance(error, UndecodableAnswerError):
        return Fault("exception", f"its answer cannot be unpickled: {error}")
    if isinstance(error, AnswerTimeoutError):
        return Fault("hang", str(error))
    if isinstance(error, LostProcessError) and error.preempted:
        return Fault("preemption", str(error))
    if isinstance(error, LostProcessError) and error.at_start:
        return Fault("exception", str(error), at_start=True)
    return Fault("death", str(error))


# ---- processes that start -----------------------------------------------------------------------


class StartUp:
    """Watches processes that are starting.

    The time limit of a process begins when the process is started. The limit begins again each time
    that this process, or a process that was started before it or at most `CHECK_INTERVAL_S` after
    it, answers its start or a set-up call (`WorkerHandle.set_up`), because processes that start at
    the same time slow each other down. Later starts do not extend the limit. Otherwise a process
    that hangs would never be found while others keep restarting. If Ray has no resources for
    a process yet, the limit applies only if the run cannot continue without this process.
    Otherwise, the limit begins when Ray has placed the process.

    Args:
        who: the noun for a process in messages.
        meanwhile: a sentence for the log that says how the run continues while no process is up.
            Empty if the run waits for processes.
        transport: provides the clock, and knows which processes wait for resources.
    """

    def __init__(self, who: str, meanwhile: str, transport: Transport) -> None:
        self._who = who
        self._meanwhile = meanwhile
        self._transport = transport
        self._clock = clock = transport.clock
        self._checked_s = self._warned_s = clock()
        self._interval_s = CHECK_INTERVAL_S
        # By index of a process: the last time at which it waited for resources.
        self._waited_s: dict[int, float] = {}
        # When the processes that answered were started, and when they answered. An answer that a
        # later answer of a process started earlier makes useless is left out, so both increase.
        self._begins_s: list[float] = []
        self._answers_s: list[float] = []

    def came_up(self, answered: WorkerHandle) -> None:
        """Restarts the time limit of the processes that have started together with a process, after
        this process has answered its start or a set-up call."""
        while self._begins_s and self._begins_s[-1] >= answered.began_s:
            self._begins_s.pop()
            self._answers_s.pop()
        self._begins_s.append(answered.began_s)
        self._answers_s.append(self._clock())

    def _since_s(self, handle: WorkerHandle) -> float:
        """Returns the time at which the limit of a process last began again."""
        place = bisect.bisect_right(self._begins_s, handle.began_s + CHECK_INTERVAL_S)
        answer_s = self._answers_s[place - 1] if place else 0.0
        return max(handle.started_s, self._waited_s.get(handle.index, 0.0), answer_s)

    def overdue(
        self, starting: Sequence[WorkerHandle], options: RolloutConfig, enough_up: bool
    ) -> list[tuple[WorkerHandle, str]]:
        """Returns the processes that have taken too long to start, each with the reason. Also warns
        about processes that wait for resources. Checks at most once in five seconds, or at most
        once per time limit if this limit is shorter. Returns an empty list between checks.

        Args:
            starting: the processes that are not up yet.
            options: the options with `worker_startup_timeout_s` and the resources of one process.
            enough_up: True if the run can continue without these processes.
        """
        now_s, limit_s = self._clock(), options.worker_startup_timeout_s
        if now_s - self._checked_s < min(CHECK_INTERVAL_S, limit_s):
            return []
        self._checked_s = now_s
        waiting, number = self._transport.waiting([handle.channel for handle in starting])
        late: list[int] = []
        found = []
        for handle in starting:
            waits = handle.channel in waiting
            if waits and now_s - handle.started_s >= CHECK_INTERVAL_S:
                late.append(handle.index)
            if waits and (enough_up or self._meanwhile):
                self._waited_s[handle.index] = now_s
            if now_s - self._since_s(handle) >= limit_s:
                why = "the start or a set-up call has not ended"
                if waits:
                    why = f"Ray did not place the process: {self._describe(options)}"
                found.append((handle, f"no answer for {now_s - handle.started_s:.1f} s: {why}"))
        self._warn(late, number, options, enough_up)
        return found

    def _describe(self, options: RolloutConfig) -> str:
        return describe_resources(options, *self._transport.resources())

    def _warn(self, late: list[int], number: int, options: RolloutConfig, enough_up: bool) -> None:
        now_s = self._clock()
        if not late:
            self._interval_s = CHECK_INTERVAL_S
        elif now_s >= self._warned_s + self._interval_s:
            self._warned_s = now_s
            self._interval_s = min(2.0 * self._interval_s, MAX_CHECK_INTERVAL_S)
            goes_on = "The run continues without them." if enough_up else "The run waits for them."
            logger.warning(
                "Ray has no resources yet for %s%s%s %s: %s. %s",
                f"{number} of " if number < len(late) else "",
                self._who,
                "s" * (len(late) > 1),
                ", ".join(map(str, late)),
                self._describe(options),
                self._meanwhile or goes_on,
            )


def describe_resources(
    rollout: RolloutConfig, total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Returns a text with the resources that one worker needs, and with the total and the free
    amount of each of these resources in the cluster.

    Args:
        rollout: options of the worker.
        total: the total amount of each resource in the cluster, by Ray's name of the resource.
        free: the free amount of each resource in the cluster, by Ray's name of the resource.
    """
    needed = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": float(rollout.memory_per_worker),
        **rollout.custom_resources_per_worker,
    }
    needed = {name: amount for name, amount in needed.items() if amount} or {"CPU": 0.0}
    parts = (
        f"{name} {amount:g} (the cluster has {total.get(name, 0.0):g}, "
        f"of which {free.get(name, 0.0):g} are free)"
        for name, amount in needed.items()
    )
    return "each needs " + ", ".join(parts)
