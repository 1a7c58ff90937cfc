"""`Answer`, which a process sends back for each call, and `CallError`, the error in an answer."""

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
    """The error that ended a call. The answer of the call contains this error.

    Attributes:
        kind: the kind of error.
            `function`: the worker cannot import the function, or cannot send the return value.
            `exception`: the function raised.
            `environment`: an environment keeps failing.
            `api`: an environment violates Gymnasium's API.
            `non_finite`: too many consecutive fragments, gradients or updates were not finite.
            `callback`: a user's callback raised.
        message: the cause, with a traceback that begins in the user's code.
    """

    kind: Literal["function", "exception", "environment", "api", "non_finite", "callback"]
    message: str

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
        return cls("exception", f"{type(error).__name__}: {error}\n{traceback_of(error)}")


#: Errors of these kinds end the run. The values are the exceptions that the driver then raises.
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
