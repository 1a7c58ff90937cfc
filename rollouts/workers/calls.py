"""`Calls`: sends the calls of a strategy to processes, and keeps replies until they are taken.

A strategy is the optimizer of a run (`PolicyOptimizer`). Its `step` runs in the driver."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from polopt.common.tracer import TRACER
from polopt.metrics.record import Record
from polopt.metrics.timers import LoadMeter
from polopt.rollouts.transport.channel import Function, Message, TransportError
from polopt.rollouts.workers.answer import Answer
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.fault_log import WorkerFailure
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.supervisor import Pending, Supervisor, Work
from polopt.rollouts.workers.worker_handle import Seat, WorkerHandle

#: The rule for the pending work of a worker that fails. `send again`: the replacement of the worker
#: gets the work once the replacement is up. If no replacement is started, because the worker failed
#: too often, the work is lost. `reassign`: the work goes to workers that are up. `drop`: the work
#: is lost.
AfterFailure = Literal["send again", "reassign", "drop"]

#: While workers are starting, one wait of the transport lasts at most this number of seconds. Then
#: `Calls` checks for workers that take too long to start.
START_CHECK_S = 1.0
_INTERRUPTED = "the wait for workers was interrupted"


class _Weights:
    """The type of `WEIGHTS`."""

    def __repr__(self) -> str:
        return "WEIGHTS"


#: A placeholder for the policy's weights among the arguments of a call. When `Calls` sends a call,
#: `Calls` replaces the placeholder by the weights for this worker, or by None if the worker keeps
#: its weights.
WEIGHTS: Any = _Weights()


class CallsLostError(RuntimeError):
    """Calls have failed and are not sent again, and no call is pending any more. To continue, call
    `ProcessGroup.up`, which waits for replacements of the processes, and send new work."""


class CallsInterrupted(RuntimeError):
    """Raised in the thread that waits for calls, because `Calls.interrupt` was called."""


class Reply(NamedTuple):
    """The reply to one call. It holds the value, or the failure of the call.

    Attributes:
        worker: the worker that was called. After a failure of kind `reference`, the worker
            continues. After any other failure, its process is killed, and a replacement starts
            unless the worker failed too often.
        value: return value of the function, or a reference to that value. None after a failure.
        tag: the tag given to `send`.
        counts: the steps, episodes, times and faults that the worker counted during the call. Empty
            if no answer arrived.
        order: see `Work`.
        failure: the reason why the call failed. None after success.
    """

    worker: WorkerHandle
    value: Any
    tag: Any
    counts: Record
    order: tuple[int, int]
    failure: WorkerFailure | None = None


class Calls:
    """Sends calls to processes, waits for them, and keeps the replies until they are taken.

        self.calls.fill(compute_gradient, self.workers.up())    # one call for each worker
        reply = self.calls.first()                              # the first reply that arrives
        self.apply(reply.value)
        self.calls.fill(compute_gradient, [reply.worker])       # the same worker gets a new call

    `fill` keeps workers supplied with calls. `first` and `all` take replies of calls that have
    succeeded. Only `next` also returns the replies of failed calls. A worker answers its calls in
    order. If a worker is not up yet, `Calls` holds its work, and sends the work once the worker is
    up.

    A `Supervisor` decides when a worker has failed. `Calls` then replaces the worker, and
    `after_failure` decides what happens to its work. If the user removes a worker, `Calls`
    reassigns the worker's calls if `after_failure` is `reassign`, and drops them otherwise.

    One thread sends and waits. Other threads may call `stop_early`, `interrupt`, `kill_busy` and
    `pending`.

    Args:
        workers: the group of processes that run the calls. `include` adds another group.
        owner: name of the strategy or other owner, for error messages.
        count: a function that adds the counts of a reply to the owner's counters. The method
            `Calls.count` calls this function with each reply. Failed calls that returned counts are
            also counted.
        weights: an object with `for_call(worker)`, which returns the argument for `WEIGHTS`, and
            with `version`, the version of the weights. None means `workers.weights`. Of the groups
            of polopt, only a `WorkerSet` provides weights.
        per_worker: the largest number of unanswered calls that are sent to a worker. `Calls` holds
            further calls, and sends them later.
        after_failure: see `AfterFailure`.
        check: see `Supervisor`.
        is_work: see `Supervisor`.

    Attributes:
        per_worker: see the argument. May be changed while nothing is pending.
        load: mean and maximum, since the last report, of the number of sent calls without an
            answer, summed over all workers. This number is measured whenever a call succeeds, and
            includes that call.
        interrupted: if True, a wait for a call raises `CallsInterrupted`.
    """

    def __init__(
        self,
        workers: ProcessGroup,
        owner: str,
        *,
        count: Callable[[Reply], None] | None = None,
        weights: Any = None,
        per_worker: int = 1,
        after_failure: AfterFailure = "send again",
        check: Callable[[Any], None] | None = None,
        is_work: bool = True,
    ) -> None:
        self._workers = workers
        self._groups = {workers.who: workers}  # all groups, by `WorkerHandle.who`
        self._supervisor = Supervisor(self._groups, owner, is_work, check)
        self._count = count
        self._weights = weights or workers.weights
        self.per_worker = per_worker
        self._after_failure = after_failure
        self._queues: dict[WorkerHandle, deque[Pending]] = {}  # calls that were sent, oldest first
        self._backlog: dict[Seat, deque[Work]] = {}  # work that was not sent yet
        self._ended: deque[Pending] = deque()
        self._kept: deque[Reply] = deque()
        # The work of removed workers, to be reassigned in the same group. Each entry has the name
        # of the group.
        self._lost: list[tuple[str, Work]] = []
        # The values of `_num_changes()` at the last `_follow_changes` and the last `_drop_removed`.
        self._changes = self._dropped = self._num_changes()
        self.load = LoadMeter()
        self.interrupted = False

    def include(self, group: ProcessGroup) -> None:
        """Adds a group of processes that can be called. `first` then returns the first reply from
        any process of any group. All groups must share one transport.

        Raises:
            ValueError: the group does not share the transport, or this object already has a group
                with the same name.
        """
        if group.transport is not self._workers.transport or group.who in self._groups:
            raise ValueError(
                f"cannot include the group of {group.who}s: the group must have the transport of "
                f"the {self._workers.who}s, and a name (`who`) that no other group has"
            )
        self._groups[group.who] = group

    def _num_changes(self) -> int:
        return sum(group.changes for group in self._groups.values())

    @property
    def check(self) -> Callable[[Any], None] | None:
        """A function that raises an exception for a reply's value that the owner cannot use. May
        be set while nothing is pending."""
        return self._supervisor.check

    @check.setter
    def check(self, check: Callable[[Any], None] | None) -> None:
        self._supervisor.check = check

    # ---- sending --------------------------------------------------------------------------------

    def fill(self, fn: Function, workers: Sequence[WorkerHandle], *args: Any) -> None:
        """Sends calls of `fn(worker, weights, *args)` until each worker has `per_worker` calls.

        `weights` are the policy's `Weights` at the time of sending. If the worker already has these
        weights, `weights` is None.

        Args:
            fn: the function. Cloudpickle encodes the function for each call: an importable function
                by its name, any other function by value.
            workers: workers that are up, such as `workers.up()` and `reply.worker`.
            args: further arguments.

        Raises:
            FunctionError, TransportError: see `send`.
        """
        for worker in workers:
            for _ in range(self.per_worker - self.num_work_of(worker)):
                self.send(worker, fn, WEIGHTS, *args)

    def send(
        self,
        worker: WorkerHandle,
        fn: Function,
        *args: Any,
        tag: Any = None,
        timeout_s: float | None = None,
        by_reference: bool = False,
    ) -> None:
        """Makes a worker run `fn(worker, *args)`. `Calls` sends the call once the worker is up and
        has fewer than `per_worker` calls.

        Args:
            worker: a process of one of the groups, or `WorkerSet.here`.
            fn: see `fill`.
            args: the arguments. In place of `WEIGHTS`, the worker receives the policy's weights, or
                None if it already has them. In place of a reference, it receives the object.
            tag: any value. The reply carries this value.
            timeout_s: seconds that the call may take without progress. None means
                `worker_timeout_s`.
            by_reference: if True, the return value stays in the worker's process, and the value of
                the reply is a reference. This reference can be an argument of another call.

        Raises:
            FunctionError: the function or its arguments cannot be pickled, or the arguments include
                `WEIGHTS` although the group of the worker provides no weights. If the call is sent
                later, the wait that sends the call raises this error instead.
            TransportError: see `Channel.send`.
        """
        order = worker.index, self._workers.next_call_number()
        work = Work(fn, args, tag, timeout_s, order, by_reference)
        self._backlog.setdefault(worker.seat, deque()).append(work)
        self._send_backlog(worker)

    def _send_backlog(self, worker: WorkerHandle) -> None:
        """Sends the work that waits for this worker, until the worker has `per_worker` calls."""
        backlog = self._backlog.get(worker.seat)
        if worker.removed or self.interrupted:
            self._changes = self._dropped = -1  # so the next wait handles this work again
            return
        if not worker.up:
            return
        while backlog and self.num_calls_of(worker) < self.per_worker:
            self._send(worker, backlog.popleft())
        if backlog is not None and not backlog:
            del self._backlog[worker.seat]

    def _send(self, worker: WorkerHandle, work: Work) -> None:
        group, number = self._groups[worker.who], self._workers.next_call_number()
        weights = self._weights if group is self._workers else group.weights
        if weights is None and any(arg is WEIGHTS for arg in work.args):
            why = f"{group.who}s take no weights, but the arguments of the call include WEIGHTS"
            raise FunctionError(self._supervisor.message(work, worker, why))
        args = tuple([weights.for_call(worker) if a is WEIGHTS else a for a in work.args])
        version = 0 if weights is None else weights.version
        message = Message(number, work.name, work.function, args, work.by_reference, version)
        try:
            ticket = worker.channel.send(message)
        except TransportError:
            raise
        except Exception as error:  # pickling can raise anything
            worker.sent_snapshot = None  # the worker did not get the weights of this call
            why = f"the call cannot be pickled: {type(error).__name__}: {error}"
            raise FunctionError(self._supervisor.message(work, worker, why)) from error
        call = Pending(work, worker, number, ticket, version, self._workers.clock())
        self._queues.setdefault(worker, deque()).append(call)
        self._supervisor.watch(call)

    # ---- replies --------------------------------------------------------------------------------

    def first(
        self, may_take: Callable[[Reply], bool] = lambda _: True, count: bool = True
    ) -> Reply:
        """Waits for the first reply that may be taken, and returns this reply. `Calls` replaces
        workers that fail during the wait.

        Args:
            may_take: returns True if a reply may be taken now. `first` calls this function with
                the kept replies, at the beginning and after each arrival. A reply that may not be
                taken yet stays kept.
            count: if True, `first` adds the counts of the reply now. If False, the caller adds them
                later with `Calls.count`.

        Raises:
            CallsLostError: calls failed and are not sent again, and no call is pending any more.
                Calls are not sent again if an argument is lost, if `after_failure` is `drop`, or if
                `after_failure` is `send again` and the worker failed too often.
            RuntimeError: nothing is pending, so the wait would never end.
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: a call failed, and
                this error ends the run. See `CallError`.
            WorkersFailedError: workers keep failing, or too few workers remain.
            TransportError: a process cannot be reached, and the config allows no other transport.
            CallsInterrupted: `interrupt` was called.
            Exception: the unchanged exception of a function that ran in this process, or of `check`
                for the value of this function.
        """
        failure: WorkerFailure | None = None
        while True:
            for i, reply in enumerate(self._kept):
                if may_take(reply):
                    del self._kept[i]
                    if count:
                        self.count([reply])
                    return reply
            if failure is not None and not self.num_pending:
                raise CallsLostError(
                    f"all pending calls are lost, and none is sent again (after_failure="
                    f"{self._after_failure!r}). The last failure: {failure.message}"
                )
            arrived = self.next(count=False)
            failure = arrived.failure or failure
            self._keep(arrived)

    def all(
        self, stragglers: Stragglers | None = None, steps: Callable[[Work], int] = lambda _: 1
    ) -> list[Reply]:
        """Waits until nothing is pending. Counts and returns the replies of all calls that
        succeeded.

        The replies are sorted by the index of the worker to which their work was first sent, and
        then by the order of `send`. So their order does not depend on the order of arrival.

        Args:
            stragglers: the rule by which the fragments of the slowest workers end early. When they
                end early, `all` also drops work that was not sent yet. None means that no fragment
                ends early.
            steps: returns the number of steps T of the fragment that a call samples. Used only with
                `stragglers`.

        Raises:
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError, WorkersFailedError,
                TransportError, CallsInterrupted, Exception: see `first`.
        """
        self.wait(stragglers, steps)
        replies = sorted(self._kept, key=lambda reply: reply.order)
        self._kept.clear()
        self.count(replies)
        return replies

    def wait(
        self, stragglers: Stragglers | None = None, steps: Callable[[Work], int] = lambda _: 1
    ) -> None:
        """Waits until nothing is pending, and keeps the replies for `first` and `all`. Takes the
        arguments of `all`, and raises the errors of `all`."""
        busy = {worker.seat for worker in self._queues} | set(self._backlog)
        num_workers = len({reply.worker.seat for reply in self._kept} | busy)
        while self.num_pending:
            if stragglers is not None and stragglers.remain(num_workers, len(self._queues)):
                self._backlog.clear()
                for call in self.pending():
                    self.stop_early([call], stragglers.keep_steps(steps(call.work)))
            if not self._receive_any():
                break

    def next(self, count: bool = True) -> Reply:
        """Waits for the next call to end, and returns its reply. Does not return kept replies.

        A call ends with a value or with a failure. A call that misses its deadline has failed. See
        `Reply.worker` for the state of the worker after a failure.

        Args:
            count: if True, `next` adds the counts of the reply now. If False, the caller adds them
                later with `Calls.count`. `next` always adds the counts of a failed call.

        Raises:
            RuntimeError: nothing is pending, so the wait would never end.
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError, WorkersFailedError,
                TransportError, CallsInterrupted, Exception: see `first`.
        """
        reply = self._next_within(math.inf)
        if reply is None:
            raise RuntimeError("no call is pending: the wait would never end")
        if count and reply.failure is None:
            self.count([reply])
        return reply

    def receive(self) -> None:
        """Waits for the next call to end, and keeps the reply of a successful call. Raises the
        errors of `next`."""
        self._keep(self.next(count=False))

    def receive_ended(self) -> None:
        """Keeps the replies of calls that have already ended. Does not wait for other processes. If
        a call to `WorkerSet.here` is pending, this method runs the call to its end. Raises the
        errors of `all`."""
        while self._queues or self._backlog:
            reply = self._next_within(0.0)
            if reply is None:
                break
            self._keep(reply)

    def drain(self) -> None:
        """Sends held work to workers that are up, and waits until no sent call is pending. Keeps
        the replies for `first` and `all`. Work for workers that are not up stays pending. Raises
        the errors of `all`."""
        self._follow_changes()
        while self._queues and self._receive_any():
            pass

    def discard(self) -> None:
        """Asks workers to end the fragments of all sent calls early, waits for these calls, and
        drops all replies, including the kept replies. Also drops work that was not sent yet. Raises
        the errors of `all`."""
        self._drop_removed()
        self._backlog.clear()
        self._lost.clear()
        self.stop_early(self.pending(), 1)
        self.wait()
        self._kept.clear()

    def clear(self) -> None:
        """Drops all pending calls and all kept replies. Does not wait. The results are lost."""
        self._queues.clear()
        self._backlog.clear()
        self._lost.clear()
        self._ended.clear()
        self._kept.clear()
        self._supervisor.check_s = math.inf

    def count(self, replies: Sequence[Reply]) -> None:
        """Adds the counts of each reply to the fault log of its group and to the owner's counters.
        Each reply of a successful call must be counted exactly once. Failed calls are already
        counted."""
        for reply in replies:
            self._groups[reply.worker.who].faults.add(reply.worker.index, reply.counts)
            if self._count is not None:
                self._count(reply)

    # ---- pending --------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """The number of calls that have no answer yet. Includes work that was not sent yet."""
        self._drop_removed()
        sent = sum(len(queue) for queue in self._queues.values())
        return sent + sum(len(works) for works in self._backlog.values()) + len(self._lost)

    @property
    def kept(self) -> deque[Reply]:
        """The replies that have arrived and were not taken, in order of arrival."""
        return self._kept

    @property
    def idle(self) -> bool:
        """True if no call is pending and no reply is kept."""
        return not (self._kept or self.num_pending)

    def num_calls_of(self, worker: WorkerHandle) -> int:
        """Returns the number of calls that were sent to a worker and have no answer yet."""
        return len(self._queues.get(worker, ()))

    def num_work_of(self, worker: WorkerHandle) -> int:
        """Returns the number of calls of a worker that have no answer yet. Includes work that was
        not sent yet."""
        return self.num_calls_of(worker) + len(self._backlog.get(worker.seat, ()))

    def pending_work(self) -> list[Work]:
        """Returns the work of all calls that have no answer yet. Includes work that was not sent
        yet."""
        self._drop_removed()
        sent = [call.work for call in self.pending()] + [work for _, work in self._lost]
        return sent + [work for backlog in self._backlog.values() for work in backlog]

    def pending(self) -> list[Pending]:
        """Returns the calls that were sent and have no answer yet, oldest first. Any thread may
        call this method."""
        calls = [call for queue in list(self._queues.values()) for call in list(queue)]
        return sorted(calls, key=lambda call: call.number)

    def tighten_deadline(self, worker: WorkerHandle, within_s: float) -> None:
        """Shortens the deadlines of a worker's calls to `within_s` seconds from now. Deadlines that
        are already earlier stay unchanged."""
        self._supervisor.tighten(self._queues.get(worker, ()), within_s)

    # ---- other threads --------------------------------------------------------------------------

    def stop_early(self, calls: Sequence[Pending], keep_steps: int) -> None:
        """Asks workers to end the fragments of these calls once the fragments have `keep_steps`
        steps. Does not wait. For each call, a later request has an effect only if it asks for
        fewer steps."""
        for call in calls:
            if keep_steps < call.keep_steps:
                call.keep_steps = keep_steps
                call.worker.channel.stop_early(call.number, keep_steps)

    def interrupt(self) -> None:
        """Makes the waiting thread raise `CallsInterrupted`, usually when the next call ends. Asks
        workers to end the fragments of all sent calls after the current step. The replies of these
        calls can be taken once `interrupted` is False again."""
        self.interrupted = True
        self.stop_early(self.pending(), 1)

    def kill_busy(self) -> None:
        """Kills the remote workers that have not answered their calls. `Calls` replaces these
        workers during the next wait."""
        for worker in {call.worker for call in self.pending() if not call.ticket.reraises}:
            self._workers.transport.kill(worker.channel)

    # ---- waiting --------------------------------------------------------------------------------

    def _receive_any(self) -> bool:
        """Waits for the next call to end, keeps its reply unless the call failed, and returns True.
        Returns False if no call is pending any more, because workers were removed."""
        reply = self._next_within(math.inf)
        if reply is not None:
            self._keep(reply)
        return reply is not None

    def _keep(self, reply: Reply) -> None:
        if reply.failure is None:
            self._kept.append(reply)

    def _next_within(self, duration_s: float) -> Reply | None:
        """Returns the reply of the next call that ends, or None if no call ends within `duration_s`
        seconds or no call is pending. The caller must count the reply unless the call failed."""
        workers, supervisor = self._workers, self._supervisor
        until_s, looked = workers.clock() + duration_s, False
        while True:
            if self.interrupted:
                raise CallsInterrupted(_INTERRUPTED)
            if self._lost or self._changes != self._num_changes():
                self._follow_changes()
            while self._ended:
                call = self._ended.popleft()
                queue = self._queues.get(call.worker)
                if queue and queue[0] is call:  # otherwise the call was dropped in the meantime
                    return self._arrive(call)
            now_s = workers.clock()
            if now_s >= supervisor.check_s:
                overdue = supervisor.overdue([queue[0] for queue in self._queues.values()], now_s)
                if overdue is not None and not self.interrupted:
                    return self._fail(overdue, supervisor.hang(overdue))
            waits = self._queues or (
                self._backlog and any(group.starting for group in self._groups.values())
            )
            if not waits or (now_s >= until_s and looked):
                return None
            self._wait(max(0.0, min(until_s, supervisor.check_s) - now_s))
            looked = True

    def _wait(self, timeout_s: float) -> None:
        """Waits for at most `timeout_s` seconds until a call ends or a worker starts."""
        oldest = {queue[0].ticket: queue[0] for queue in self._queues.values()}
        starting = [group for group in self._groups.values() if group.starting]
        for group in starting:
            timeout_s = min(timeout_s, START_CHECK_S)
            group.check_starting()
        tickets = [*oldest, *(ticket for group in starting for ticket in group.starting)]
        for ticket in self._workers.transport.wait(tickets, timeout_s):
            if ticket in oldest:
                self._ended.append(oldest[ticket])
            for group in starting:
                if ticket in group.starting:
                    group.note_started(ticket)

    def _follow_changes(self) -> None:
        """Sends work to workers that have come up. Drops or reassigns the work of removed
        workers."""
        self._drop_removed()
        self._changes = self._num_changes()
        if self._lost:
            lost, self._lost = self._lost, []
            for who in dict.fromkeys(who for who, _ in lost):
                self._reassign(who, [work for of, work in lost if of == who])
        for group in self._groups.values():
            for worker in group.members:
                if worker.seat in self._backlog:
                    self._send_backlog(worker)

    def _drop_removed(self) -> None:
        """Drops the calls of workers that were removed or replaced. Keeps the work of these calls
        if `after_failure` is `reassign`. With `send again`, keeps only the work of workers that
        were replaced."""
        if self._dropped == self._num_changes():
            return
        self._dropped = self._num_changes()
        lost: list[tuple[str, Work]] = []
        for worker in [worker for worker in self._queues if worker.removed]:
            lost += [(worker.who, work) for work in self._drop(worker)]
        present = {worker.seat for group in self._groups.values() for worker in group.members}
        for seat in [seat for seat in self._backlog if seat not in present]:
            lost += [(seat[0], work) for work in self._backlog.pop(seat)]
        if self._after_failure == "reassign":
            self._lost += lost
        elif self._after_failure == "send again":
            for who, work in reversed(lost):
                seat = who, work.order[0]
                if seat in present:
                    self._backlog.setdefault(seat, deque()).appendleft(work)

    def _drop(self, worker: WorkerHandle) -> list[Work]:
        """Removes the calls that were sent to a worker from the queues. Returns their work."""
        return [call.work for call in self._queues.pop(worker, ())]

    # ---- arrival --------------------------------------------------------------------------------

    def _arrive(self, call: Pending) -> Reply:
        """Returns the reply of a call that has ended. The call must be the oldest call of its
        worker."""
        worker, work = call.worker, call.work
        try:
            answer = self._supervisor.judge(call)
        except BaseException:
            self._end(call)
            raise
        if self.interrupted and not isinstance(answer, Answer):
            self._ended.appendleft(call)  # the next wait handles the failure
            raise CallsInterrupted(_INTERRUPTED)
        if isinstance(answer, WorkerFailure):
            return (
                self._lose(call, answer) if answer.kind == "reference" else self._fail(call, answer)
            )
        if not isinstance(answer, Answer):
            return self._fail(call, *answer)
        of = "" if worker.who == self._workers.who else f"{worker.who} "
        event = self._workers.transport.event
        TRACER.span(f"request {of}{worker.index}", "request", call.sent_s, event)
        self.load.add(sum(map(len, self._queues.values())))
        self._end(call)
        worker.last_answer_s = self._workers.clock()
        self._groups[worker.who].note_answer(worker, answer.record)
        self._send_backlog(worker)
        return Reply(worker, answer.value, work.tag, answer.record, work.order)

    def _end(self, call: Pending) -> None:
        """Removes the oldest call of a worker from its queue, and moves this worker to the end of
        `_queues`. A transport that does not know the order of arrival checks calls in the order of
        `_queues`. Without the move, the transport would always check the same workers first."""
        queue = self._queues[call.worker]
        queue.popleft()
        if not queue:
            del self._queues[call.worker]
        else:  # a single assignment, because other threads may read the pending calls at any time
            others = {worker: own for worker, own in self._queues.items() if own is not queue}
            self._queues = {**others, call.worker: queue}
            self._supervisor.watch(queue[0])

    def _lose(self, call: Pending, failure: WorkerFailure) -> Reply:
        """Drops a call whose argument is lost. `after_failure` does not apply, because no other
        worker could get the argument. The worker itself continues."""
        worker, work = call.worker, call.work
        self._groups[worker.who].faults.lost_argument(failure)
        # The function did not run, so the worker did not set the weights of this call. The next
        # call has to carry weights.
        worker.sent_snapshot = None
        self._end(call)
        worker.last_answer_s = self._workers.clock()
        self._send_backlog(worker)
        return Reply(worker, None, work.tag, Record(), work.order, failure)

    def _fail(self, call: Pending, failure: WorkerFailure, counts: Record | None = None) -> Reply:
        """Replaces a worker that has failed. Handles the worker's calls as `after_failure` says."""
        worker, work = call.worker, call.work
        if counts is not None:
            self.count([Reply(worker, None, work.tag, counts, work.order, failure)])
        lost = self._drop(worker)
        group = self._groups[worker.who]
        replacement = group.replace(worker, failure)
        if self._after_failure == "reassign":
            lost += self._backlog.pop(worker.seat, ())
            self._reassign(worker.who, lost)
        elif self._after_failure == "send again" and replacement is not None:
            self._backlog.setdefault(worker.seat, deque()).extendleft(reversed(lost))
        elif worker.seat in self._backlog and self._after_failure == "drop":
            del self._backlog[worker.seat]
        return Reply(worker, None, work.tag, counts or Record(), work.order, failure)

    def _reassign(self, who: str, lost: Sequence[Work]) -> None:
        """Gives each piece of work in `lost` to a worker of the group `who`: the worker that is up
        and has the fewest unanswered calls at this moment."""
        workers = {worker.index: worker for worker in self._groups[who].up()}
        self._changes = self._num_changes()
        left = {index: self.num_work_of(worker) for index, worker in workers.items()}
        for work in lost:
            index = min(left, key=lambda i: (left[i], i))
            left[index] += 1
            self._backlog.setdefault(workers[index].seat, deque()).append(work)
        for worker in workers.values():
            self._send_backlog(worker)
