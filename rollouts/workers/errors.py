"""Exceptions that end a run, and `InARow`, which raises them."""

from __future__ import annotations


class FunctionError(RuntimeError):
    """A function that a strategy runs in workers is wrong, and would fail in every worker. The
    message names the strategy and the function, and ends with the user's traceback."""


class NonFiniteError(RuntimeError):
    """Too many fragments or updates in a row were not finite. The message names the worker."""


class WorkersFailedError(RuntimeError):
    """Too many consecutive calls to workers failed. The message holds the last failure."""


class InARow:
    """Counts, for each kind of data, how many in a row were not finite, up to a limit.

        finite = InARow("worker 1", limit=5)
        finite.note("gradients", "")                  # finite: the count begins again
        finite.note("gradients", "norm is NaN")       # raises NonFiniteError for the fifth in a row

    Args:
        who: the owner of the data, for messages.
        limit: `max_consecutive_non_finite`.
    """

    def __init__(self, who: str, limit: int) -> None:
        self._who = who
        self._limit = limit
        self._counts: dict[str, int] = {}

    def note(self, kind: str, problem: str) -> None:
        """Notes data of a kind, such as `gradients`.

        Args:
            kind: kind of the data.
            problem: says what was not finite. Empty if everything was finite.

        Raises:
            NonFiniteError: the number in a row that was not finite has reached the limit.
        """
        if not problem:
            self._counts.pop(kind, None)
            return
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count >= self._limit:
            raise NonFiniteError(
                f"{self._who}: {count} {kind} in a row held non-finite values "
                f"(max_consecutive_non_finite={self._limit}). The last: {problem}"
            )


class RerunDifference(RuntimeError):
    """A rerun differs from the recorded run. The message is one sentence.

    Attributes:
        event: number of the event at which they differ.
    """

    def __init__(self, event: int, message: str) -> None:
        super().__init__(message)
        self.event = event
