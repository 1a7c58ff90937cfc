"""`Supervisor`: deadlines of calls, what a failed call means, and what becomes of its process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from polopt.common.progress import PROGRESS
from polopt.metrics.record import Record
from polopt.rollouts.transport.channel import (
    ChannelError,
    Function,
    LostReferenceError,
    Ticket,
    UndecodableAnswerError,
    UnsendableError,
)
from polopt.rollouts.workers.answer import ENDING, Answer, CallError
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.fault_log import WorkerFailure
from polopt.rollouts.workers.process_group import ProcessGroup, failure_of
from polopt.rollouts.workers.worker_handle import WorkerHandle


class Work(NamedTuple):
    """One call, from `Calls.send` until it has been answered or dropped.

    Attributes:
        function: to run.
        args: its arguments, `WEIGHTS` among them.
        tag: returned with the reply.
        timeout_s: time limit. None: `worker_timeout_s`.
        order: place of its reply in `Calls.all`: index of the worker it was first sent to, and
            number of the call.
        by_reference: see `Message`.
    """

    function: Function
    args: tuple[Any, ...]
    tag: Any
    timeout_s: float | None
    order: tuple[int, int]
    by_reference: bool = False

    @property
    def name(self) -> str:
        """Name of the function in messages, with its module."""
        function = self.function
        name = getattr(function, "__qualname__", None) or repr(function)
        return f"{getattr(function, '__module__', '?')}.{name}"

    @property
    def code(self) -> Any:
        """What tells functions apart. Two lambdas have the same name, but not the same code. A
        lambda that is made again for each call has the same code each time. For a
        `functools.partial`, this is the code of the wrapped function. For a callable object, it is
        the code of its class."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        called = function if hasattr(function, "__code__") else type(function).__call__
        return getattr(called, "__code__", self.name)


@dataclass(slots=True, eq=False)
class Pending:
    """A call that was sent and has not been answered.

    Attributes:
        work: what was sent.
        worker: the process that runs it.
        number: number of the call, for `stop_early`.
        ticket: of the channel.
        version: version of the driver's weights when it was sent.
        sent_s: time at which it was sent.
        progress_s: time at which its process made progress, as far as the supervisor has looked.
        latest_s: its deadline at the latest, whatever progress there is.
        stopped: its fragments end early.
    """

    work: Work
    worker: WorkerHandle
    number: int
    ticket: Ticket
    version: int
    sent_s: float
    progress_s: float = -math.inf
    latest_s: float = math.inf
    stopped: bool = False

    @property
    def began_s(self) -> float:
        """Latest time at which the worker can have begun this call. A worker begins a call when it
        is sent, or when it has answered the call before. Only valid for its oldest call."""
        return max(self.sent_s, self.worker.last_answer_s or 0.0)


class Supervisor:
    """Decides when a call has failed, why, and whether its process is replaced.

    A process has failed when it died, when it makes no progress for the time limit of its call, and
    when a call raised after the same function had succeeded before. Progress is a step of an
    environment, or the beginning or end of a phase. A process that waits for others, such as a
    gradient worker, makes progress when they do. A function that raises before it has succeeded
    in any process is wrong: that is a `FunctionError`, which ends the run.

    Args:
        groups: the processes, by `ProcessGroup.who`.
        owner: strategy or other owner of the calls, for messages.
        is_work: the calls do the strategy's work, so their success resets the count of consecutive
            failures. False for questions, such as for a state, which also a process with broken
            environments answers.
        check: raises an exception for a value that the owner cannot use: its process has failed.

    Attributes:
        check_s: no deadline is earlier.
        check: raises for a value that the owner cannot use.
    """

    def __init__(
        self,
        groups: Mapping[str, ProcessGroup],
        owner: str,
        is_work: bool,
        check: Callable[[Any], None] | None,
    ) -> None:
        self._groups = groups
        first = next(iter(groups.values()))
        self._clock, self._transport = first.clock, first.transport
        self._owner = owner
        self._is_work = is_work
        self.check = check
        self._succeeded: set[Any] = set()  # code of functions that have, in any process
        self.check_s = math.inf

    # ---- deadlines ------------------------------------------------------------------------------

    def timeout_s(self, call: Pending) -> float:
        """Time limit of a call without progress."""
        limit_s = self._groups[call.worker.who].options.worker_timeout_s
        return limit_s if call.work.timeout_s is None else call.work.timeout_s

    def sent(self, call: Pending) -> None:
        """Notes a call that was sent."""
        self.check_s = min(self.check_s, call.sent_s + self.timeout_s(call))

    def tighten(self, calls: Iterable[Pending], within_s: float) -> None:
        """Limits calls to `within_s` seconds from now, unless their limit is earlier."""
        latest_s = self._clock() + within_s
        for call in calls:
            call.latest_s = min(call.latest_s, latest_s)
        self.check_s = min(self.check_s, latest_s)

    def _deadline_s(self, call: Pending) -> float:
        last_s = max(call.began_s, call.progress_s)
        return min(last_s + self.timeout_s(call), call.latest_s)

    def overdue(self, oldest: list[Pending], now_s: float) -> Pending | None:
        """A call that is past its limit and has not ended. Also computes when to look again.

        Args:
            oldest: the oldest call of each process: those behind it wait for it.
            now_s: time of the group's clock.
        """
        late = []
        for call in oldest:
            if self._deadline_s(call) > now_s:
                continue
            if now_s < call.latest_s:
                silent_s = call.worker.channel.silent_s()
                if silent_s is not None:
                    call.progress_s = now_s - silent_s
                    PROGRESS.note_of_other(silent_s)
            if self._deadline_s(call) <= now_s:
                late.append(call)
        for call in late:
            # A result on another node counts as arrived before it is fetched.
            if not call.ticket.ended() and not self._transport.wait([call.ticket], 0.0):
                return call
        deadlines = [self._deadline_s(call) for call in oldest if call not in late]
        self.check_s = min(deadlines, default=math.inf)
        if late:  # they have ended, but their results are not here yet
            self.check_s = min(self.check_s, now_s + 1.0)
        return None

    def hang(self, call: Pending) -> WorkerFailure:
        """The failure of a process that makes no progress, or does not answer in time."""
        now_s, own_s = self._clock(), call.work.timeout_s
        if now_s >= call.latest_s:
            why = f"no answer for {now_s - call.began_s:.1f} s, longer than others wait for it"
        else:
            limit = (
                self._groups[call.worker.who].describe_hang()
                if own_s is None
                else f"limit of this call: {own_s:g} s"
            )
            silent_s = now_s - max(call.began_s, call.progress_s)
            why = f"no answer and no progress for {silent_s:.1f} s ({limit})"
        return WorkerFailure("hang", call.worker.index, self.message(call.work, call.worker, why))

    # ---- answers --------------------------------------------------------------------------------

    def judge(self, call: Pending) -> Answer | WorkerFailure | tuple[WorkerFailure, Record]:
        """The answer of a call that has ended. Or the failure of its process, with what the call
        has counted if it answered.

        Raises:
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: another process would
                fail the same.
            Exception: what a function in this process raised, unchanged.
        """
        worker, work = call.worker, call.work
        group = self._groups[worker.who]
        PROGRESS.note()
        try:
            answer = call.ticket.result(group.options.worker_timeout_s)
        except UnsendableError as error:
            raise FunctionError(self.message(work, worker, str(error))) from None
        except LostReferenceError as error:
            return WorkerFailure("reference", worker.index, self.message(work, worker, str(error)))
        except ChannelError as error:
            failure = failure_of(worker.index, error)
            if isinstance(error, UndecodableAnswerError):
                failure = failure._replace(message=self.message(work, worker, failure.message))
            return failure
        if not isinstance(answer, Answer) or not isinstance(answer.record, Record):
            return self._odd(call, f"it is {type(answer).__name__}")
        if isinstance(answer.error, CallError):
            return self._of_error(call, answer.error, answer.record), answer.record
        if answer.error is not None:
            return self._odd(call, f"its error is {type(answer.error).__name__}")
        if self.check is not None:
            try:
                self.check(answer.value)
            except Exception as error:  # a check may meet any object
                if call.ticket.reraises:
                    raise
                return self._odd(call, f"{type(error).__name__}: {error}")
        if self._is_work:
            self._succeeded.add(work.code)
            group.faults.success(worker.index)
        return answer

    def _of_error(self, call: Pending, error: CallError, record: Record) -> WorkerFailure:
        worker, work = call.worker, call.work
        if error.kind in ENDING:
            self._groups[worker.who].faults.add(worker.index, record)
            raise ENDING[error.kind](error.message)
        if error.kind == "environment":
            return WorkerFailure("environment", worker.index, error.message)
        message = self.message(work, worker, error.message)
        if error.kind == "function" or work.code not in self._succeeded:
            raise FunctionError(message)
        return WorkerFailure("exception", worker.index, message)

    def _odd(self, call: Pending, why: str) -> WorkerFailure:
        message = self.message(call.work, call.worker, f"its answer cannot be used: {why}")
        return WorkerFailure("exception", call.worker.index, message)

    def message(self, work: Work, worker: WorkerHandle, why: str) -> str:
        """Names strategy, function and process."""
        place = self._groups[worker.who].place_of(worker)
        return f"{self._owner}: function {work.name} failed in {place}: {why}"
