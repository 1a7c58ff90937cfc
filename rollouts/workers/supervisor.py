"""`Supervisor`: watches the deadlines of calls, and decides which calls have failed and why."""

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
    """One piece of work for a worker, from `Calls.send` until the work was answered or dropped.

    Attributes:
        function: the function that the worker runs.
        args: the arguments of the function. They may include `WEIGHTS`.
        tag: any value. The reply carries this value.
        timeout_s: seconds that the call may take without progress. None means `worker_timeout_s`.
        order: the key by which `Calls.all` sorts replies. It consists of the index of the worker to
            which the work was first sent, and of a serial number.
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
        """The name of the function in messages, with the name of its module."""
        function = self.function
        name = getattr(function, "__qualname__", None) or repr(function)
        return f"{getattr(function, '__module__', '?')}.{name}"

    @property
    def code(self) -> Any:
        """The code of the function, which identifies the function.

        The name does not suffice, because two lambdas have the same name. The function object does
        not suffice, because a strategy may make a new lambda with the same code for each call. For
        a `functools.partial`, this is the code of the wrapped function. For a callable object, it
        is the code of its `__call__`. For a function without Python code, it is the name."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        called = function if hasattr(function, "__code__") else type(function).__call__
        return getattr(called, "__code__", self.name)


@dataclass(slots=True, eq=False)
class Pending:
    """A call that was sent and has no answer yet.

    Attributes:
        work: the work that was sent.
        worker: the process that runs the call.
        number: number of the call. A request to end the call early contains this number.
        ticket: the ticket that the channel returned.
        version: version of the driver's weights when the call was sent.
        sent_s: time at which the call was sent.
        progress_s: the last time at which the process made progress, as far as the supervisor
            knows.
        latest_s: a deadline that progress does not extend.
        keep_steps: the number of steps in the last request to end the fragments of this call early.
            Infinite without such a request.
    """

    work: Work
    worker: WorkerHandle
    number: int
    ticket: Ticket
    version: int
    sent_s: float
    progress_s: float = -math.inf
    latest_s: float = math.inf
    keep_steps: float = math.inf

    @property
    def began_s(self) -> float:
        """The time at which the worker began this call, as far as the driver knows. This is the
        time at which the call was sent, or the later time at which the answer to the previous call
        arrived. Only valid for the oldest call of a worker."""
        return max(self.sent_s, self.worker.last_answer_s or 0.0)


class Supervisor:
    """Decides which calls have failed and why, and whether their processes have failed, too.

    A process has failed in each of these cases:

    - The process died, or the connection to it ended.
    - The process made no progress within the time limit of its call. Progress is a step of an
      environment, or the beginning or end of a phase. A process that waits for other processes,
      such as a gradient worker, makes progress when the other processes do.
    - The process did not answer before a deadline that progress does not extend (`tighten`).
    - A call raised an exception, although the same function had succeeded before in some process.
    - An environment in the process cannot be made, or keeps failing.
    - The driver cannot use the answer of the process, or could not fetch it in time.

    If a function raises before it has ever succeeded, the supervisor assumes that the function is
    wrong. The supervisor then raises FunctionError, which ends the run.

    Args:
        groups: the groups of processes, by `ProcessGroup.who`.
        owner: name of the owner of the calls, such as a strategy (the optimizer of a run), for
            error messages.
        is_work: True if the calls do the strategy's work. A success then resets the count of
            consecutive failures. False for calls that, for example, only read a state, because a
            process with broken environments can answer such calls, too. The supervisor also does
            not remember which functions succeeded in such calls, so an error of kind `exception`
            always raises FunctionError.
        check: a function that raises an exception for a value that the owner cannot use. The
            process that returned such a value has failed.

    Attributes:
        check_s: the time at which the supervisor next checks deadlines.
        check: see the argument.
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
        self._succeeded: set[Any] = set()  # `Work.code` of functions that succeeded in a process
        self.check_s = math.inf

    # ---- deadlines ------------------------------------------------------------------------------

    def timeout_s(self, call: Pending) -> float:
        """Returns the seconds that a call may take without progress."""
        limit_s = self._groups[call.worker.who].options.worker_timeout_s
        return limit_s if call.work.timeout_s is None else call.work.timeout_s

    def watch(self, call: Pending) -> None:
        """Makes sure that the deadline of a call is checked in time. `Calls` uses this method when
        it sends a call, and when a call becomes the oldest call of its worker."""
        self.check_s = min(self.check_s, self._deadline_s(call))

    def tighten(self, calls: Iterable[Pending], within_s: float) -> None:
        """Shortens the deadlines of calls to `within_s` seconds from now. Deadlines that are
        already earlier stay unchanged."""
        latest_s = self._clock() + within_s
        for call in calls:
            call.latest_s = min(call.latest_s, latest_s)
        self.check_s = min(self.check_s, latest_s)

    def _deadline_s(self, call: Pending) -> float:
        last_s = max(call.began_s, call.progress_s)
        return min(last_s + self.timeout_s(call), call.latest_s)

    def overdue(self, oldest: list[Pending], now_s: float) -> Pending | None:
        """Returns a call that is past its deadline and has not ended. If no such call exists,
        updates `check_s` and returns None.

        Args:
            oldest: the oldest call of each process. The other calls of a process have not begun.
            now_s: the time now, on the clock of the groups.
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
            # A call whose result is still on another node has also ended.
            if not call.ticket.ended() and not self._transport.wait([call.ticket], 0.0):
                return call
        deadlines = [self._deadline_s(call) for call in oldest if call not in late]
        self.check_s = min(deadlines, default=math.inf)
        if late:  # these calls have ended, but their results have not arrived at this process
            self.check_s = min(self.check_s, now_s + 1.0)
        return None

    def hang(self, call: Pending) -> WorkerFailure:
        """Returns the failure of a process that made no progress, or did not answer in time."""
        now_s, own_s = self._clock(), call.work.timeout_s
        if now_s >= call.latest_s:
            why = (
                f"no answer for {now_s - call.began_s:.1f} s, and other processes that waited for "
                "this process timed out"
            )
        else:
            limit = (
                self._groups[call.worker.who].describe_hang(call.worker)
                if own_s is None
                else f"limit of this call: {own_s:g} s"
            )
            silent_s = now_s - max(call.began_s, call.progress_s)
            why = f"no answer and no progress for {silent_s:.1f} s ({limit})"
        return WorkerFailure("hang", call.worker.index, self.message(call.work, call.worker, why))

    # ---- answers --------------------------------------------------------------------------------

    def judge(self, call: Pending) -> Answer | WorkerFailure | tuple[WorkerFailure, Record]:
        """Decides whether a call that has ended succeeded.

        Returns:
            the answer of a call that succeeded, or the failure of a call that failed. If the
            process has returned a `CallError`, both the failure and the record of the call.

        Raises:
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: the call failed with
                an error that ends the run. See `CallError`.
            Exception: the unchanged exception of a function that ran in this process, or of `check`
                for the value of this function.
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
            except Exception as error:  # the value is any object, so a check can raise anything
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
            raise FunctionError(message, error.raised)
        return WorkerFailure("exception", worker.index, message)

    def _odd(self, call: Pending, why: str) -> WorkerFailure:
        message = self.message(call.work, call.worker, f"its answer cannot be used: {why}")
        return WorkerFailure("exception", call.worker.index, message)

    def message(self, work: Work, worker: WorkerHandle, why: str) -> str:
        """Returns the error message of a call. The message names the owner of the call, the
        function and the process."""
        place = self._groups[worker.who].place_of(worker)
        return f"{self._owner}: function {work.name} failed in {place}: {why}"
