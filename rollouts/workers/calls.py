"""`Calls`: sends the calls of a strategy to processes, and keeps replies until they are taken.

A strategy is the optimizer of a run (`PolicyOptimizer`). Its `step` runs in the driver."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from polopt.common.faults import Fault
from polopt.common.tracer import TRACER
from polopt.metrics.number import declare
from polopt.metrics.record import Record
from polopt.metrics.timers import LoadMeter
from polopt.rollouts.transport.channel import ChannelError, Function, Message, TransportError
from polopt.rollouts.workers.call import Call, Reply
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.supervisor import Supervisor
from polopt.rollouts.workers.worker_handle import Seat, WorkerHandle

#: The rule for the pending work of a worker that fails. `send again`: the replacement of the worker
#: gets the work once the replacement is up. If no replacement is started, because the worker failed
#: too often, the work is lost. `reassign`: the work goes to workers that are up. `drop`: the work
#: is lost.
AfterFailure = Literal["send again", "reassign", "drop"]

#: While workers are starting, one wait of the transport lasts at most this number of seconds. Then
#: `Calls` checks for workers that take too long to start.
START_CHECK_S = 1.0
#: The numbers of `Calls.load`.
NUMBERS = declare("""
    requests_in_flight/mean (calls, metric=requests_in_flight): mean number of pending calls in the
        interval, measured whenever a call succeeds, including that call. Without remote workers,
        the driver runs the calls itself, and the value is 1
    requests_in_flight/max (calls, metric=): largest number of these calls
""")
_INTERRUPTED = "the wait for workers was interrupted"
_NOTHING_PENDING = "no call is pending: the wait would never end"


class CallsLostError(RuntimeError):
    """Calls have failed and are not sent again, and no call is pending any more. To continue, call
    `ProcessGroup.up`, which waits for replacements of the processes, and send new work."""


class CallsInterrupted(RuntimeError):
    """Raised in the thread that waits for calls, because `Calls.interrupt` was called."""


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
    `after_failure` decides what happens to its work. A worker that has announced its end
    (`ProcessGroup.leave`) gets no new calls, and ends once its replies have arrived. Work that it
    has not got yet goes to its replacement, or to others if `after_failure` is `reassign`. If the
    user removes a worker, `Calls`
    reassigns the worker's calls if `after_failure` is `reassign`, and drops them otherwise.

    One thread sends and waits. Other threads may call `stop_early`, `interrupt`, `kill_busy` and
    `pending`.

    Args:
        workers: the group of processes that run the calls. `include` adds another group.
        owner: name of the strategy or other owner, for error messages.
        count: a function that adds the counts of a reply to the owner's counters. The method
            `Calls.count` calls this function with each reply. Failed calls that returned counts are
            also counted.
        per_worker: the largest number of unanswered calls that are sent to a worker. `Calls` holds
            further calls, and sends them later.
        after_failure: see `AfterFailure`.
        check: see `Supervisor.judge`.
        is_work: see `Supervisor`.

    Attributes:
        check, per_worker: see the arguments. May be changed while nothing is pending.
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
        per_worker: int = 1,
        after_failure: AfterFailure = "send again",
        check: Callable[[Any], None] | None = None,
        is_work: bool = True,
    ) -> None:
        self._workers = workers
        self._groups = {workers.who: workers}  # all groups, by `WorkerHandle.who`
        self._supervisor = Supervisor(self._groups, owner, is_work)
        self._count = count
        self.check = check
        self.per_worker = per_worker
        self._after_failure = after_failure
        # The calls by state, see `Call`. In each queue, the oldest call is the first.
        self._waiting: dict[Seat, deque[Call]] = {}
        self._sent: OrderedDict[WorkerHandle, deque[Call]] = OrderedDict()
        self._num_sent = 0  # the number of calls in `_sent`
        self._ended: deque[Call] = deque()  # sent calls whose answers have arrived
        self._answered: deque[Call] = deque()
        self._taken: dict[Call, None] = {}
        self._unplaced: list[Call] = []  # waiting calls of removed workers, to be reassigned
        # The changes of the groups that `_drop_removed` knows. None: it must look at the groups.
        self._known_changes: int | None = self._num_changes()
        # True: waiting calls may be for workers that are up. The next wait then sends them.
        self._may_send = False
        # For each process that leaves, the calls that may still need values that it has made.
        self._needing: dict[WorkerHandle, list[Call]] = {}
        self._reference_types: set[type] = set()  # of all values by reference
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

    # ---- sending --------------------------------------------------------------------------------

    def fill(self, fn: Function, handles: Sequence[WorkerHandle], *args: Any) -> None:
        """Sends calls of `fn(worker, weights, *args)` until each worker has `per_worker` calls.

        `weights` are the policy's `Weights` at the time of sending. If the worker already has these
        weights, `weights` is None.

        Args:
            fn: the function. Cloudpickle encodes the function for each call: an importable function
                by its name, any other function by value.
            handles: workers that are up, such as `workers.up()` and `reply.worker`.
            args: further arguments.

        Raises:
            FunctionError, TransportError: see `send`.
        """
        for handle in handles:
            for _ in range(self.per_worker - self.num_work_of(handle)):
                self.send(handle, fn, WEIGHTS, *args)

    def send(
        self,
        handle: WorkerHandle,
        fn: Function,
        *args: Any,
        tag: Any = None,
        timeout_s: float | None = None,
        by_reference: bool = False,
    ) -> None:
        """Makes a worker run `fn(worker, *args)`. `Calls` sends the call once the worker is up and
        has fewer than `per_worker` calls.

        Args:
            handle: a process of one of the groups, or `WorkerSet.here`.
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
        order = handle.index, self._workers.next_call_number()
        call = Call(handle, fn, args, tag, timeout_s, order, by_reference)
        self._waiting.setdefault(handle.seat, deque()).append(call)
        self._send_waiting(handle)

    def _send_waiting(self, handle: WorkerHandle) -> None:
        """Sends the calls that wait for this worker, until the worker has `per_worker` calls."""
        waiting = self._waiting.get(handle.seat)
        if handle.removed:
            self._known_changes = None  # `_drop_removed` then finds a worker for the new call
            return
        if self.interrupted:
            self._may_send = True
            return
        if not handle.up:
            self._may_send = self._may_send or handle in self._groups[handle.who].leaving
            return
        while waiting and self.num_calls_of(handle) < self.per_worker:
            self._send(handle, waiting.popleft())
        if waiting is not None and not waiting:
            del self._waiting[handle.seat]

    def _send(self, handle: WorkerHandle, call: Call) -> None:
        call.worker = handle
        group, call.number = self._groups[handle.who], self._workers.next_call_number()
        weights = group.weights
        if weights is None and any(arg is WEIGHTS for arg in call.args):
            why = f"{group.who}s take no weights, but the arguments of the call include WEIGHTS"
            raise FunctionError(self._supervisor.message(call, why))
        args = tuple([weights.for_call(handle) if a is WEIGHTS else a for a in call.args])
        call.version = 0 if weights is None else weights.version
        message = Message(
            call.number, call.name, call.function, args, call.by_reference, call.version
        )
        try:
            call.ticket = handle.channel.send(message)
        except TransportError:
            raise
        except Exception as error:  # pickling can raise anything
            handle.sent_snapshot = None  # the worker did not get the weights of this call
            why = f"the call cannot be pickled: {type(error).__name__}: {error}"
            raise FunctionError(self._supervisor.message(call, why)) from error
        call.sent_s = self._workers.clock()
        call.to("sent")
        handle.unanswered += 1
        self._sent.setdefault(handle, deque()).append(call)
        self._num_sent += 1
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
            count: if True, `first` adds the counts of the reply now. See `count`.

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
        failure: Fault | None = None
        while True:
            for i, reply in enumerate(self._answered):
                if may_take(reply):
                    del self._answered[i]
                    return self._take(reply, count)
            if failure is not None and not self.num_pending:
                raise CallsLostError(
                    f"all pending calls are lost, and none is sent again (after_failure="
                    f"{self._after_failure!r}). The last failure: {failure.message}"
                )
            arrived = self._next_within(math.inf)
            if arrived is None:
                raise RuntimeError(_NOTHING_PENDING)
            failure = arrived.failure or failure

    def all(
        self, stragglers: Stragglers | None = None, steps: Callable[[Call], int] = lambda _: 1
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
        replies = sorted(self._answered, key=lambda reply: reply.order)
        self._answered.clear()
        return [self._take(reply, count=True) for reply in replies]

    def wait(
        self, stragglers: Stragglers | None = None, steps: Callable[[Call], int] = lambda _: 1
    ) -> None:
        """Waits until nothing is pending, and keeps the replies for `first` and `all`. Takes the
        arguments of `all`, and raises the errors of `all`."""
        busy = {handle.seat for handle in self._sent} | set(self._waiting)
        num_workers = len({reply.worker.seat for reply in self._answered} | busy)
        while self.num_pending:
            if stragglers is not None and stragglers.remain(num_workers, len(self._sent)):
                self._lose(self._waiting)
                for call in self.pending():
                    self.stop_early([call], stragglers.keep_steps(steps(call)))
            if self._next_within(math.inf) is None:
                break

    def next(self, count: bool = True) -> Reply:
        """Waits for the next call to end, and returns its reply. Does not return kept replies.

        A call ends with a value or with a failure. A call that misses its deadline has failed. See
        `Reply.worker` for the state of the worker after a failure.

        Args:
            count: if True, `next` adds the counts of the reply now. See `count`. The counts of a
                failed call are always added.

        Raises:
            RuntimeError: nothing is pending, so the wait would never end.
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError, WorkersFailedError,
                TransportError, CallsInterrupted, Exception: see `first`.
        """
        reply = self._next_within(math.inf)
        if reply is None:
            raise RuntimeError(_NOTHING_PENDING)
        if reply.failure is not None:
            return reply
        self._answered.remove(reply)
        return self._take(reply, count)

    def receive(self) -> None:
        """Waits for the next call to end, and keeps the reply of a successful call. Raises the
        errors of `next`."""
        if self._next_within(math.inf) is None:
            raise RuntimeError(_NOTHING_PENDING)

    def receive_ended(self) -> None:
        """Keeps the replies of calls that have already ended. Does not wait for other processes. If
        a call to `WorkerSet.here` is pending, this method runs the call to its end. Raises the
        errors of `all`."""
        while (self._sent or self._waiting) and self._next_within(0.0) is not None:
            pass

    def drain(self) -> None:
        """Sends held work to workers that are up, and waits until no sent call is pending. Keeps
        the replies for `first` and `all`. Work for workers that are not up stays pending. Raises
        the errors of `all`."""
        self._follow_changes()
        while self._sent and self._next_within(math.inf) is not None:
            pass

    def discard(self) -> None:
        """Asks workers to end the fragments of all sent calls early, waits for these calls, and
        drops all replies, including the kept replies. Also drops work that was not sent yet. Raises
        the errors of `all`."""
        self._drop_removed()
        self._lose(self._waiting, self._unplaced)
        self.stop_early(self.pending(), 1)
        self.wait()
        self._lose(self._answered)

    def clear(self) -> None:
        """Drops all pending calls and all kept replies. Does not wait. The results are lost."""
        self._ended.clear()
        for handle, calls in self._sent.items():
            handle.unanswered -= len(calls)
        self._num_sent = 0
        self._lose(self._sent, self._waiting, self._unplaced, self._answered)
        self.drop([*self._taken])
        self._supervisor.check_s = math.inf

    def _lose(self, *held: dict[Any, deque[Call]] | list[Call] | deque[Call]) -> None:
        """Empties containers of calls. The calls in them are lost."""
        for calls in held:
            queues = list(calls.values()) if isinstance(calls, dict) else [calls]
            for call in [call for queue in queues for call in queue]:
                call.to("lost")
            calls.clear()

    def _take(self, reply: Reply, count: bool) -> Reply:
        reply.to("taken")
        self._taken[reply] = None
        if count:
            self.count([reply])
        return reply

    def count(self, replies: Sequence[Reply] | None = None) -> None:
        """Adds the counts of replies to the fault logs of their groups and to the owner's counters.

        A strategy that takes replies with `count=False` counts them later, in an order of its own.
        Each reply is counted once. At the latest, the next result counts what was taken.

        Args:
            replies: replies that were taken and not counted. None means all such replies, in the
                order in which they were taken.

        Raises:
            RuntimeError: a reply was already counted or dropped.
        """
        for reply in [*self._taken] if replies is None else replies:
            reply.to("counted")
            del self._taken[reply]
            self._add_counts(reply)

    def drop(self, replies: Sequence[Reply]) -> None:
        """Drops replies that were taken with `count=False`. Their counts are never added."""
        for reply in replies:
            reply.to("lost")
            del self._taken[reply]

    def _add_counts(self, reply: Reply) -> None:
        self._groups[reply.worker.who].faults.add(reply.worker.index, reply.counts)
        if self._count is not None:
            self._count(reply)

    # ---- pending --------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """The number of calls that have no answer yet. Includes work that was not sent yet."""
        self._drop_removed()
        return self._num_sent + sum(map(len, (*self._waiting.values(), self._unplaced)))

    @property
    def kept(self) -> deque[Reply]:
        """The replies that have arrived and were not taken, in order of arrival."""
        return self._answered

    @property
    def idle(self) -> bool:
        """True if no call is pending and no reply is kept."""
        return not (self._answered or self.num_pending)

    def num_calls_of(self, handle: WorkerHandle) -> int:
        """Returns the number of calls that were sent to a worker and have no answer yet."""
        return len(self._sent.get(handle, ()))

    def num_work_of(self, handle: WorkerHandle) -> int:
        """Returns the number of calls of a worker that have no answer yet. Includes work that was
        not sent yet."""
        return self.num_calls_of(handle) + len(self._waiting.get(handle.seat, ()))

    def pending_work(self) -> list[Call]:
        """Returns all calls that have no answer yet. Includes calls that were not sent yet."""
        self._drop_removed()
        waiting = [call for queue in self._waiting.values() for call in queue]
        return [*self.pending(), *self._unplaced, *waiting]

    def pending(self) -> list[Call]:
        """Returns the calls that were sent and have no answer yet, oldest first. Any thread may
        call this method."""
        calls = [call for queue in list(self._sent.values()) for call in list(queue)]
        return sorted(calls, key=lambda call: call.number)

    def tighten_deadline(self, handle: WorkerHandle, within_s: float) -> None:
        """Shortens the deadlines of a worker's calls to `within_s` seconds from now. Deadlines that
        are already earlier stay unchanged."""
        self._supervisor.tighten(self._sent.get(handle, ()), within_s)

    # ---- other threads --------------------------------------------------------------------------

    def stop_early(self, calls: Sequence[Call], keep_steps: int) -> None:
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
        for handle in {call.worker for call in self.pending() if not call.ticket.reraises}:
            self._workers.transport.kill(handle.channel)

    # ---- waiting --------------------------------------------------------------------------------

    def _next_within(self, duration_s: float) -> Reply | None:
        """Waits for the next call to end. Returns this call, which is now answered or has failed.
        Returns None if no call ends within `duration_s` seconds, or if no call is pending any
        more."""
        workers, supervisor = self._workers, self._supervisor
        until_s, looked = workers.clock() + duration_s, False
        while True:
            if self.interrupted:
                raise CallsInterrupted(_INTERRUPTED)
            if self._may_send or self._known_changes != self._num_changes():
                self._follow_changes()
            while self._ended:
                call = self._ended.popleft()
                queue = self._sent.get(call.worker)
                if queue and queue[0] is call:  # otherwise the call was dropped in the meantime
                    return self._arrive(call)
            now_s = workers.clock()
            if now_s >= supervisor.check_s:
                overdue = supervisor.overdue([queue[0] for queue in self._sent.values()], now_s)
                if overdue is not None and not self.interrupted:
                    return self._fail(overdue, supervisor.hang(overdue))
            self._see_off()
            waits = self._sent or (
                self._waiting and any(group.starting for group in self._groups.values())
            )
            if not waits or (now_s >= until_s and looked):
                return None
            self._wait(max(0.0, min(until_s, supervisor.check_s) - now_s))
            looked = True

    def _wait(self, timeout_s: float) -> None:
        """Waits for at most `timeout_s` seconds until a call ends or a worker starts."""
        oldest = {queue[0].ticket: queue[0] for queue in self._sent.values()}
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

    def _see_off(self) -> None:
        """Makes processes leave whose nodes have announced their end. Lets processes go whose work
        has come back. A process stays while a call needs a value that it has made."""
        for group in self._groups.values():
            group.take_leaving()
            for handle in list(group.leaving):
                kept = any(one.worker is handle and one.by_reference for one in self._answered)
                if handle.unanswered or kept:
                    continue
                if handle not in self._needing:
                    # The strategy has used all values of the process in calls, or needs them no
                    # more. It is not known which of these calls need the values.
                    self._needing[handle] = self._calls_with_references()
                if all(call.state != "sent" for call in self._needing[handle]):
                    del self._needing[handle]
                    group.let_go(handle)

    def _calls_with_references(self) -> list[Call]:
        """Returns the sent calls that have references among their arguments. If a call waits for
        another process, puts the values in place of its references, because that process may start
        too late to fetch them itself."""
        types, get = self._reference_types, self._workers.transport.get
        found = [call for call in self.pending_work() if any(type(a) in types for a in call.args)]
        for call in found:
            if call.state == "waiting":
                with contextlib.suppress(ChannelError):  # the call is dropped when it is sent
                    call.args = tuple([get(a) if type(a) in types else a for a in call.args])
        return found

    def _follow_changes(self) -> None:
        """Sends waiting calls to workers that have come up. Drops or reassigns the calls of removed
        workers."""
        self._drop_removed()
        self._may_send = False
        if self._unplaced:
            unplaced, self._unplaced = self._unplaced, []
            for who in dict.fromkeys(call.worker.who for call in unplaced):
                self._reassign(who, [call for call in unplaced if call.worker.who == who])
        for group in self._groups.values():
            for handle in group.members:
                if handle.seat in self._waiting:
                    self._send_waiting(handle)

    def _drop_removed(self) -> None:
        """Loses the calls of workers that were removed or replaced. Makes new calls for their work
        if `after_failure` is `reassign`. With `send again`, only for the work of workers that were
        replaced."""
        if self._known_changes == self._num_changes():
            return
        self._known_changes, self._may_send = self._num_changes(), True
        lost: list[Call] = []
        for handle in [handle for handle in self._sent if handle.removed]:
            lost += self._pop_sent(handle)
        if self._after_failure == "reassign":
            for handle in [one for group in self._groups.values() for one in group.leaving]:
                lost += self._waiting.pop(handle.seat, ())
        present = {handle.seat for group in self._groups.values() for handle in group.members}
        for seat in [seat for seat in self._waiting if seat not in present]:
            lost += self._waiting.pop(seat)
        again = self._lost(lost)
        if self._after_failure == "reassign":
            self._unplaced += again
        elif self._after_failure == "send again":
            for call in reversed(again):
                seat = call.worker.who, call.order[0]
                if seat in present:
                    self._waiting.setdefault(seat, deque()).appendleft(call)

    def _lost(self, calls: Sequence[Call]) -> list[Call]:
        """Marks calls as lost. Returns new calls for their work."""
        for call in calls:
            call.to("lost")
        return [call.again() for call in calls]

    # ---- arrival --------------------------------------------------------------------------------

    def _arrive(self, call: Call) -> Call:
        """Handles the answer to a call that has ended, the oldest call of its worker. Returns the
        call, which is now answered or has failed."""
        handle = call.worker
        try:
            answer = self._supervisor.judge(call, self.check)
        except BaseException:
            self._end(call)
            call.to("lost")
            raise
        if self.interrupted and not isinstance(answer, Answer):
            self._ended.appendleft(call)  # the next wait handles the failure
            raise CallsInterrupted(_INTERRUPTED)
        if isinstance(answer, Fault):
            lose = self._lose_argument if answer.kind == "reference" else self._fail
            return lose(call, answer)
        if not isinstance(answer, Answer):
            return self._fail(call, *answer)
        of = "" if handle.who == self._workers.who else f"{handle.who} "
        event = self._workers.transport.event
        TRACER.span(f"request {of}{handle.index}", "request", call.sent_s, event)
        self.load.add(self._num_sent)
        call.value, call.counts = answer.value, answer.record
        call.to("answered")
        self._end(call)
        handle.last_answer_s = self._workers.clock()
        self._groups[handle.who].note_answer(handle, answer.record)
        self._answered.append(call)
        if call.by_reference:
            self._reference_types.add(type(call.value))
        if "leaves" in answer.record.timing:
            self._groups[handle.who].leave(handle, "the process has got SIGTERM")
        self._send_waiting(handle)
        return call

    def _end(self, call: Call) -> None:
        """Removes the oldest sent call of a worker from its queue, and moves this worker to the end
        of `_sent`. A transport that does not know the order of arrival checks calls in the order of
        `_sent`. Without the move, the transport would always check the same workers first."""
        queue = self._sent[call.worker]
        queue.popleft()
        self._num_sent -= 1
        call.worker.unanswered -= 1
        if not queue:
            del self._sent[call.worker]
        else:  # a single step, because other threads may read the pending calls at any time
            self._sent.move_to_end(call.worker)
            self._supervisor.watch(queue[0])

    def _pop_sent(self, handle: WorkerHandle) -> deque[Call]:
        """Removes and returns the sent calls of a worker."""
        calls = self._sent.pop(handle, deque())
        self._num_sent -= len(calls)
        return calls

    def _lose_argument(self, call: Call, failure: Fault) -> Call:
        """Loses a call whose argument is lost. `after_failure` does not apply, because no other
        worker could get the argument. The worker itself continues."""
        handle = call.worker
        self._groups[handle.who].faults.lost_argument(handle.index, failure)
        # The function did not run, so the worker did not set the weights of this call. The next
        # call has to carry weights.
        handle.sent_snapshot = None
        call.failure = failure
        call.to("lost")
        self._end(call)
        handle.last_answer_s = self._workers.clock()
        self._send_waiting(handle)
        return call

    def _fail(self, call: Call, failure: Fault, counts: Record | None = None) -> Call:
        """Replaces a worker that has failed. Handles the worker's calls as `after_failure` says."""
        handle = call.worker
        call.failure = failure
        if counts is not None:
            call.counts = counts
            self._add_counts(call)
        again = self._lost(self._pop_sent(handle))
        handle.unanswered = 0
        group = self._groups[handle.who]
        replacement = group.replace(handle, failure)
        if self._after_failure == "reassign":
            again += self._lost(self._waiting.pop(handle.seat, ()))
            self._reassign(handle.who, again)
        elif self._after_failure == "send again" and replacement is not None:
            self._waiting.setdefault(handle.seat, deque()).extendleft(reversed(again))
        elif handle.seat in self._waiting and self._after_failure == "drop":
            self._lost(self._waiting.pop(handle.seat))
        return call

    def _reassign(self, who: str, calls: Sequence[Call]) -> None:
        """Gives each of these waiting calls to a worker of the group `who`: the worker that is up
        and has the fewest unanswered calls at this moment."""
        workers = {handle.index: handle for handle in self._groups[who].up()}
        left = {index: self.num_work_of(handle) for index, handle in workers.items()}
        for call in calls:
            index = min(left, key=lambda i: (left[i], i))
            left[index] += 1
            self._waiting.setdefault(workers[index].seat, deque()).append(call)
        for handle in workers.values():
            self._send_waiting(handle)
