"""`FaultLog`: counts and logs the faults of processes and of data, and raises at limits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from polopt.common.faults import Fault, FaultKind
from polopt.metrics.number import Number, declare
from polopt.metrics.record import Record
from polopt.rollouts.workers.errors import NonFiniteError, WorkersFailedError

logger = logging.getLogger("polopt")

#: The kinds of faults of processes, each with a part of its result key.
_PLURALS: dict[FaultKind, str] = {
    "death": "deaths",
    "hang": "hangs",
    "exception": "exceptions",
    "environment": "environment_failures",
    "reference": "lost_arguments",
}
#: The kinds of faults in data, each with the text in the log. `bad_rows` count as `non_finite`.
_DATA: dict[FaultKind, str] = {
    "raised": "an environment raised and was replaced",
    "non_finite": "data with non-finite values was not used",
}


def _numbers_of(kind: FaultKind) -> tuple[Number, ...]:
    plural = _PLURALS[kind]
    metric = f"worker_failures{{kind={plural}}}"
    return declare(f"""
        num_worker_{plural} (failures, total, metric={metric}): failures of the kind `{kind}`
        last_{kind}_worker (metric=): index of the worker with the last failure of this kind
        last_{kind} (text): message of the last failure of the kind `{kind}`
    """)


#: The numbers of `FaultLog.stats`.
NUMBERS = (
    *declare("""
        num_remote_worker_restarts (restarts, total, metric=worker_restarts): replacements of
            workers that were started
        num_workers_given_up (workers, total, metric=): workers that failed too often and were not
            replaced
        num_restarts_below (restarts, total, metric=): replacements that gradient workers have
            started for the workers from which they gather fragments
    """),
    *(number for kind in _PLURALS for number in _numbers_of(kind)),
    *declare("""
        num_worker_preemptions (workers, total, metric=worker_preemptions): workers that left
            because their node or their process had announced its end. They do not count as failures
        last_preemption_worker (metric=): index of the last worker that left
        last_preemption (text, metric=): says who announced the end of this worker
    """),
    *declare("""
        num_env_faults (faults, total): exceptions of environments, which were replaced
        num_non_finite (fragments, total): fragments, gradients and updates that were not used
            because they were not finite
        last_env_fault_worker (metric=): index of the worker with the last environment fault
        last_env_fault_env (metric=): index of the environment with the last fault
        last_env_fault (text, metric=): end of the traceback of the last environment fault
        last_non_finite_worker (metric=): index of the worker with the last such data
        last_non_finite (text, metric=): the last values that were not finite
        last_failed_worker (metric=): index of the worker with the last failure
        last_failure (text, metric=): end of the message of the last failure of a worker
    """),
)
#: The driver logs the first `_LOG_FIRST` faults of each kind as they arrive. After these, it logs
#: the faults of a kind in at most one line per `LOG_INTERVAL_S`.
LOG_INTERVAL_S = 10.0
_LOG_FIRST = 3
#: The worker index of the learner in the driver.
LEARNER = 0
#: What results say before the first fault of a kind: worker 0, environment 0, and no text.
_NONE = 0, Fault("raised", "", env_index=0)


class LogLines:
    """Limits the lines of a log about faults that may be frequent.

    Args:
        clock: a function that returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_s = -math.inf
        self._unlogged = 0

    def due(self, count: int, total: int) -> int:
        """Adds `count` faults. Returns the number of faults since the last line if a line is due
        now, and 0 otherwise. `total` is the number of faults so far."""
        self._unlogged += count
        now_s = self._clock()
        if total > _LOG_FIRST and now_s - self._logged_s < LOG_INTERVAL_S:
            return 0
        unlogged, self._unlogged, self._logged_s = self._unlogged, 0, now_s
        return unlogged


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


class FaultLog:
    """Counts and logs failures of workers and faults in data. If failures persist, raises an error
    that ends the run.

    All workers may die at the same time, for example with their node. This does not mean that
    their replacements would die, too. So several failures in a row count as one failure if each of
    the workers had succeeded since its previous failure. If a worker fails again before it has
    succeeded, this failure counts as one more failure.

    Args:
        max_consecutive_failures: the number of consecutive failures, without a success in between,
            that ends the run. Between failures of environments, only a call that sampled is a
            success. If one worker fails this often while other workers succeed, the group removes
            this worker. The run then ends only if it needs this worker (`give_up`).
        max_consecutive_non_finite: the number of consecutive skipped updates that ends the run.
            Each worker counts its fragments and gradients itself.
        who: the noun for a process in messages.
        clock: a function that returns the seconds of a monotonic clock.
        event: a function that returns the number of the last event in the record of the run, or
            None if the run is not recorded.

    Attributes:
        counts: number of faults by kind. `non_finite` includes `bad_rows`.
        num_restarts: number of replacements that were started.
        num_restarts_below: number of replacements that gradient workers have started for the
            rollout workers from which they gather fragments.
        num_given_up: number of workers that failed too often and were not replaced.
        last: the last failure of a worker that was replaced or given up. None before the first
            failure.
        any_success: True once `success` has been called for any worker.
    """

    def __init__(
        self,
        max_consecutive_failures: int,
        max_consecutive_non_finite: int = 5,
        who: str = "worker",
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._event = event
        self._who = who
        self._clock = clock
        self._limit = max_consecutive_failures
        self._consecutive = 0
        self._of_worker: dict[int, int] = {}  # consecutive failures of each worker, by index
        self._at_work: set[int] = set()  # workers that have succeeded since their last failure
        self.any_success = False
        # Environment failures since the last call that sampled. `_consecutive` does not suffice,
        # because a worker whose environments fail still succeeds in other calls.
        self._without_fragment = 0
        self.counts: dict[FaultKind, int] = dict.fromkeys([*_PLURALS, "preemption", *_DATA], 0)
        self._lasts: dict[FaultKind, tuple[int, Fault]] = {}  # the worker and its fault, by kind
        self.num_restarts = 0
        self.num_given_up = 0
        self.num_restarts_below = 0
        self.last: Fault | None = None
        self._last_failed = 0  # the worker of `last`
        self._updates = InARow("the driver", max_consecutive_non_finite)
        self._lines = {kind: LogLines(clock) for kind in _DATA}

    def _count(self, worker_index: int, fault: Fault) -> FaultKind:
        """Counts a fault. All faults are counted here. Returns the kind under which it counts."""
        kind: FaultKind = "non_finite" if fault.kind == "bad_rows" else fault.kind
        self.counts[kind] += fault.count
        self._lasts[kind] = worker_index, fault
        return kind

    # ---- failures of workers --------------------------------------------------------------------

    def success(self, worker_index: int) -> None:
        """Notes the success of a call to a worker. Sets the number of consecutive failures to 0,
        for all workers together and for this worker."""
        self._consecutive = 0
        self._of_worker.pop(worker_index, None)
        self._at_work.add(worker_index)
        self.any_success = True

    def is_unrecoverable(self, worker_index: int) -> bool:
        """Returns True if the worker and its replacements have failed too many times in a row. If
        all workers fail, `failure` raises before this happens."""
        return self._of_worker.get(worker_index, 0) >= self._limit

    def give_up(
        self, worker_index: int, failure: Fault, remaining: int, min_workers: int | None
    ) -> None:
        """Counts an unrecoverable worker, which the caller has removed.

        Args:
            worker_index: the index of the worker.
            failure: the last failure of the worker.
            remaining: number of workers that remain.
            min_workers: number of workers that the run needs. None means that the run needs all
                workers.

        Raises:
            WorkersFailedError: fewer workers remain than the run needs.
        """
        if min_workers is None or remaining < min_workers:
            needed = "all workers" if min_workers is None else min_workers
            raise WorkersFailedError(
                f"{self._who} {worker_index} failed {self._limit} times without a success "
                "in between (max_consecutive_failures), while other processes succeeded. "
                f"{remaining} workers remain, but the run needs {needed} (min_workers). The last "
                f"failure ({failure.kind}):\n{failure.message}"
            )
        self.num_given_up += 1
        logger.error(
            "%s %d failed %d times without a success in between (max_consecutive_failures). "
            "The run continues without this process",
            self._who,
            worker_index,
            self._of_worker.pop(worker_index, 0),
        )

    def failure(self, index: int, failure: Fault) -> None:
        """Counts and logs the failure of the worker with this index. A preemption is counted and
        logged, but it is no failure, and has no limit.

        Raises:
            WorkersFailedError: there were too many consecutive failures. If no call has succeeded
                so far, also raised for a worker that cannot be made, and for an environment that
                cannot be made or keeps failing.
        """
        self._count(index, failure)
        if failure.kind == "preemption":
            logger.warning("%s %d leaves and is replaced. %s", self._who, index, failure.message)
            return
        self.last, self._last_failed = failure, index
        if self._consecutive == 0 or index not in self._at_work:
            self._consecutive += 1
        self._at_work.discard(index)
        self._of_worker[index] = self._of_worker.get(index, 0) + 1
        if failure.kind == "environment":
            self._without_fragment += 1
        at_start = failure.at_start or failure.kind == "environment"
        if at_start and not self.any_success:
            raise WorkersFailedError(f"{self._who} {index}: {failure.message}")
        if max(self._consecutive, self._without_fragment) >= self._limit:
            what = (
                f"{self._consecutive} calls to workers failed in a row, without a success in "
                "between"
                if self._consecutive >= self._limit
                else f"environments failed in {self._without_fragment} calls to workers, and no "
                "call sampled in between"
            )
            raise WorkersFailedError(
                f"{what} (max_consecutive_failures={self._limit}). The last failure, of "
                f"{self._who} {index} ({failure.kind}):\n{failure.message}"
            )
        last_line = failure.message.strip().splitlines()[-1] if failure.message.strip() else ""
        event = self._event()
        recorded = "" if event is None else f" (event {event} of the record)"
        logger.warning(
            "%s %d failed (%s)%s%s. %s",
            self._who,
            index,
            failure.kind,
            "" if self.is_unrecoverable(index) else " and is replaced",
            recorded,
            last_line,
        )

    def lost_argument(self, worker_index: int, failure: Fault) -> None:
        """Counts and logs a call to a worker that was dropped because one of its arguments is
        lost."""
        self._count(worker_index, failure)
        logger.warning("a call to %s %d was dropped. %s", self._who, worker_index, failure.message)

    # ---- faults in data -------------------------------------------------------------------------

    def add(self, worker_index: int, record: Record) -> None:
        """Counts and logs the faults in the record of one call."""
        self.num_restarts_below += record.restarts_below
        if record.env_steps:
            self._without_fragment = 0
        for fault in record.faults.values():
            self._note_data(worker_index, fault)

    def note_update(self, done: bool, why: str) -> None:
        """Notes that the driver made an update, or skipped an update because of non-finite values.

        Args:
            done: True if the update was made.
            why: says which values were not finite.

        Raises:
            NonFiniteError: the number of consecutive skipped updates has reached the limit.
        """
        if not done:
            self._note_data(LEARNER, Fault("non_finite", why))
        self._updates.note("updates", "" if done else why)

    def _note_data(self, worker_index: int, fault: Fault) -> None:
        """Counts a fault in data, and logs it now or together with later faults of its kind."""
        kind = self._count(worker_index, fault)
        unlogged = self._lines[kind].due(fault.count, self.counts[kind])
        if unlogged:
            lines = fault.message.strip().splitlines() or [""]
            logger.warning(
                "%s %d: %s (%d times since the last such line, %d times in total): %s",
                self._who,
                worker_index,
                _DATA[kind],
                unlogged,
                self.counts[kind],
                " ".join(lines[:1] + lines[1:][-1:]),
            )

    # ---- results --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns the values of the `fault_tolerance/` result keys that this log counts."""
        env_worker, raised = self._lasts.get("raised", _NONE)
        non_finite_worker, non_finite = self._lasts.get("non_finite", _NONE)
        plurals: dict[FaultKind, str] = {**_PLURALS, "preemption": "preemptions"}
        return {
            "num_remote_worker_restarts": self.num_restarts,
            "num_workers_given_up": self.num_given_up,
            "num_restarts_below": self.num_restarts_below,
            **{k: v for one in plurals.items() for k, v in self._stats_of(*one).items()},
            "num_env_faults": self.counts["raised"],
            "last_env_fault_worker": env_worker,
            "last_env_fault_env": raised.env_index,
            "last_env_fault": raised.message[-2000:],
            "num_non_finite": self.counts["non_finite"],
            "last_non_finite_worker": non_finite_worker,
            "last_non_finite": non_finite.message,
            "last_failed_worker": self._last_failed,
            "last_failure": self.last.message[-2000:] if self.last else "",
        }

    def _stats_of(self, kind: FaultKind, plural: str) -> dict[str, Any]:
        worker, last = self._lasts.get(kind, _NONE)
        return {
            f"num_worker_{plural}": self.counts[kind],
            f"last_{kind}_worker": worker,
            f"last_{kind}": last.message[-2000:],
        }
