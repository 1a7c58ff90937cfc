"""`Calls`: pending calls of workers; every wait for them has a deadline."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ray.exceptions import RayError, RayTaskError

from polopt.common.config import ConfigError
from polopt.common.tracer import TRACER
from polopt.metrics.timers import LoadMeter
from polopt.rollouts.envs.env_sources import env_name
from polopt.rollouts.envs.errors import EnvironmentAPIError
from polopt.rollouts.transport.messages import is_of_signal
from polopt.rollouts.transport.rpc_client import RpcFuture, TransportError
from polopt.rollouts.workers.callbacks import CallbackError
from polopt.rollouts.workers.counts import Counts
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.failures import (
    CallError,
    FunctionError,
    NonFiniteError,
    WorkerFailure,
)
from polopt.rollouts.workers.rollout_worker import Answer
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: A function that runs in a worker, `fn(worker, *args)`.
Function = Callable[..., Any]
#: What becomes of the work of a worker that fails: it is sent to its replacement once that is up,
#: or to the other workers, or it is lost.
AfterFailure = Literal["send again", "reassign", "drop"]


#: Errors of a worker that end the run as they are, by the kind of a `CallError`.
_ENDING: dict[str, type[RuntimeError]] = {
    "api": EnvironmentAPIError,
    "non_finite": NonFiniteError,
    "callback": CallbackError,
}
#: Longest wait while workers are starting, between checks of them.
START_CHECK_S = 1.0


class _Weights:
    """Type of `WEIGHTS`."""

    def __repr__(self) -> str:
        return "WEIGHTS"


#: As an argument of a call: the policy's weights at the moment when the call is sent to a worker
#: that is up; None if the worker has them already.
WEIGHTS: Any = _Weights()


class CallsInterrupted(RuntimeError):
    """`Calls.interrupt` was called while a thread waited."""


class Work(NamedTuple):
    """One call, from `send` until it has been answered or dropped.

    Attributes:
        function: to run.
        args: its arguments, `WEIGHTS` among them.
        tag: returned with the reply.
        timeout_s: time limit; None: `worker_timeout_s`.
        order: place of its reply in `all`: index of the worker it was first sent to, and number of
            the call.
    """

    function: Function
    args: tuple[Any, ...]
    tag: Any
    timeout_s: float | None
    order: tuple[int, int]

    @property
    def name(self) -> str:
        """Of the function, for messages."""
        return function_name(self.function)

    @property
    def code(self) -> Any:
        """What tells functions apart: two lambdas have the same name, and one that is made anew for
        each call has the same code. That of a partial is its function's, whatever the arguments;
        that of a callable object its class's."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        called = function if hasattr(function, "__code__") else type(function).__call__
        return getattr(called, "__code__", self.name)


class Reply(NamedTuple):
    """What came back for one call.

    Attributes:
        worker: the worker that was called. After a failure its process is no longer used, and
            another one is starting.
        value: return value of the function; None after a failure.
        tag: the tag given to `send`.
        counts: what the call has counted.
        order: see `Work`.
        failure: why there is no value; None after success.
    """

    worker: WorkerHandle
    value: Any
    tag: Any
    counts: Counts
    order: tuple[int, int]
    failure: WorkerFailure | None = None


@dataclass(slots=True, eq=False)
class Pending:
    """A call that was sent and has not been answered.

    Attributes:
        work: likewise.
        worker: likewise.
        number: of the call, for `stop_early`.
        future: its `ray.ObjectRef` or `RpcFuture`.
        version: version of the driver's weights when it was sent.
        sent_s: time at which it was sent.
        latest_s: its deadline at the latest.
        stopped: its fragments end early.
    """

    work: Work
    worker: WorkerHandle
    number: int
    future: Any
    version: int
    sent_s: float
    latest_s: float = math.inf
    stopped: bool = False

    @property
    def began_s(self) -> float:
        """Time at which its worker began it, at the latest, if it is the worker's oldest call: when
        it was sent, or when the answer before it was taken."""
        return max(self.sent_s, self.worker.last_answer_s or 0.0)


def function_name(fn: Function) -> str:
    """Name of a function in messages, with its module."""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', None) or repr(fn)}"


class Calls:
    """Calls of workers that are pending, and replies that have not been taken.

    `fill` keeps workers supplied with calls, `first` and `all` take replies; they are written on
    `send` and `next`. A worker answers its calls in order. It has failed when its process died,
    when it has not answered for `worker_timeout_s`, and when a call raised after that function had
    succeeded before. It is replaced then, and its work is handled by `after_failure`. A function
    that raises before it has succeeded in any worker is a `FunctionError`, which ends the run. Work
    for a worker that is not up waits here until it is. Calls of removed workers are dropped, or
    reassigned.

    One thread sends and waits. Other threads may call `stop_early`, `interrupt`, `kill_busy` and
    `pending`.

    Args:
        workers: the workers that are called.
        owner: strategy or other owner, for messages.
        count: adds the counts of a reply, when it is taken or has failed.
        weights_for: what replaces `WEIGHTS`; by default `WorkerSet.weights_for`.
        per_worker: most calls that a worker has at once; further ones wait here.
        after_failure: see `AfterFailure`.
        check: raises an exception for a value that the owner cannot use: its worker has failed.
        is_work: a call that succeeds shows that its worker works, and resets the count of
            consecutive failures. False for calls that any process could answer.

    Attributes:
        per_worker, check: as above; may be changed while nothing is pending.
        load: number of pending calls when one of them has ended, which is included.
        interrupted: `next` raises `CallsInterrupted`.
    """

    def __init__(
        self,
        workers: WorkerSet,
        owner: str,
        *,
        count: Callable[[Reply], None] | None = None,
        weights_for: Callable[[WorkerHandle], Any] | None = None,
        per_worker: int = 1,
        after_failure: AfterFailure = "send again",
        check: Callable[[Any], None] | None = None,
        is_work: bool = True,
    ) -> None:
        self._workers = workers
        self._owner = owner
        self._count = count
        self._weights_for = weights_for or workers.weights_for
        self.per_worker = per_worker
        self._after_failure = after_failure
        self.check = check
        self._is_work = is_work
        self._calls: dict[Any, Pending] = {}  # all pending ones, by future, oldest first
        self._queues: dict[WorkerHandle, deque[Pending]] = {}  # by worker, oldest first
        self._heads: dict[Any, Pending] = {}  # first call of each worker, where it is through Ray
        self._backlog: dict[int, deque[Work]] = {}  # not sent yet, by worker index
        self._ended: deque[Any] = deque()  # futures
        self._kept: deque[Reply] = deque()
        self._succeeded: set[Any] = set()  # code of functions that have, in any worker
        self._lost: list[Work] = []  # of removed workers, to be reassigned
        self._changes = self._dropped = workers.changes  # up to which they were followed
        self._check_s = math.inf  # no deadline is earlier
        self._local_call = 0
        self.load = LoadMeter()
        self.interrupted = False

    # ---- sending --------------------------------------------------------------------------------

    def fill(self, fn: Function, workers: Sequence[WorkerHandle], *args: Any) -> None:
        """Has each worker run `fn(worker, weights, *args)`, as often as it may have calls at once.

        `weights` are the policy's `Weights` at the moment of sending, None if the worker has them.

        Args:
            fn: encoded by cloudpickle each time: an importable function by its name, others by
                value.
            workers: workers that are up, such as `workers.up()` and `reply.worker`.
            args: further arguments.

        Raises:
            FunctionError: function or arguments cannot be pickled.
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
    ) -> None:
        """Has a worker run `fn(worker, *args)`, once it is up and has fewer than `per_worker`
        calls.

        Args:
            worker: remote, or `WorkerSet.here`.
            fn: see `fill`.
            args: arguments; `WEIGHTS` stands for the policy's weights.
            tag: returned with the reply.
            timeout_s: time limit, from the worker's last answer; None: `worker_timeout_s`.

        Raises:
            FunctionError: function or arguments cannot be pickled.
        """
        order = worker.index, self._workers.next_call_number()
        work = Work(fn, args, tag, timeout_s, order)
        self._backlog.setdefault(worker.index, deque()).append(work)
        self._send_backlog(worker)

    def _send_backlog(self, worker: WorkerHandle) -> None:
        """Sends the work that waits for this worker, as far as it may have calls."""
        backlog = self._backlog.get(worker.index)
        if worker.removed or self.interrupted:
            self._changes = self._dropped = -1  # work that waits here is to be looked at again
            return
        if worker.index == 0 or not worker.up:
            return
        while backlog and self.num_calls_of(worker) < self.per_worker:
            self._send(worker, backlog.popleft())
        if backlog is not None and not backlog:
            del self._backlog[worker.index]

    def _send(self, worker: WorkerHandle, work: Work) -> None:
        workers = self._workers
        args = tuple([self._weights_for(worker) if a is WEIGHTS else a for a in work.args])
        number, now_s = workers.next_call_number(), workers.clock()
        try:
            call = workers.start_call(worker, number, work.name, work.function, args, self._ended)
        except (RayError, TransportError, ConfigError):
            raise
        except Exception as error:  # pickling can raise anything
            why = f"the call cannot be pickled: {type(error).__name__}: {error}"
            raise FunctionError(self._message(work, worker, why)) from error
        version = workers.local.policy.version
        pending = self._calls[call] = Pending(work, worker, number, call, version, now_s)
        queue = self._queues.setdefault(worker, deque())
        queue.append(pending)
        if len(queue) == 1 and not isinstance(call, RpcFuture):
            self._heads[call] = pending
        self._check_s = min(self._check_s, now_s + self._timeout_s(work))

    # ---- replies --------------------------------------------------------------------------------

    def first(self) -> Reply:
        """The first reply to arrive, counted; workers that fail meanwhile are replaced.

        Raises:
            RuntimeError: nothing is pending: the wait would never end.
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: another worker would
                fail the same.
            WorkersFailedError: workers keep failing.
            CallsInterrupted: see `interrupt`.
        """
        reply = self._kept.popleft() if self._kept else self.next(count=False)
        while reply.failure is not None:
            reply = self.next(count=False)
        self.count([reply])
        return reply

    def all(
        self, stragglers: Stragglers | None = None, steps: Callable[[Work], int] = lambda _: 1
    ) -> list[Reply]:
        """All replies, counted, once nothing is pending: in order of the worker that the work was
        first sent to, so that results do not depend on the order of arrival.

        Args:
            stragglers: ends the last calls early; None: waits for all.
            steps: T of the fragment that a call samples, for stragglers.

        Raises:
            see `first`.
        """
        self.wait(stragglers, steps)
        replies = sorted(self._kept, key=lambda reply: reply.order)
        self._kept.clear()
        self.count(replies)
        return replies

    def wait(
        self, stragglers: Stragglers | None = None, steps: Callable[[Work], int] = lambda _: 1
    ) -> None:
        """Waits until nothing is pending, and keeps the replies. Arguments and errors as `all`."""
        num_workers = len({reply.worker.index for reply in self._kept} | self._busy())
        while self.num_pending:
            if stragglers is not None and stragglers.remain(num_workers, len(self._queues)):
                self._backlog.clear()
                for call in self.pending():
                    self.stop_early([call], stragglers.keep_steps(steps(call.work)))
            if not self._receive_any():
                break

    def take(self, reply: Reply, count: bool = True) -> Reply:
        """Takes one of `kept`.

        Args:
            reply: which.
            count: add its counts now; False: the caller does so by `count`.
        """
        self._kept.remove(reply)
        if count:
            self.count([reply])
        return reply

    def receive(self) -> None:
        """Waits for the next call to end, and keeps its reply. Errors as `first`."""
        self._keep(self.next(count=False))

    def discard(self) -> None:
        """Ends everything that is pending early and drops it, and what is kept."""
        self._drop_removed()
        self._backlog.clear()
        self._lost.clear()
        self.stop_all(1)
        self.wait()
        self._kept.clear()

    def drain(self) -> None:
        """Waits for the calls that were sent, and keeps their replies for `first` and `all`. Work
        for workers that are not up stays here."""
        self._follow_changes()
        while (self._calls or self._backlog.get(0)) and self._receive_any():
            pass

    def receive_ended(self) -> None:
        """Keeps the replies of calls that have ended already; does not wait. Errors as `first`."""
        while self._calls or self._backlog.keys() - {0}:
            self._wait(0.0)
            reply = self.next_within(0.0)
            if reply is None:
                break
            self._keep(reply)

    def _receive_any(self) -> bool:
        """As `receive`, but returns False if nothing is pending any more, because workers were
        removed."""
        reply = self.next_within(math.inf)
        if reply is not None:
            self._keep(reply)
        return reply is not None

    def _keep(self, reply: Reply) -> None:
        if reply.failure is None:
            self._kept.append(reply)

    def next(self, count: bool = True) -> Reply:
        """The next call to end, in success or failure, at the latest at its deadline. A worker that
        has failed is being replaced already.

        Args:
            count: add its counts now; False: the caller does so by `count`.

        Raises:
            see `first`.
        """
        reply = self.next_within(math.inf)
        if reply is None:
            raise RuntimeError("no call is pending: the wait would never end")
        if count and reply.failure is None:
            self.count([reply])
        return reply

    def next_within(self, duration_s: float) -> Reply | None:
        """As `next(count=False)`, but None if no call ends within `duration_s` seconds, or none is
        pending."""
        until_s = self._workers.clock() + duration_s
        while True:
            if self.interrupted:
                raise CallsInterrupted("the wait for workers was interrupted")
            if self._lost or self._changes != self._workers.changes:
                self._follow_changes()
            if local := self._backlog.get(0):
                done = self._run_here(local.popleft())
                if not self.interrupted:
                    return done
                self._keep(done)
                continue
            reply = self._take_ended()
            if reply is not None:
                return reply
            now_s = self._workers.clock()
            if now_s >= self._check_s:
                overdue = self._overdue(now_s)
                if overdue is not None:
                    return self._fail(overdue, self._hang(overdue))
            nothing = not (self._calls or (self._backlog and self._workers.starting))
            if nothing or now_s >= until_s:
                return None
            self._wait(min(until_s, self._check_s) - now_s)

    def count(self, replies: Sequence[Reply]) -> None:
        """Adds the counts of replies, in this order, each once: to the faults of the workers, and
        to what the owner counts."""
        for reply in replies:
            self._workers.faults.add(reply.worker.index, reply.counts)
            if self._count is not None:
                self._count(reply)

    # ---- pending --------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of calls that were sent or wait here to be sent, and have not been answered."""
        self._drop_removed()
        return len(self._calls) + len(self._lost) + sum(map(len, self._backlog.values()))

    @property
    def kept(self) -> deque[Reply]:
        """Replies that have arrived and were not taken, in order of arrival."""
        return self._kept

    @property
    def idle(self) -> bool:
        """Whether nothing is pending or kept."""
        return not (self._kept or self.num_pending)

    def num_calls_of(self, worker: WorkerHandle) -> int:
        """Number of calls that were sent to a worker and have not been answered."""
        return len(self._queues.get(worker, ()))

    def num_work_of(self, worker: WorkerHandle) -> int:
        """Number of calls of a worker that are pending, sent or not."""
        return self.num_calls_of(worker) + len(self._backlog.get(worker.index, ()))

    def pending_work(self) -> list[Work]:
        """All that is pending, sent or not."""
        self._drop_removed()
        sent = [call.work for call in self._calls.values()] + self._lost
        return sent + [work for backlog in self._backlog.values() for work in backlog]

    def pending(self) -> list[Pending]:
        """The calls that were sent and have not been answered, oldest first. Any thread may call
        this."""
        return list(self._calls.values())

    def tighten_deadline(self, worker: WorkerHandle, within_s: float) -> None:
        """Limits the calls of a worker to `within_s` seconds from now, unless their limit is
        earlier."""
        latest_s = self._workers.clock() + within_s
        for call in self._queues.get(worker, ()):
            call.latest_s = min(call.latest_s, latest_s)
        self._check_s = min(self._check_s, latest_s)

    def drop(self, worker: WorkerHandle) -> list[Work]:
        """Drops the calls of a worker that were sent; returns them."""
        queue = self._queues.pop(worker, ())
        for call in queue:
            del self._calls[call.future]
            self._heads.pop(call.future, None)
        return [call.work for call in queue]

    def clear(self) -> None:
        """Drops everything that is pending or kept; results are lost."""
        for worker in list(self._queues):
            self.drop(worker)
        self._backlog.clear()
        self._lost.clear()
        self._ended.clear()
        self._kept.clear()
        self._check_s = math.inf

    def _busy(self) -> set[int]:
        return {worker.index for worker in self._queues} | set(self._backlog)

    # ---- other threads --------------------------------------------------------------------------

    def stop_early(self, calls: Sequence[Pending], keep_steps: int) -> None:
        """Ends the fragments of calls once they have `keep_steps` steps; does not wait."""
        for call in calls:
            if not call.stopped:
                call.stopped = True
                call.worker.stop_early(call.number, keep_steps)

    def interrupt(self) -> None:
        """Makes the thread that waits raise `CallsInterrupted`. Pending calls end after their
        current step; their replies are kept, and waiting continues once `interrupted` is reset."""
        self.interrupted = True
        self.stop_all(1)

    def stop_all(self, keep_steps: int) -> None:
        """Ends the fragments of all pending calls once they have `keep_steps` steps."""
        self.stop_early(self.pending(), keep_steps)
        self._workers.local.stop_early(self._local_call, keep_steps)

    def kill_busy(self) -> None:
        """Kills the workers with pending calls, which do not answer. They are replaced when waiting
        continues."""
        for worker in {call.worker for call in self.pending()}:
            self._workers.ray.kill(worker.actor, no_restart=True)

    # ---- waiting --------------------------------------------------------------------------------

    def _follow_changes(self) -> None:
        """Sends work to workers that have come up; drops or reassigns that of removed ones."""
        self._drop_removed()
        self._changes = self._workers.changes
        if self._lost:
            lost, self._lost = self._lost, []
            self._reassign(lost)
        present = {worker.index: worker for worker in self._workers.remote}
        for index in list(self._backlog):
            if index in present:
                self._send_backlog(present[index])

    def _drop_removed(self) -> None:
        """Drops the calls of workers that were removed or replaced, and keeps the work that is to
        be sent again or reassigned."""
        if self._dropped == self._workers.changes:
            return
        self._dropped = self._workers.changes
        lost: list[Work] = []
        for worker in [worker for worker in self._queues if worker.removed]:
            lost += self.drop(worker)
        present = {worker.index: worker for worker in self._workers.remote}
        for index in [i for i in self._backlog if i and i not in present]:
            lost += self._backlog.pop(index)
        if self._after_failure == "reassign":
            self._lost += lost
        elif self._after_failure == "send again":
            for work in reversed(lost):
                if work.order[0] in present:
                    self._backlog.setdefault(work.order[0], deque()).appendleft(work)

    def _wait(self, timeout_s: float) -> None:
        """Waits until a call ends or a worker starts."""
        workers = self._workers
        refs = [*self._heads, *workers.starting] if workers.starting else list(self._heads)
        if workers.starting:
            timeout_s = min(timeout_s, START_CHECK_S)
            workers.check_starting()
        through_rpc = len(self._calls) > len(self._heads)
        if workers.rpc is None or not through_rpc:
            ready = workers.ray.wait(refs, num_returns=1, timeout=timeout_s)[0] if refs else []
        else:
            for ref in refs:
                workers.rpc.watch(ref)
            workers.rpc.poll(0.0 if self._ended else timeout_s)
            ready = workers.ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        for ref in ready:
            if ref in self._heads:
                self._ended.append(ref)
            elif ref in workers.starting:
                workers.note_started(ref)

    def _take_ended(self) -> Reply | None:
        """The reply of a call that has ended."""
        while self._ended:
            call = self._calls.get(self._ended.popleft())  # None: it was dropped
            if call is not None and self._queues[call.worker][0] is call:
                return self._arrive(call)
        return None

    def _arrive(self, call: Pending) -> Reply:
        worker, workers = call.worker, self._workers
        try:
            if isinstance(call.future, RpcFuture):
                answer = call.future.result()
            else:
                limit_s = workers.config.rollout.worker_timeout_s
                answer = workers.ray.get(call.future, timeout=limit_s)
        except BaseException as error:  # unpickling an answer can raise anything
            if is_of_signal(error):
                raise
            if isinstance(error, RayTaskError) and not isinstance(call.future, RpcFuture):
                # `RolloutWorker.run` itself does not raise.
                cause = error.cause if isinstance(error.cause, Exception) else error
                why = f"its arguments or its value cannot be pickled: {cause!r}"
                self._end(call)
                raise FunctionError(self._message(call.work, worker, why)) from None
            failure = WorkerFailure.from_error(worker.index, error)
            if failure.kind == "exception" and not failure.at_start:
                message = self._message(call.work, worker, failure.message)
                failure = failure._replace(message=message)
            return self._fail(call, failure)
        if not isinstance(answer, Answer) or not isinstance(answer.counts, Counts):
            return self._fail(call, self._odd(call, f"it is {type(answer).__name__}"))
        if isinstance(answer.error, CallError):
            return self._fail(call, self._failure(call, answer.error, answer.counts), answer.counts)
        if answer.error is not None:
            return self._fail(call, self._odd(call, f"its error is {type(answer.error).__name__}"))
        if self.check is not None:
            try:
                self.check(answer.value)
            except Exception as error:  # a check may meet any object
                return self._fail(call, self._odd(call, f"{type(error).__name__}: {error}"))
        TRACER.span(f"request {worker.index}", "request", call.sent_s)
        self.load.add(len(self._calls))
        self._end(call)
        worker.last_answer_s = workers.clock()
        if self._is_work:
            self._succeeded.add(call.work.code)
            workers.faults.success(worker.index)
        if answer.counts.env_statistics:
            workers.env_statistics[worker.index] = answer.counts.env_statistics
        self._send_backlog(worker)
        work = call.work
        return Reply(worker, answer.value, work.tag, answer.counts, work.order)

    def _end(self, call: Pending) -> None:
        """Removes the first call of a worker from what is pending."""
        del self._calls[call.future]
        self._heads.pop(call.future, None)
        queue = self._queues[call.worker]
        queue.popleft()
        if not queue:
            del self._queues[call.worker]
        elif not isinstance(queue[0].future, RpcFuture):
            self._heads[queue[0].future] = queue[0]
        elif queue[0].future.done:
            self._ended.append(queue[0].future)

    def _run_here(self, work: Work) -> Reply:
        """Runs work of the local worker; exceptions reach the user unchanged."""
        if not self._backlog[0]:
            del self._backlog[0]
        self._local_call = self._workers.next_call_number()
        here = self._workers.here
        args = tuple(self._weights_for(here) if a is WEIGHTS else a for a in work.args)
        value, counts = self._workers.local.run_here(self._local_call, work.function, *args)
        return Reply(here, value, work.tag, counts, work.order)

    # ---- failures -------------------------------------------------------------------------------

    def _failure(self, call: Pending, error: CallError, counts: Counts) -> WorkerFailure:
        """The failure of a worker whose answer is an error.

        Raises:
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: another worker would
                fail the same.
        """
        worker, work = call.worker, call.work
        if error.kind in _ENDING:
            self._workers.faults.add(worker.index, counts)
            self._end(call)
            raise _ENDING[error.kind](error.message)
        if error.kind == "environment":
            return WorkerFailure("environment", worker.index, error.message)
        message = self._message(work, worker, error.message)
        if error.kind == "function" or work.code not in self._succeeded:
            self._end(call)
            raise FunctionError(message)
        return WorkerFailure("exception", worker.index, message)

    def _message(self, work: Work, worker: WorkerHandle, why: str) -> str:
        """Names strategy, function, worker, policy and environment."""
        config = self._workers.config
        policy = getattr(config.policy, "actor", None) or config.policy_class
        policy_name = getattr(policy, "__name__", type(policy).__name__)
        return (
            f"{self._owner}: function {work.name} failed in {config.who} {worker.index} (policy "
            f"{policy_name!r}, environment {env_name(config.env)!r}): {why}"
        )

    def _odd(self, call: Pending, why: str) -> WorkerFailure:
        message = self._message(call.work, call.worker, f"its answer cannot be used: {why}")
        return WorkerFailure("exception", call.worker.index, message)

    def _fail(self, call: Pending, failure: WorkerFailure, counts: Counts | None = None) -> Reply:
        """Replaces a worker that has failed, and handles its work by the rule."""
        worker, work = call.worker, call.work
        if counts is not None:
            self.count([Reply(worker, None, work.tag, counts, work.order, failure)])
        lost = self.drop(worker)
        replacement = None if self.interrupted else self._workers.replace(worker, failure)
        if self._after_failure == "reassign":
            lost += self._backlog.pop(worker.index, ())
            if not self.interrupted:
                self._reassign(lost)
            elif lost:
                self._backlog.setdefault(worker.index, deque()).extend(lost)
        elif self._after_failure == "send again" and (replacement is not None or self.interrupted):
            self._backlog.setdefault(worker.index, deque()).extendleft(reversed(lost))
        elif worker.index in self._backlog and self._after_failure == "drop":
            del self._backlog[worker.index]
        return Reply(worker, None, work.tag, counts or Counts(), work.order, failure)

    def _reassign(self, lost: Sequence[Work]) -> None:
        """Each piece of work goes to the worker with the fewest that are left to do."""
        workers = {worker.index: worker for worker in self._workers.up()}
        self._changes = self._workers.changes
        left = {index: self.num_work_of(worker) for index, worker in workers.items()}
        for work in lost:
            index = min(left, key=lambda i: (left[i], i))
            left[index] += 1
            self._backlog.setdefault(index, deque()).append(work)
        for worker in workers.values():
            self._send_backlog(worker)

    # ---- deadlines ------------------------------------------------------------------------------

    def _timeout_s(self, work: Work) -> float:
        limit_s: float = self._workers.config.rollout.worker_timeout_s
        return limit_s if work.timeout_s is None else work.timeout_s

    def _deadline_s(self, call: Pending) -> float:
        return min(call.began_s + self._timeout_s(call.work), call.latest_s)

    def _overdue(self, now_s: float) -> Pending | None:
        """A call that is past its limit and has not ended. Of each worker only the oldest call
        counts: those behind it wait for it. Also computes when to check again."""
        firsts = [queue[0] for queue in self._queues.values()]
        late = [call for call in firsts if self._deadline_s(call) <= now_s]
        if late and self._workers.rpc is not None:
            self._workers.rpc.poll(0.0)
        for call in late:
            if isinstance(call.future, RpcFuture):
                ended = call.future.done
            else:
                # A result on another node counts as arrived before it is fetched.
                ended = bool(self._workers.ray.wait([call.future], timeout=0, fetch_local=False)[0])
            if not ended:
                return call
        self._check_s = min(
            (self._deadline_s(c) for c in firsts if c not in late), default=math.inf
        )
        if late:  # they have ended, but their results are not here yet
            self._check_s = min(self._check_s, now_s + 1.0)
        return None

    def _hang(self, call: Pending) -> WorkerFailure:
        silent_s = self._workers.clock() - call.began_s
        why = self._message(call.work, call.worker, f"no answer for {silent_s:.1f} s")
        return WorkerFailure("hang", call.worker.index, why)
