"""`CallRunner`: an object in a process that runs calls, and its answers to these calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

from polopt.common.sums import SUMS
from polopt.metrics.record import Record
from polopt.rollouts.envs.env_errors import (
    EnvironmentAPIError,
    EnvironmentFailedError,
    traceback_of,
)
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.callbacks import CallbackError
from polopt.rollouts.workers.errors import FunctionError, NonFiniteError


class CallError(NamedTuple):
    """The error that ended a call. The answer of the call contains this error.

    Attributes:
        kind: the kind of error.
            `function`: the worker cannot unpickle the call, or cannot pickle the return value. A
            gradient worker also reports a FunctionError of its own calls with this kind.
            `exception`: the function raised an exception that has none of the other kinds.
            `environment`: an environment cannot be made, or keeps failing.
            `api`: an environment violates Gymnasium's API.
            `non_finite`: too many consecutive fragments, gradients or updates were not finite.
            `callback`: a user's callback raised, or returned a value that is not allowed.
        message: the cause. If the user's code raised, the message contains a traceback that begins
            in the user's code.
        raised: the text of the exception that the function raised, without its type and traceback.
            Empty for all kinds but `exception`.
    """

    kind: Literal["function", "exception", "environment", "api", "non_finite", "callback"]
    message: str
    raised: str = ""

    @classmethod
    def of(cls, error: Exception) -> CallError:
        """Returns the `CallError` for an exception that a function raised in this process."""
        match error:
            case EnvironmentAPIError():
                return cls("api", str(error))
            case EnvironmentFailedError():
                return cls("environment", str(error))
            case NonFiniteError():
                return cls("non_finite", str(error))
            case FunctionError():
                return cls("function", str(error))
            case CallbackError():
                return cls("callback", str(error))
        message = f"{type(error).__name__}: {error}\n{traceback_of(error)}"
        return cls("exception", message, str(error))


#: The kinds of errors that end the run in any case, each with the exception that the caller raises.
#: An error of kind `function` also ends the run: the caller raises FunctionError.
ENDING: dict[str, type[RuntimeError]] = {
    "api": EnvironmentAPIError,
    "non_finite": NonFiniteError,
    "callback": CallbackError,
}


class Answer(NamedTuple):
    """The answer of a process to one call.

    Attributes:
        value: return value of the function, or a reference to that value. None after an error.
        record: the counts of the call. After an error, these are the counts up to the error.
        error: the error that ended the call. None means that the function returned.
    """

    value: Any
    record: Record
    error: CallError | None = None


class CallRunner:
    """Runs the calls that arrive in a process, one at a time. A call runs `fn(self, *args)`.

        def count(shard, batch):             # a function of a strategy (a `PolicyOptimizer`)
            shard.rows += len(batch)
            return shard.rows

        runner.run(number, count, batch)     # -> Answer(value, record, error)

    Args:
        control: the page with requests to end a call early. None means that this object makes its
            own page, which other processes cannot write.
        clock: a function that returns the seconds of a monotonic clock.

    Attributes:
        state: the data that a strategy keeps in this process between calls. The strategy chooses
            the keys. Checkpoints do not contain the state. The state is empty at the start, and
            after a replacement of the process, a restore, or a reset of the trainer. When the state
            is cleared, values that have a method `close` are closed.
        record: counts of the current call.
        clock: see the argument.
        control: see the argument.
        leaves: True once the process has got SIGTERM. The process still answers its calls, and the
            record of each answer says that it leaves.
    """

    leaves = False

    def __init__(
        self, control: ControlPage | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.control = control or ControlPage()
        self.state: dict[str, Any] = {}
        self.record = Record(clock)
        # The numbers of the calls that run now. There can be more than one, because a gradient
        # worker can call itself while it runs a call of the driver.
        self._running: list[int] = []

    # ---- calls ----------------------------------------------------------------------------------

    def run(self, number: int, function: Callable[..., Any], *args: Any) -> Answer:
        """Runs a call from another process.

        Args:
            number: number of the call. A request to end the call early contains this number.
            function: the function, which runs as `function(self, *args)`.
            args: the further arguments.

        Returns:
            the value or the error of the call, and in both cases the record of the call.
        """
        self.record = Record(self.clock)
        SUMS.begin()
        value, failed = None, None
        with self._during(number):
            try:
                value = function(self, *args)
            except Exception as error:  # the user's code may raise anything
                failed = CallError.of(error)
        return self._answer(value, failed)

    def run_here(self, number: int, function: Callable[..., Any], *args: Any) -> Answer:
        """Runs a call from this process itself. Exceptions of the function pass through to the
        caller unchanged."""
        outer, self.record = self.record, Record(self.clock)
        try:
            with self._during(number):
                value = function(self, *args)
            return self._answer(value)
        finally:
            self.record = outer

    def refuse(self, why: str) -> Answer:
        """Returns the answer to a call that this process cannot run, or whose value this process
        cannot send."""
        self.record = Record(self.clock)
        return self._answer(None, CallError("function", why))

    def _answer(self, value: Any, error: CallError | None = None) -> Answer:
        record = self.record
        if SUMS.broken:
            record.timing["sums"] = SUMS.done
        if self.leaves:
            record.timing["leaves"] = True
        self.complete(record)
        record.end(self.version, value)
        return Answer(value, record, error)

    def complete(self, record: Record) -> None:
        """Called at the end of each call. A subclass can add data to the record here."""
        return

    @property
    def version(self) -> int:
        """Version of the weights in this process. 0 if the process has no weights."""
        return 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of the current call: `with worker.phase("learn"): ...`.

        Results report the share of the phases that every strategy has, such as `sample` and
        `learn`, and of the strategy's `worker_phases`. All other time of a call is reported as
        `other`."""
        return self.record.phase(name)

    # ---- early stops ----------------------------------------------------------------------------

    @contextmanager
    def _during(self, number: int) -> Iterator[None]:
        self._running.append(number)
        try:
            yield
        finally:
            self._running.pop()

    def stop_after(self) -> int | None:
        """Returns the number of steps after which fragments of the current call should end. None
        means that they should not end early. If calls run inside of each other, the smallest number
        that was requested applies. Any thread may call this method."""
        smallest = None
        for number in self._running:
            steps = self.control.keep_steps(number)
            if steps is not None and (smallest is None or steps < smallest):
                smallest = steps
        return smallest

    # ---- state and end --------------------------------------------------------------------------

    def clear_state(self) -> None:
        """Empties `state`, and closes the values that have a method `close`."""
        kept, self.state = self.state, {}
        for value in kept.values():
            if hasattr(value, "close"):
                value.close()

    def remade(self, *args: Any, control: ControlPage) -> Any:
        """Stops this object, and returns a new object of the same class that replaces it in this
        process.

        Args:
            args: arguments of the constructor.
            control: argument of the constructor.
        """
        self.stop()
        kind: Any = type(self)  # `Any`, because the constructors of subclasses have other arguments
        return kind(*args, control=control)

    def stop(self) -> None:
        """Clears `state`. A subclass also closes the resources that it has opened."""
        self.clear_state()
