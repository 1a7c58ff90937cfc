"""Failures of workers: kinds, counts, and the limit that ends a run."""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

import ray

from polopt.common.data_faults import DataFaults
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.errors import EnvironmentAPIError, EnvironmentFailedError
from polopt.rollouts.sampling.data_fault_log import DataFaultLog
from polopt.rollouts.transport.rpc_future import UndecodableAnswerError
from polopt.rollouts.workers.first_call import FirstCallError

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
        kind: `death` of the process, `hang` (no answer within the limit), an `exception` that the
            call raised, or an `environment` that failed repeatedly.
        worker_index: the worker that was called.
        message: cause, with the worker's traceback.
        unrecoverable: another worker would fail the same way.
        first_call: the first call of the worker raised; unrecoverable, unless another worker has
            succeeded.
    """

    kind: FailureKind
    worker_index: int
    message: str
    unrecoverable: bool = False
    first_call: bool = False

    @classmethod
    def from_error(cls, worker_index: int, error: Exception) -> WorkerFailure:
        """From what `ray.get` raised."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, FirstCallError):
            kind: FailureKind = "environment" if cause.of_environment else "exception"
            return cls(kind, worker_index, str(cause), first_call=True)
        if isinstance(cause, EnvironmentFailedError):  # with the environment's traceback, not Ray's
            unrecoverable = isinstance(cause, EnvironmentAPIError)
            return cls("environment", worker_index, str(cause), unrecoverable)
        if isinstance(error, ray.exceptions.RayTaskError | UndecodableAnswerError):
            return cls("exception", worker_index, str(error))
        if isinstance(error, ray.exceptions.GetTimeoutError):
            return cls("hang", worker_index, "its result could not be fetched in time")
        if isinstance(error, ray.exceptions.ActorDiedError) and error.actor_init_failed:
            return cls("exception", worker_index, str(error), first_call=True)
        return cls("death", worker_index, str(error).strip() or type(error).__name__)


class WorkersFailedError(RuntimeError):
    """Too many consecutive calls to workers failed; the message holds the last failure."""


class FaultLog:
    """Counts failures, logs each in one line, and ends the run with one error if they persist.

    The death of all workers at the same moment, for example with their node, is one event, and does
    not show that replacements would die too. So consecutive failures of workers that have succeeded
    since their last failure count as one; failures of other workers count one each.

    Args:
        max_consecutive_failures: limit without a success in between.
        max_consecutive_non_finite: see `DataFaultLog`.

    Attributes:
        fragments: faults in the data of workers that continue.
        counts: failures by kind.
        num_restarts: replacements that were started.
        num_restarts_below: replacements that gradient workers have started below them.
        num_given_up: workers that failed too often and were not replaced.
        last: the last failure.
    """

    def __init__(self, max_consecutive_failures: int, max_consecutive_non_finite: int = 5) -> None:
        self._limit = max_consecutive_failures
        self._consecutive = 0
        self._of_worker: dict[int, int] = {}  # consecutive failures, by index
        self._at_work: set[int] = set()  # have succeeded since their last failure
        self._any_success = False
        # A worker whose environments fail still succeeds in other calls.
        self._without_fragment = 0
        self.fragments = DataFaultLog(max_consecutive_non_finite)
        self.counts: dict[FailureKind, int] = dict.fromkeys(_KINDS, 0)
        self._lasts: dict[FailureKind, WorkerFailure] = {}
        self.num_restarts = 0
        self.num_given_up = 0
        self.num_restarts_below = 0
        self.last: WorkerFailure | None = None

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> FaultLog:
        """An empty log with the limits of a config."""
        return cls(rollout.max_consecutive_failures, rollout.max_consecutive_non_finite)

    def success(self, worker_index: int) -> None:
        """Counts a success: resets the consecutive-failure counts."""
        self._consecutive = 0
        self._of_worker.pop(worker_index, None)
        self._at_work.add(worker_index)
        self._any_success = True

    def is_unrecoverable(self, worker_index: int) -> bool:
        """Whether the worker, its replacements included, has failed too many times in a row while
        others succeeded."""
        return self._of_worker.get(worker_index, 0) >= self._limit

    def give_up(self, failure: WorkerFailure, remaining: int, min_workers: int | None) -> None:
        """Counts an unrecoverable worker, which is removed and not replaced.

        Args:
            failure: its last failure.
            remaining: number of other workers.
            min_workers: least number of workers of the run; None: all.

        Raises:
            WorkersFailedError: fewer workers remain than the run needs.
        """
        if min_workers is None or remaining < min_workers:
            needed = "all of them" if min_workers is None else min_workers
            raise WorkersFailedError(
                f"worker {failure.worker_index} failed {self._limit} times without a success in "
                "between (max_consecutive_failures) while others succeeded; "
                f"{remaining} workers remain, min_workers is {needed}. The last failure "
                f"({failure.kind}):\n{failure.message}"
            )
        self.num_given_up += 1
        logger.error(
            "worker %d failed %d times without a success in between (max_consecutive_failures); "
            "the run continues without it",
            failure.worker_index,
            self._of_worker.pop(failure.worker_index, 0),
        )

    def fragment(self, worker_index: int, faults: DataFaults) -> bool:
        """Counts a fragment that arrived; returns whether it can be used. See
        `DataFaultLog.note`."""
        self._without_fragment = 0
        return self.fragments.note(worker_index, faults)

    def failure(self, failure: WorkerFailure) -> None:
        """Counts and logs a failure.

        Raises:
            WorkersFailedError: it exceeds the limit, or another worker would fail the same way:
                the environment breaks Gymnasium's API, or the first call of a worker raised and
                none has succeeded.
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
        if failure.unrecoverable or (failure.first_call and not self._any_success):
            raise WorkersFailedError(f"worker {index}: {failure.message}")
        in_a_row = max(self._consecutive, self._without_fragment)
        if in_a_row >= self._limit:
            raise WorkersFailedError(
                f"{in_a_row} calls to workers failed in a row, without a success in between "
                f"(max_consecutive_failures={self._limit}). The last, of worker "
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
