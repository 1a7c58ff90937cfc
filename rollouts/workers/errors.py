"""Exceptions that end a run, and `InARow`, which raises `NonFiniteError`."""

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


class InARow:
    """Counts consecutive non-finite fragments, gradients and updates, and raises at a limit.

        finite = InARow("worker 1", limit=5)
        finite.note("gradients", "")                  # finite: the count is 0 again
        finite.note("gradients", "norm is NaN")       # the fifth in a row raises NonFiniteError

    Args:
        who: the worker or driver that made the data, for error messages.
        limit: the number of consecutive non-finite data of one kind at which `note` raises
            (`max_consecutive_non_finite`).
    """

    def __init__(self, who: str, limit: int) -> None:
        self._who = who
        self._limit = limit
        self._counts: dict[str, int] = {}

    def note(self, kind: str, problem: str) -> None:
        """Counts one fragment, gradient or update.

        Args:
            kind: the kind of data, such as `gradients`. Each kind has its own count.
            problem: says which value was not finite. Empty if all values were finite.

        Raises:
            NonFiniteError: the number of consecutive non-finite data of this kind has reached the
                limit.
        """
        if not problem:
            self._counts.pop(kind, None)
            return
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count >= self._limit:
            raise NonFiniteError(
                f"{self._who}: {count} {kind} in a row held non-finite values "
                f"(max_consecutive_non_finite={self._limit}). The last problem: {problem}"
            )
