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
