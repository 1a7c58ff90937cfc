"""`RankGroup`: which workers learn together, and how they come to agree again after a break."""

from __future__ import annotations

from typing import Any

import ray

from polopt.rollouts.collective import GroupSpec, resolve_backend, start_store
from polopt.rollouts.in_flight import InFlight
from polopt.rollouts.worker_set import RemoteWorker, WorkerSet


class RankGroup:
    """The workers that learn together, in order of rank.

    Args:
        workers: those that can be ranks.
        backend: `auto`, `gloo` or `nccl`.
        timeout_s: of joining and of each sum.

    Attributes:
        ranks: the group's workers; empty before the first `ensure`.
        broken: a rank is gone, and the group has to be formed again.
    """

    def __init__(self, workers: WorkerSet, backend: str, timeout_s: float) -> None:
        self._workers = workers
        self._backend = resolve_backend(backend, workers.config.device)
        self._timeout_s = timeout_s
        # Held here, outside the ranks, the store outlives any of them.
        self._host = ray.util.get_node_ip_address()
        self._store = start_store(self._host)
        self._generation = 0
        self._calls = InFlight(workers)
        self._local_leads = True
        self.ranks: list[RemoteWorker] = []
        self.broken = True

    def ensure(self) -> None:
        """Forms the group if there is none, if it is broken, or if a replacement has come up.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        self._take_in_newcomers()
        while self.broken:
            candidates = self._ready_workers()
            if self._agree(candidates) and self._join(candidates):
                self.ranks, self.broken = candidates, False

    def restart_from_local(self) -> None:
        """Everybody takes over the local policy with the next `ensure`."""
        self._local_leads = True
        self.broken = True

    def fetch_policy_state(self) -> dict[str, Any]:
        """State of the policy as the ranks have it.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        while True:
            self.ensure()
            worker = self.ranks[0]
            self._calls.launch(worker, worker.actor.get_state.remote())
            for value in self._collect().values():
                state: dict[str, Any] = value["policy"]
                return state

    def _take_in_newcomers(self) -> None:
        """Breaks the group up, to form it with them, once replacements answer."""
        newcomers = [w for w in self._workers.remote if w not in self.ranks]
        if self.broken or not newcomers:
            return
        self._ping(newcomers)
        while len(self._calls) and self._calls.any_ready():
            arrival = self._calls.wait()
            if arrival.failure is not None:
                self._workers.replace(arrival.worker, arrival.failure)
            else:
                self.broken = True

    def _ready_workers(self) -> list[RemoteWorker]:
        """Those that have answered before, in order of index; waits for one if none has."""
        while True:
            ready = [w for w in self._workers.remote if w.last_answer_s is not None]
            # At the very beginning, wait for all: nobody has learned anything yet.
            if ready and (self.ranks or len(ready) == len(self._workers.remote)):
                return ready
            self._ping([w for w in self._workers.remote if w not in ready])
            arrival = self._calls.wait()
            if arrival.failure is not None:
                self._workers.replace(arrival.worker, arrival.failure)

    def _ping(self, workers: list[RemoteWorker]) -> None:
        for worker in workers:
            if self._calls.count(worker) == 0:
                self._calls.launch(worker, worker.actor.ping.remote(), "ping")

    def _agree(self, workers: list[RemoteWorker]) -> bool:
        """Gives all the same policy: the local one at first, later that of the rank that has made
        most updates, for a break can leave survivors one update apart."""
        if self._local_leads:
            source: Any = ray.put({"policy": self._workers.local.policy.get_state()})
            followers = workers
        else:
            for worker in workers:
                self._calls.launch(worker, worker.actor.ping.remote(), worker.index)
            versions = self._collect()
            if len(versions) < len(workers):
                return False
            leader = max(workers, key=lambda w: (versions[w.index], -w.index))
            followers = [w for w in workers if w is not leader]
            source = leader.actor.get_learner_state.remote()
        for worker in followers:
            self._calls.launch(worker, worker.actor.set_state.remote(source), worker.index)
        if len(self._collect()) < len(followers):
            return False
        self._local_leads = False
        return True

    def _join(self, workers: list[RemoteWorker]) -> bool:
        self._generation += 1
        spec = GroupSpec(
            self._host,
            self._store.port,
            self._generation,
            len(workers),
            self._backend,
            self._timeout_s,
        )
        for rank, worker in enumerate(workers):
            self._calls.launch(worker, worker.actor.join_group.remote(spec, rank), worker.index)
        return len(self._collect()) == len(workers)

    def _collect(self) -> dict[int, Any]:
        """Waits for the calls launched; what they returned, by worker index. Pings of workers that
        are still starting are left under way. Failed workers are replaced and missing."""
        values: dict[int, Any] = {}
        while any(tag != "ping" for tag in self._calls.tags()):
            arrival = self._calls.wait()
            if arrival.failure is not None:
                self._workers.replace(arrival.worker, arrival.failure)
            elif arrival.tag != "ping":
                values[arrival.worker.index] = arrival.value
        return values
