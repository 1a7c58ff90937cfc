"""`DataFaultLog`: counts and logs faults that cost at most a fragment, and limits their number."""

from __future__ import annotations

import logging
import time
from typing import Any

from polopt.common.data_faults import DataFaults

logger = logging.getLogger("polopt")
#: The first exceptions of environments are logged in one line each, later ones at most at this
#: interval.
LOG_INTERVAL_S = 10.0
_LOG_FIRST = 3
_LEARNER = 0  # as a worker index: the driver's own


class NonFiniteError(RuntimeError):
    """Too many fragments or updates in a row were not finite; the message says whose."""


class DataFaultLog:
    """Exceptions of environments, and non-finite values, of all workers.

    Args:
        max_non_finite: number of consecutive non-finite fragments of one worker, or of consecutive
            skipped updates, that ends the run.
    """

    def __init__(self, max_non_finite: int) -> None:
        self._limit = max_non_finite
        self._non_finite_in_a_row: dict[int, int] = {}
        self._skipped_in_a_row = 0
        self._logged_s = -LOG_INTERVAL_S
        self._unlogged = 0
        self.num_env_faults = 0
        self.num_non_finite = 0
        self._last_env_fault = (0, 0, "")  # worker, environment, traceback
        self._last_non_finite = (0, "")  # worker, what

    def note(self, worker_index: int, faults: DataFaults) -> bool:
        """Counts and logs the faults of a fragment, or of a gradient computed from it.

        Returns:
            whether it may be used for learning: all its values are finite.

        Raises:
            NonFiniteError: the number of consecutive non-finite fragments of the worker has reached
                `max_non_finite`.
        """
        if faults.env_faults:
            self.env_fault(worker_index, faults.env_index, faults.traceback, faults.env_faults)
        if not faults.non_finite:
            self._non_finite_in_a_row.pop(worker_index, None)
            return True
        self._count_non_finite(worker_index, faults.non_finite)
        in_a_row = self._non_finite_in_a_row.get(worker_index, 0) + 1
        self._non_finite_in_a_row[worker_index] = in_a_row
        if in_a_row >= self._limit:
            raise NonFiniteError(
                f"worker {worker_index}: {in_a_row} fragments in a row held non-finite values "
                f"(max_consecutive_non_finite={self._limit}). The last: {faults.non_finite}"
            )
        logger.warning("worker %d: non-finite values, unused: %s", worker_index, faults.non_finite)
        return False

    def update(self, done: bool, worker_index: int = _LEARNER, why: str = "") -> None:
        """Counts an update that was made, or one that was skipped because of non-finite values.

        Args:
            done: the update was made.
            worker_index: the worker with the non-finite values; 0 is the driver.
            why: what was not finite; empty if `note` has counted it.

        Raises:
            NonFiniteError: the number of consecutive skipped updates has reached `max_non_finite`.
        """
        if done:
            self._skipped_in_a_row = 0
            return
        if why:
            self._count_non_finite(worker_index, why)
            logger.warning("worker %d: non-finite values, update skipped: %s", worker_index, why)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._limit:
            index, last = self._last_non_finite
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row were skipped because of non-finite "
                f"values (max_consecutive_non_finite={self._limit}). The last, of worker {index}: "
                f"{last}"
            )

    def env_fault(self, worker_index: int, env_index: int, traceback: str, count: int = 1) -> None:
        """Counts exceptions of an environment, and logs them now or together with later ones."""
        self.num_env_faults += count
        self._unlogged += count
        self._last_env_fault = (worker_index, env_index, traceback)
        now_s = time.monotonic()
        few = self.num_env_faults <= _LOG_FIRST
        if few or now_s - self._logged_s >= LOG_INTERVAL_S:
            lines = traceback.strip().splitlines() or [""]
            logger.warning(
                "worker %d: environment raised and was replaced (%d new, %d in total): %s %s",
                worker_index,
                self._unlogged,
                self.num_env_faults,
                lines[0],
                lines[-1],
            )
            self._logged_s, self._unlogged = now_s, 0

    def _count_non_finite(self, worker_index: int, what: str) -> None:
        self.num_non_finite += 1
        self._last_non_finite = (worker_index, what)

    def stats(self) -> dict[str, Any]:
        """For the `fault_tolerance/` result keys."""
        env_worker, env_index, env_traceback = self._last_env_fault
        non_finite_worker, non_finite = self._last_non_finite
        return {
            "num_env_faults": self.num_env_faults,
            "last_env_fault_worker": env_worker,
            "last_env_fault_env": env_index,
            "last_env_fault": env_traceback[-2000:],
            "num_non_finite": self.num_non_finite,
            "last_non_finite_worker": non_finite_worker,
            "last_non_finite": non_finite,
        }
