"""`WeightSnapshots`: copies of the local policy's weights, sent once per version to each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import ray

from polopt.common.weights import Weights
from polopt.rollouts.transport.rpc_client import RpcClient
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.rollout_worker import RolloutWorker

#: Larger weights go through the object store once for all workers; smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000


class Workers(Protocol):
    """The part of `WorkerSet` that snapshots depend on."""

    local: RolloutWorker
    rpc: RpcClient | None

    @property
    def remote(self) -> Sequence[RemoteWorker]: ...


class WeightSnapshot(NamedTuple):
    """One version of the weights, as workers receive it.

    Attributes:
        version: version of the weights.
        weights: the copy in this process.
        argument: argument of calls: the weights, or a reference to one object of them.
    """

    version: int
    weights: Weights
    argument: Any


class WeightSnapshots:
    """Snapshots of the weights of one `WorkerSet`.

    Args:
        workers: the local worker's policy is copied; remote workers receive the copies.

    Attributes:
        last: the snapshot that was taken last; None: none yet.
        num_bytes_sent: bytes of the weights that were given to calls, since the workers were made.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.last: WeightSnapshot | None = None
        self.num_bytes_sent = 0

    def take(self) -> WeightSnapshot:
        """Copies the local policy's weights, unless the last snapshot has that version already."""
        version = self._workers.local.policy.version
        if self.last is None or self.last.version != version:
            weights = self._workers.local.get_weights()
            large = weights.flat.nbytes > INLINE_BYTES and self._workers.rpc is None
            self.last = WeightSnapshot(version, weights, ray.put(weights) if large else weights)
        return self.last

    def argument_for(self, worker: RemoteWorker) -> Any:
        """The last snapshot as an argument for a call to `worker`: None if the worker has that
        version; a reference to one shared object for large weights."""
        snapshot = self.last or self.take()
        if worker.known_version == snapshot.version:
            return None
        worker.known_version = snapshot.version
        self.num_bytes_sent += snapshot.weights.flat.nbytes
        return snapshot.argument

    def clear(self) -> None:
        """Has all workers get the weights again, with their next calls. Needed when the local
        policy's weights change without a new version, as after a restore."""
        self.last = None
        for worker in self._workers.remote:
            worker.known_version = None
