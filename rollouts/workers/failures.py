"""Failures of workers: what kinds there are, how many of each, and when it is too many."""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

import ray

from polopt.common.data_faults import DataFaults
from polopt.rollouts.envs.errors import EnvironmentAPIError, EnvironmentFailedError
from polopt.rollouts.transport.rpc_future import UndecodableAnswerError
from polopt.rollouts.workers.data_fault_log import DataFaultLog

logger = logging.getLogger("polopt")

FailureKind = Literal["death", "hang", "exception", "environment"]
_PLURALS: dict[FailureKind, str] = {
    "death": "deaths",
    "hang": "hangs",
    "exception": "exceptions",
    "environment": "environment_failures",
}
_KINDS = tuple(_PLURALS)


class WorkerFailure(NamedTuple):
    """One failed call to a worker.

    Attributes:
        kind: `death` of its process, `hang` (no answer within the limit), an `exception` that was
            raised in it, or an `environment` that failed over and over.
        worker_index: whose call it was.
        message: what is known, the worker's traceback included.
        unrecoverable: another worker would fail the same way.
    """

    kind: FailureKind
    worker_index: int
    message: str
    unrecoverable: bool = False

    @classmethod
    def from_error(cls, worker_index: int, error: Exception) -> WorkerFailure:
        """From what `ray.get` raised."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, EnvironmentFailedError):  # with the environment's traceback, not Ray's
            unrecoverable = isinstance(cause, EnvironmentAPIError)
            return cls("environment", worker_index, str(cause), unrecoverable)
        if isinstance(error, ray.exceptions.RayTaskError | UndecodableAnswerError):
            return cls("exception", worker_index, str(error))
        if isinstance(error, ray.exceptions.GetTimeoutError):
            return cls("hang", worker_index, "its answer could not be fetched in time")
        return cls("death", worker_index, str(error).strip() or type(error).__name__)


class WorkersFailedError(RuntimeError):
    """Too many calls to workers failed in a row; the message holds the last failure."""


class FaultLog:
    """Counts failures, logs each in one line, and ends the run when they do not stop.

    When all workers die at the same moment that is one event, however many they are, and no sign
    that others would not do. So failures of workers that have worked since they last failed count
    as one in a row; those of workers that have not, as one each.

    Args:
        max_consecutive_failures: so many in a row without a success in between are too many.
        max_consecutive_non_finite: see `DataFaultLog`.

    Attributes:
        fragments: likewise of faults that cost less than a worker.
        counts: failures by kind.
        num_restarts: workers that were started in another's place.
        num_given_up: workers that failed too often and were not replaced.
        last: the last failure.
    """

    def __init__(self, max_consecutive_failures: int, max_consecutive_non_finite: int = 5) -> None:
        self._limit = max_consecutive_failures
        self._consecutive = 0
        self._of_worker: dict[int, int] = {}  # failures in a row, by index
        self._at_work: set[int] = set()  # have succeeded since they last failed
        # A worker whose environments fail still answers when it is asked for nothing else.
        self._without_fragment = 0
        self.fragments = DataFaultLog(max_consecutive_non_finite)
        self.counts: dict[FailureKind, int] = dict.fromkeys(_KINDS, 0)
        self._lasts: dict[FailureKind, WorkerFailure] = {}
        self.num_restarts = 0
        self.num_given_up = 0
        self.num_restarts_below = 0
        self.last: WorkerFailure | None = None

    def success(self, worker_index: int) -> None:
        """A worker did its work: the failures before it were not the beginning of the end."""
        self._consecutive = 0
        self._of_worker.pop(worker_index, None)
        self._at_work.add(worker_index)

    def is_unrecoverable(self, worker_index: int) -> bool:
        """Whether the worker, its replacements included, has failed too often in a row, though
        others succeeded meanwhile."""
        return self._of_worker.get(worker_index, 0) >= self._limit

    def give_up(self, worker_index: int) -> None:
        """Takes note that a unrecoverable worker is not replaced."""
        self.num_given_up += 1
        logger.error(
            "worker %d failed %d times without one success (max_consecutive_failures); the run "
            "goes on without it",
            worker_index,
            self._of_worker.pop(worker_index, 0),
        )

    def fragment(self, worker_index: int, faults: DataFaults) -> bool:
        """A fragment arrived; see `DataFaultLog.note`."""
        self._without_fragment = 0
        return self.fragments.note(worker_index, faults)

    def failure(self, failure: WorkerFailure) -> None:
        """Counts and logs a failure.

        Raises:
            WorkersFailedError: if it is one too many in a row, or if the environment breaks
                Gymnasium's API, which another worker's would too.
        """
        self.counts[failure.kind] += 1
        self.last = self._lasts[failure.kind] = failure
        index = failure.worker_index
        if self._consecutive == 0 or index not in self._at_work:
            self._consecutive += 1
        self._at_work.discard(index)
        self._of_worker[index] = self._of_worker.get(index, 0) + 1
        if failure.kind == "environment":
            self._without_fragment += 1
            self.fragments.env_fault(index, 0, failure.message)
        if failure.unrecoverable:
            raise WorkersFailedError(f"worker {index}: {failure.message}")
        in_a_row = max(self._consecutive, self._without_fragment)
        if in_a_row >= self._limit:
            raise WorkersFailedError(
                f"{in_a_row} calls to workers failed in a row, without one success in "
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
            "num_workers_given_up": self.num_given_up,
            "num_restarts_below": self.num_restarts_below,
            **{key: value for kind in _KINDS for key, value in self._stats_of(kind).items()},
            **self.fragments.stats(),
            "last_failed_worker": self.last.worker_index if self.last else 0,
            "last_failure": self.last.message[-2000:] if self.last else "",
        }

    def _stats_of(self, kind: FailureKind) -> dict[str, Any]:
        last = self._lasts.get(kind)
        return {
            f"num_worker_{_PLURALS[kind]}": self.counts[kind],
            f"last_{kind}_worker": last.worker_index if last else 0,
            f"last_{kind}": last.message[-2000:] if last else "",
        }
