"""`RankGroup`: forms the group of workers that learn together, and gives them equal weights.

The class runs in the driver. The functions with the argument `worker` run in the ranks, which are
the workers of the group. A rank keeps its connections to the other ranks in
`worker.state["group"]`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from polopt.common.weights import Weights
from polopt.rollouts.transport.collective import (
    AllReducer,
    GroupBroken,
    GroupSpec,
    resolve_backend,
    start_store,
)
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

logger = logging.getLogger("polopt")
#: The longest time in which ranks must connect to each other. This time can be short, because all
#: ranks have just answered a call and are idle.
JOIN_TIMEOUT_S = 10.0


def version_of(worker: RolloutWorker) -> int:
    """Returns the version of the rank's weights."""
    return worker.policy.version


def policy_state(worker: RolloutWorker) -> dict[str, Any]:
    """Returns the state of the rank's policy, including its torch optimizer."""
    return worker.policy.get_state()


def take_policy_state(worker: RolloutWorker, state: dict[str, Any]) -> None:
    """Sets the state of the rank's policy. The rank keeps its own random numbers. The moments in
    the state include all samples that the rank has made so far, also those of a broken round."""
    worker.set_state({"policy": state})
    worker.new_moments = None


def checksum(worker: RolloutWorker) -> str:
    """Returns the SHA-256 of the bytes of the arrays that `numbers_of` returns."""
    numbers = numbers_of(worker.policy.get_weights())
    return hashlib.sha256(b"".join(part.tobytes() for part in numbers)).hexdigest()


def numbers_of(weights: Weights) -> list[np.ndarray]:
    """Returns the arrays that must be equal in all ranks. These are the weights and, if the policy
    has a normaliser, the number, mean and sum of squared deviations of the normaliser's data."""
    moments = weights.moments
    if moments is None:
        return [weights.flat]
    return [weights.flat, np.float64(moments.rows)[None], moments.mean, moments.m2]


def listen(worker: RolloutWorker, spec: GroupSpec, rank: int) -> str | None:
    """Leaves the previous group, and listens for the other ranks of the next group.

    Returns:
        the address at which this rank listens. None for torch's process groups.

    Raises:
        OSError: the rank cannot bind a socket.
    """
    leave(worker)
    group = worker.state["group"] = AllReducer(spec, rank, worker.config.device)
    return group.address


def join(worker: RolloutWorker, addresses: Sequence[Any]) -> str | None:
    """Connects to the other ranks of the group for which `listen` was called.

    Args:
        worker: the rank.
        addresses: addresses of all ranks, by rank.

    Returns:
        None if the group was formed, or the reason why it was not formed. In the latter case, the
        function does not raise, because an exception would end the run. The driver can form a new
        group instead.
    """
    if "group" not in worker.state:
        return "this rank was restarted while the group formed"
    try:
        worker.state["group"].join(addresses)
    except GroupBroken as error:
        del worker.state["group"]
        return str(error)
    return None


def leave(worker: RolloutWorker) -> None:
    """Leaves the group, if the rank is in a group."""
    group = worker.state.pop("group", None)
    if group is not None:
        group.close()


class RankGroup:
    """The workers that learn together, in order of rank.

    Args:
        workers: the workers that can be ranks.
        backend: `auto`, `socket`, `gloo` or `nccl`. See `resolve_backend`.
        timeout_s: time limit of each all-reduce.

    Attributes:
        backend: the backend of the last group: `socket`, `gloo` or `nccl`.
        ranks: the workers of the group. Empty before the first `ensure`.
        broken: True if a new group must be formed, for example because a rank has failed.
        version: the version of the ranks' weights after the last complete round. After a restore,
            the restored version.
    """

    def __init__(self, workers: WorkerSet, backend: str, timeout_s: float) -> None:
        self._workers = workers
        self._wanted = backend
        self.backend = self._resolve([])
        self._timeout_s = timeout_s
        # A rank that waits for other ranks must give up well before it counts as hanging itself.
        hang_s = workers.config.rollout.worker_timeout_s
        self._join_timeout_s = min(JOIN_TIMEOUT_S, timeout_s, hang_s / 2.0)
        self._store: Any = None  # the store for torch's process groups, see `collective.py`
        self._generation = 0
        owner = "group of ranks"
        self._calls = Calls(workers, owner, is_work=False, after_failure="drop")
        self._local_leads = True
        self.ranks: list[WorkerHandle] = []
        self.broken = True
        self.version = 0

    def ensure(self) -> None:
        """Forms a new group if the group is broken, or if its ranks are not exactly the workers
        that are up. The latter happens when workers are replaced, added or removed.

        Raises:
            WorkersFailedError: workers keep failing, or cannot connect to each other. Also raised
                if all ranks that had learned have failed and the driver does not have their
                weights.
            TransportError: `backend` is `socket`, but the ranks are on several nodes.
            FunctionError: a function raised in a rank, for example because it cannot bind a socket.
        """
        problem: str | None = None
        for _ in range(self._workers.config.rollout.max_consecutive_failures):
            candidates = self._workers.up()
            if candidates == self.ranks and not self.broken:
                return
            self.broken = True  # the following calls make ranks leave their old group
            problem = self._agree(candidates) or self._join(candidates)
            if problem is None:
                self.ranks, self.broken = candidates, False
                return
        raise WorkersFailedError(f"workers cannot form a group. The last problem: {problem}")

    def restart_from_local(self) -> None:
        """Makes the next `ensure` send the driver's policy to all ranks."""
        self._local_leads = True
        self.broken = True

    def call_ranks(self, fn: Any, *args: Any) -> dict[int, Any]:
        """Runs `fn(worker, *args)` in all ranks. Returns the values by worker index, without the
        ranks that failed."""
        return self._call_each(dict.fromkeys(self.ranks, args), fn)

    def _call_each(self, args: dict[WorkerHandle, tuple[Any, ...]], fn: Any) -> dict[int, Any]:
        for handle, own in args.items():
            self._calls.send(handle, fn, *own)
        return {reply.worker.index: reply.value for reply in self._calls.all()}

    def fetch_policy_state(self) -> dict[str, Any]:
        """Fetches the state of the policy from a rank, and returns it.

        Raises:
            WorkersFailedError, TransportError, FunctionError: see `ensure`.
        """
        while True:
            self.ensure()
            states = self._call_each({self.ranks[0]: ()}, policy_state)
            if states:
                state: dict[str, Any] = states[self.ranks[0].index]
                return state
            self.broken = True

    def _agree(self, handles: list[WorkerHandle]) -> str | None:
        """Gives all workers the same policy. This is the driver's policy for the first group and
        after a restore. Later it is usually the policy of the rank with the most updates, because
        ranks of a broken group may differ by one update. `_leader` describes the exception.

        The normaliser's moments always come from the driver's policy. When a round breaks, some
        ranks have added the moments of its samples and others have not. The driver has added them,
        because it counts the samples of each round.

        Returns:
            None after success, or the message of the last failure.
        """
        leader: WorkerHandle | None = None
        if not self._local_leads:
            versions = self._call_each(dict.fromkeys(handles, ()), version_of)
            if len(versions) < len(handles):
                return self._last_failure()
            leader = self._leader(handles, versions)
        if leader is None:
            state = self._workers.local.policy.get_state()
        else:
            states = self._call_each({leader: ()}, policy_state)
            if not states:
                return self._last_failure()
            normalizer = self._workers.local.policy.normalizer
            moments = None if normalizer is None else normalizer.get_state()
            state = {**states[leader.index], "moments": moments}
        source = self._workers.transport.put(state)
        taken = self._call_each(dict.fromkeys(handles, (source,)), take_policy_state)
        if len(taken) < len(handles):
            return self._last_failure()
        self._local_leads = False
        return None

    def _leader(self, handles: list[WorkerHandle], versions: dict[int, int]) -> WorkerHandle | None:
        """Returns the worker with the most updates. None if the driver's policy has more updates
        than any worker, because every rank that had learned has failed.

        Raises:
            WorkersFailedError: updates are lost, because no worker has them and the driver does not
                have them either.
        """
        leader = max(handles, key=lambda w: (versions[w.index], -w.index))
        newest, local = versions[leader.index], self._workers.local.policy.version
        if max(newest, local) < self.version - 1:  # a broken group may lose one update
            raise WorkersFailedError(
                f"all ranks that had learned have failed. Their weights of version "
                f"{self.version} are lost, because the driver only has version {local}. Restore a "
                "checkpoint. To keep the weights in the driver, too, set "
                f"keep_local_weights_in_sync: true. The last failure: {self._last_failure()}"
            )
        if newest >= local:
            return leader
        logger.warning(
            "every worker that had learned has failed. The present workers continue from the "
            "driver's policy, version %d",
            local,
        )
        return None

    def _last_failure(self) -> str:
        failure = self._workers.faults.last
        return "none" if failure is None else failure.message

    def _join(self, handles: list[WorkerHandle]) -> str | None:
        """Connects the workers as ranks of a new group. Returns None, or the reason why the group
        was not formed."""
        self._generation += 1
        self.backend = self._resolve([handle.channel.started.node for handle in handles])
        spec = self._spec(len(handles))
        listening = self._call_each(
            {handle: (spec, rank) for rank, handle in enumerate(handles)},
            listen,
        )
        if len(listening) < len(handles):
            return self._last_failure()
        addresses = [listening[handle.index] for handle in handles]
        source = self._workers.transport.put(addresses)
        problems = self._call_each(dict.fromkeys(handles, (source,)), join)
        if len(problems) < len(handles):
            return self._last_failure()
        return next((problem for problem in problems.values() if problem is not None), None)

    def _resolve(self, nodes: list[str]) -> str:
        """Returns the backend that the option `backend` selects for ranks on these nodes."""
        config = self._workers.config
        num_bytes = self._workers.local.policy.flat.params.nbytes
        gpus, transport = config.rollout.num_gpus_per_worker, config.rollout.transport
        return resolve_backend(self._wanted, config.device, gpus, transport, num_bytes, nodes)

    def _spec(self, world_size: int) -> GroupSpec:
        """Returns the description of the next group, with new secrets."""
        limits = (self._timeout_s, self._join_timeout_s)
        spec = GroupSpec(self._generation, world_size, self.backend, *limits)
        if self.backend == "socket":
            return spec._replace(key=secrets.token_bytes(32))
        if self._store is None:
            self._store = start_store(ray.util.get_node_ip_address())
        prefix = secrets.token_hex(16)
        return spec._replace(host=self._store.host, port=self._store.port, prefix=prefix)
