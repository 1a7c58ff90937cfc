"""Exceptions that end a run."""

from __future__ import annotations


class FunctionError(RuntimeError):
    """A call to a worker has failed, and would probably fail in every worker. For example, the
    function raised before it had succeeded in any worker, or an argument cannot be pickled. The
    message names the function and the owner of the call, such as a strategy (the optimizer of a
    run). If the function raised, the message ends with the user's traceback.

    Attributes:
        raised: the text of the exception that the function raised, without its type and traceback.
            Empty if the function raised no exception.
    """

    def __init__(self, message: str, raised: str = "") -> None:
        super().__init__(message)
        self.raised = raised


class NonFiniteError(RuntimeError):
    """Too many consecutive fragments, gradients or updates were not finite. The message names the
    worker, or the driver."""


class WorkersFailedError(RuntimeError):
    """Too many consecutive calls to workers failed, or no worker can be made, or fewer workers
    remain than the run needs, or workers cannot form a group for all-reduce. If a failure is the
    cause, the message contains it."""
