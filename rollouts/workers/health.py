"""`WorkerHealth`: which workers can be given work, and who has come up meanwhile."""

from __future__ import annotations

import time

from polopt.rollouts.workers.failures import WorkersFailedError, logger
from polopt.rollouts.workers.in_flight import Arrival, InFlight
from polopt.rollouts.workers.placement import asked_and_free, waits_for_resources
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: A worker that has not come up is looked at after so long, and then at growing intervals.
NOTICE_S = 5.0


class WorkerHealth:
    """Workers that have answered once are up. The others (new ones, replacements, those for which
    Ray has no resources yet) are asked whether they are, and nobody waits for them who need not.

    Args:
        workers: to look after.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._calls = InFlight(workers, is_work=False)
        self._notice_s = NOTICE_S

    def up(self) -> list[RemoteWorker]:
        """The workers that can be given work, in order of index.

        The first time waits until as many are there as the run needs, later only if nobody is.

        Raises:
            WorkersFailedError: if workers keep failing, or there are none.
        """
        while True:
            self._ask()
            while len(self._calls) and self._calls.any_ready():
                self._take(self._calls.wait())
                self._ask()
            up = [worker for worker in self._workers.remote if worker.up]
            if not self._workers.remote:
                raise WorkersFailedError("there are no workers left; see WorkerSet.add_workers")
            if self._workers.enough_up():
                self._workers.started = True
                self._warn_unplaced()
                return up
            arrival = self._calls.wait_for(NOTICE_S)
            if arrival is not None:
                self._take(arrival)
            self._warn_unplaced()

    def _ask(self) -> None:
        for worker in self._workers.remote:
            if not worker.up and self._calls.count(worker) == 0:
                self._calls.launch(worker, worker.actor.ping.remote())

    def _take(self, arrival: Arrival) -> None:
        if arrival.failure is not None:
            self._workers.replace(arrival.worker, arrival.failure)

    def _warn_unplaced(self) -> None:
        """Tells of workers for which Ray finds no place, at intervals that grow."""
        now_s = time.monotonic()
        starting = [worker for worker in self._workers.remote if not worker.up]
        late = [worker for worker in starting if now_s - worker.checked_s >= self._notice_s]
        if not starting:
            self._notice_s = NOTICE_S
        for worker in late:
            worker.checked_s = now_s
        unplaced = [worker.index for worker in late if waits_for_resources(worker.handle)]
        if unplaced:
            self._notice_s = min(2.0 * self._notice_s, 60.0)
            logger.warning(
                "Ray has found no place yet for worker%s %s: %s. The run %s them.",
                "s" * (len(unplaced) > 1),
                ", ".join(map(str, unplaced)),
                asked_and_free(self._workers.config.rollout),
                "goes on without" if self._workers.enough_up() else "waits for",
            )
