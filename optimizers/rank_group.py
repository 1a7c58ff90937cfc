"""`RankGroup`: the workers that learn together; forms their group, with equal weights."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import ray

from polopt.rollouts.transport.collective import (
    GroupSpec,
    resolve_backend,
    start_store,
    with_keys,
)
from polopt.rollouts.workers.failures import WorkersFailedError, logger
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: Maximum time for ranks to connect to each other; all have just answered and are idle.
JOIN_TIMEOUT_S = 10.0


class RankGroup:
    """The workers that learn together, in order of rank.

    Args:
        workers: the workers that can be ranks.
        health: tracks which of them are up.
        backend: `auto`, `zmq`, `gloo` or `nccl`; see `resolve_backend`.
        timeout_s: time limit of each all-reduce.

    Attributes:
        backend: `zmq`, `gloo` or `nccl`.
        ranks: the group's workers; empty before the first `ensure`.
        broken: a rank failed, and the group has to be formed again.
    """

    def __init__(
        self, workers: WorkerSet, health: WorkerHealth, backend: str, timeout_s: float
    ) -> None:
        self._workers = workers
        self._health = health
        num_bytes = workers.local.policy.get_weights().flat.nbytes
        transport = workers.config.rollout.transport
        self.backend = resolve_backend(backend, workers.config.device, transport, num_bytes)
        self._timeout_s = timeout_s
        # Well below the limit after which a rank that waits for another counts as hanging.
        hang_s = workers.config.rollout.worker_timeout_s
        self._join_timeout_s = min(JOIN_TIMEOUT_S, timeout_s, hang_s / 2.0)
        # In this process the store does not depend on any rank.
        listens = self.backend != "zmq"
        self._store = start_store(ray.util.get_node_ip_address()) if listens else None
        self._generation = 0
        self._calls = InFlight(workers, is_work=False)
        self._local_leads = True
        self.ranks: list[RemoteWorker] = []
        self.broken = True

    def ensure(self) -> None:
        """Forms the group if there is none, if it is broken, or if the workers that are up are not
        its members: after replacements, additions and removals.

        Raises:
            WorkersFailedError: workers keep failing, or cannot connect to each other.
        """
        problem: str | None = None
        for _ in range(self._workers.config.rollout.max_consecutive_failures):
            candidates = self._health.up()
            if candidates == self.ranks and not self.broken:
                return
            problem = self._agree(candidates) or self._join(candidates)
            if problem is None:
                self.ranks, self.broken = candidates, False
                return
        raise WorkersFailedError(f"workers cannot form a group. The last problem: {problem}")

    def restart_from_local(self) -> None:
        """Sends the local policy to all ranks with the next `ensure`."""
        self._local_leads = True
        self.broken = True

    def fetch_policy_state(self) -> dict[str, Any]:
        """State of the policy as the ranks have it.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        while True:
            self.ensure()
            fetched = self._fetch(self.ranks[0])
            if fetched is not None:
                state: dict[str, Any] = fetched[1]["policy"]
                return state

    def _agree(self, workers: list[RemoteWorker]) -> str | None:
        """Sends all workers the same policy: the local one at first, later that of the rank with
        the most updates, because ranks of a broken group may differ by one update.

        Returns:
            None, or the failure.
        """
        local = self._workers.local.policy
        leader: RemoteWorker | None = None
        if not self._local_leads:
            for worker in workers:
                self._calls.launch(worker, worker.actor.ping.remote(), worker.index)
            versions = self._calls.gather()
            if len(versions) < len(workers):
                return self._last_failure()
            leader = self._leader(workers, versions)
        followers = [w for w in workers if w is not leader]
        if leader is None:
            source: Any = ray.put({"policy": local.get_state()})
        else:
            # Waits for the result here, because a call whose argument is the result of a failed
            # call fails too, and every follower would count as dead.
            fetched = self._fetch(leader)
            if fetched is None:
                return self._last_failure()
            source = fetched[0]
        for worker in followers:
            self._calls.launch(worker, worker.actor.set_state.remote(source), worker.index)
        if len(self._calls.gather()) < len(followers):
            return self._last_failure()
        self._local_leads = False
        return None

    def _leader(
        self, workers: list[RemoteWorker], versions: Mapping[int, int]
    ) -> RemoteWorker | None:
        """The rank with the most updates; None if the local policy has more than all of them,
        because every rank that had learned has failed."""
        leader = max(workers, key=lambda w: (versions[w.index], -w.index))
        if versions[leader.index] >= self._workers.local.policy.version:
            return leader
        logger.warning(
            "every worker that had learned has failed; the others continue from the local policy, "
            "version %d",
            self._workers.local.policy.version,
        )
        return None

    def _fetch(self, worker: RemoteWorker) -> tuple[ray.ObjectRef[Any], dict[str, Any]] | None:
        """A worker's learner state, as a reference and as a value; None if the worker failed."""
        source: ray.ObjectRef[Any] = worker.actor.get_learner_state.remote()
        self._calls.launch(worker, source, worker.index)
        values = self._calls.gather()
        return (source, values[worker.index]) if values else None

    def _last_failure(self) -> str:
        failure = self._workers.faults.last
        return "none" if failure is None else failure.message

    def _join(self, workers: list[RemoteWorker]) -> str | None:
        """Connects the ranks; returns None, or why the group was not formed."""
        self._generation += 1
        for rank, (worker, spec) in enumerate(zip(workers, self._specs(len(workers)), strict=True)):
            call = worker.actor.listen_for_group.remote(spec, rank)
            self._calls.launch(worker, call, worker.index)
        listening = self._calls.gather()
        if len(listening) < len(workers):
            return self._last_failure()
        addresses = [listening[worker.index] for worker in workers]
        for worker in workers:
            self._calls.launch(worker, worker.actor.join_group.remote(addresses), worker.index)
        problems = self._calls.gather()
        if len(problems) < len(workers):
            return self._last_failure()
        return next((problem for problem in problems.values() if problem is not None), None)

    def _specs(self, world_size: int) -> list[GroupSpec]:
        """The spec of each rank, with new keys."""
        limits = (self._timeout_s, self._join_timeout_s)
        spec = GroupSpec(self._generation, world_size, self.backend, *limits)
        if self._store is not None:
            prefix = secrets.token_hex(16)
            spec = spec._replace(host=self._store.host, port=self._store.port, prefix=prefix)
            return [spec] * world_size
        return with_keys(spec)
