"""`WorkerHealth`: which workers are up, and warnings about those that wait for resources."""

from __future__ import annotations

import time

from polopt.rollouts.workers.failures import WorkersFailedError, logger
from polopt.rollouts.workers.in_flight import Arrival, InFlight
from polopt.rollouts.workers.placement import describe_resources, waits_for_resources
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: First interval between checks of a worker that is not up; it grows with each warning.
CHECK_INTERVAL_S = 5.0
MAX_CHECK_INTERVAL_S = 60.0


class WorkerHealth:
    """Tracks which workers are up. A worker is up once it has answered a call.

    New workers, replacements, and workers for which Ray has no resources yet get a `ping` call,
    which stays pending until their process has started. A run that has enough workers does not
    wait for these calls.

    Args:
        workers: the workers to track.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._calls = InFlight(workers, is_work=False)
        self._interval_s = CHECK_INTERVAL_S

    def up(self) -> list[RemoteWorker]:
        """The workers that can be given work, in order of index.

        The first call waits until enough workers are up for the run to begin; later calls wait only
        if no worker is up.

        Raises:
            WorkersFailedError: if workers keep failing, or there are none.
        """
        while True:
            self._ping()
            while len(self._calls) and self._calls.any_ready():
                self._receive(self._calls.wait())
                self._ping()
            up = [worker for worker in self._workers.remote if worker.up]
            if not self._workers.remote:
                raise WorkersFailedError("no workers remain; see WorkerSet.add_workers")
            if self._workers.enough_up():
                self._workers.started = True
                self._warn_unplaced()
                return up
            arrival = self._calls.wait_for(CHECK_INTERVAL_S)
            if arrival is not None:
                self._receive(arrival)
            self._warn_unplaced()

    def _ping(self) -> None:
        for worker in self._workers.remote:
            if not worker.up and self._calls.count(worker) == 0:
                self._calls.launch(worker, worker.actor.ping.remote())

    def _receive(self, arrival: Arrival) -> None:
        if arrival.failure is not None:
            self._workers.replace(arrival.worker, arrival.failure)

    def _warn_unplaced(self) -> None:
        """Warns about workers for which Ray has no resources, at growing intervals."""
        now_s = time.monotonic()
        starting = [worker for worker in self._workers.remote if not worker.up]
        late = [worker for worker in starting if now_s - worker.checked_s >= self._interval_s]
        if not starting:
            self._interval_s = CHECK_INTERVAL_S
        for worker in late:
            worker.checked_s = now_s
        unplaced = [worker.index for worker in late if waits_for_resources(worker)]
        if unplaced:
            self._interval_s = min(2.0 * self._interval_s, MAX_CHECK_INTERVAL_S)
            logger.warning(
                "Ray has no resources yet for worker%s %s: %s. The run %s them.",
                "s" * (len(unplaced) > 1),
                ", ".join(map(str, unplaced)),
                describe_resources(self._workers.config.rollout),
                "continues without" if self._workers.enough_up() else "waits for",
            )
