"""`Supervisor`: watches the deadlines of calls, and decides which calls have failed and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polopt.common.faults import Fault
from polopt.common.progress import PROGRESS
from polopt.metrics.record import Record
from polopt.rollouts.transport.channel import (
    ChannelError,
    LostReferenceError,
    UndecodableAnswerError,
    UnsendableError,
)
from polopt.rollouts.workers.call import Call
from polopt.rollouts.workers.call_runner import ENDING, Answer, CallError
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.process_group import ProcessGroup, failure_of


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

    Attributes:
        check_s: the time at which the supervisor next checks deadlines.
    """

    def __init__(
        self,
        groups: Mapping[str, ProcessGroup],
        owner: str,
        is_work: bool,
    ) -> None:
        self._groups = groups
        first = next(iter(groups.values()))
        self._clock, self._transport = first.clock, first.transport
        self._owner = owner
        self._is_work = is_work
        self._succeeded: set[Any] = set()  # `Call.code` of functions that succeeded in a process
        self.check_s = math.inf

    # ---- deadlines ------------------------------------------------------------------------------

    def timeout_s(self, call: Call) -> float:
        """Returns the seconds that a call may take without progress."""
        limit_s = self._groups[call.worker.who].options.worker_timeout_s
        return limit_s if call.timeout_s is None else call.timeout_s

    def watch(self, call: Call) -> None:
        """Makes sure that the deadline of a call is checked in time. `Calls` uses this method when
        it sends a call, and when a call becomes the oldest call of its worker."""
        self.check_s = min(self.check_s, self._deadline_s(call))

    def tighten(self, calls: Iterable[Call], within_s: float) -> None:
        """Shortens the deadlines of calls to `within_s` seconds from now. Deadlines that are
        already earlier stay unchanged."""
        latest_s = self._clock() + within_s
        for call in calls:
            call.latest_s = min(call.latest_s, latest_s)
        self.check_s = min(self.check_s, latest_s)

    def _deadline_s(self, call: Call) -> float:
        last_s = max(call.began_s, call.progress_s)
        return min(last_s + self.timeout_s(call), call.latest_s)

    def overdue(self, oldest: list[Call], now_s: float) -> Call | None:
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

    def hang(self, call: Call) -> Fault:
        """Returns the failure of a process that made no progress, or did not answer in time."""
        now_s, own_s = self._clock(), call.timeout_s
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
        return Fault("hang", self.message(call, why))

    # ---- answers --------------------------------------------------------------------------------

    def judge(
        self, call: Call, check: Callable[[Any], None] | None
    ) -> Answer | Fault | tuple[Fault, Record]:
        """Decides whether a call that has ended succeeded.

        Args:
            call: the call.
            check: a function that raises an exception for a value that the owner cannot use. The
                process that returned such a value has failed.

        Returns:
            the answer of a call that succeeded, or the failure of a call that failed. If the
            process has returned a `CallError`, both the failure and the record of the call.

        Raises:
            FunctionError, NonFiniteError, EnvironmentAPIError, CallbackError: the call failed with
                an error that ends the run. See `CallError`.
            Exception: the unchanged exception of a function that ran in this process, or of `check`
                for the value of this function.
        """
        handle = call.worker
        group = self._groups[handle.who]
        PROGRESS.note()
        try:
            answer = call.ticket.result(group.options.worker_timeout_s)
        except UnsendableError as error:
            raise FunctionError(self.message(call, str(error))) from None
        except LostReferenceError as error:
            return Fault("reference", self.message(call, str(error)))
        except ChannelError as error:
            failure = failure_of(error)
            if isinstance(error, UndecodableAnswerError):
                failure = dataclasses.replace(failure, message=self.message(call, failure.message))
            return failure
        if not isinstance(answer, Answer) or not isinstance(answer.record, Record):
            return self._odd(call, f"it is {type(answer).__name__}")
        if isinstance(answer.error, CallError):
            return self._of_error(call, answer.error, answer.record), answer.record
        if answer.error is not None:
            return self._odd(call, f"its error is {type(answer.error).__name__}")
        if check is not None:
            try:
                check(answer.value)
            except Exception as error:  # the value is any object, so a check can raise anything
                if call.ticket.reraises:
                    raise
                return self._odd(call, f"{type(error).__name__}: {error}")
        if self._is_work:
            self._succeeded.add(call.code)
            group.faults.success(handle.index)
        return answer

    def _of_error(self, call: Call, error: CallError, record: Record) -> Fault:
        handle = call.worker
        if error.kind in ENDING:
            self._groups[handle.who].faults.add(handle.index, record)
            raise ENDING[error.kind](error.message)
        if error.kind == "environment":
            return Fault("environment", error.message)
        message = self.message(call, error.message)
        if error.kind == "function" or call.code not in self._succeeded:
            raise FunctionError(message, error.raised)
        return Fault("exception", message)

    def _odd(self, call: Call, why: str) -> Fault:
        message = self.message(call, f"its answer cannot be used: {why}")
        return Fault("exception", message)

    def message(self, call: Call, why: str) -> str:
        """Returns the error message of a call. The message names the owner of the call, the
        function and the process."""
        place = self._groups[call.worker.who].place_of(call.worker)
        return f"{self._owner}: function {call.name} failed in {place}: {why}"
