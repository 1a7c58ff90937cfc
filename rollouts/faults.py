"""Failures of workers: what kinds there are, how many of each, and when it is too many."""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

import ray

logger = logging.getLogger("polopt")

FailureKind = Literal["death", "hang", "exception"]


class WorkerFailure(NamedTuple):
    """One failed call to a worker.

    Attributes:
        kind: `death` of its process, `hang` (no answer within the limit), or an `exception` that
            the environment or the policy raised.
        worker_index: whose call it was.
        message: what is known, the worker's traceback included.
    """

    kind: FailureKind
    worker_index: int
    message: str

    @classmethod
    def from_error(cls, worker_index: int, error: Exception) -> WorkerFailure:
        """From what `ray.get` raised."""
        if isinstance(error, ray.exceptions.RayTaskError):
            return cls("exception", worker_index, str(error))
        if isinstance(error, ray.exceptions.GetTimeoutError):
            return cls("hang", worker_index, "its answer could not be fetched in time")
        return cls("death", worker_index, str(error).strip() or type(error).__name__)


class WorkersFailedError(RuntimeError):
    """Too many calls to workers failed in a row; the message holds the last failure."""


class FaultLog:
    """Counts failures, logs each in one line, and ends the run when they do not stop.

    Args:
        max_consecutive_failures: so many without a success in between are too many.
    """

    def __init__(self, max_consecutive_failures: int) -> None:
        self._limit = max_consecutive_failures
        self._consecutive = 0
        self.counts: dict[FailureKind, int] = {"death": 0, "hang": 0, "exception": 0}
        self.num_restarts = 0
        self.last: WorkerFailure | None = None

    def success(self) -> None:
        """A call succeeded: the failures before it were not the beginning of the end."""
        self._consecutive = 0

    def failure(self, failure: WorkerFailure) -> None:
        """Counts and logs a failure.

        Raises:
            WorkersFailedError: if it is one too many in a row.
        """
        self.counts[failure.kind] += 1
        self.last = failure
        self._consecutive += 1
        if self._consecutive >= self._limit:
            raise WorkersFailedError(
                f"{self._consecutive} calls to workers failed in a row, without one success in "
                f"between (max_consecutive_failures={self._limit}). The last, of worker "
                f"{failure.worker_index} ({failure.kind}):\n{failure.message}"
            )
        last_line = failure.message.strip().splitlines()[-1] if failure.message.strip() else ""
        logger.warning(
            "worker %d: %s; it is replaced. %s", failure.worker_index, failure.kind, last_line
        )

    def stats(self) -> dict[str, Any]:
        """For the `fault_tolerance/` result keys."""
        return {
            "num_remote_worker_restarts": self.num_restarts,
            "num_worker_deaths": self.counts["death"],
            "num_worker_hangs": self.counts["hang"],
            "num_worker_exceptions": self.counts["exception"],
            "last_failed_worker": self.last.worker_index if self.last else 0,
            "last_failure": self.last.message[-2000:] if self.last else "",
        }
