"""`Answer`: what a process sends back for one call, and `CallError`, if the call failed."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from polopt.metrics.record import Record
from polopt.rollouts.envs.env_errors import (
    EnvironmentAPIError,
    EnvironmentFailedError,
    traceback_of,
)
from polopt.rollouts.workers.callbacks import CallbackError
from polopt.rollouts.workers.errors import FunctionError, NonFiniteError


class CallError(NamedTuple):
    """The error that ended a call. The answer of the call carries it.

    Attributes:
        kind: `function`: the function cannot be imported in the worker, or its value cannot be
            sent. `exception`: the function raised. `environment`: an environment keeps failing.
            `api`: an environment breaks Gymnasium's API. `non_finite`: too much data in a row was
            not finite. `callback`: a user's callback raised.
        message: the cause, with a traceback that begins in the user's code.
    """

    kind: Literal["function", "exception", "environment", "api", "non_finite", "callback"]
    message: str

    @classmethod
    def of(cls, error: Exception) -> CallError:
        """From an exception that a function raised in this process."""
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
        return cls("exception", f"{type(error).__name__}: {error}\n{traceback_of(error)}")


#: Errors of a call that end the run as they are, by the kind of the `CallError`.
ENDING: dict[str, type[RuntimeError]] = {
    "api": EnvironmentAPIError,
    "non_finite": NonFiniteError,
    "callback": CallbackError,
}


class Answer(NamedTuple):
    """What a process sends back for one call.

    Attributes:
        value: return value of the function, or a reference to it. None after an error.
        record: what the call counted, up to the error if there was one.
        error: what ended the call. None: it returned.
    """

    value: Any
    record: Record
    error: CallError | None = None
