"""`WeightSnapshots`: copies of the learner's weights, as calls carry them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.rollouts.workers.worker_handle import WorkerHandle

#: Larger weights go through the object store once for all workers. Smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000
#: Serial numbers of all snapshots of this process.
_NUMBERS = itertools.count(1)


class WeightSnapshot(NamedTuple):
    """A copy of the weights, as workers receive it.

    Attributes:
        number: serial number in this process. Versions cannot serve as such: the same version may
            come with other weights after a restore, or after a user has set older weights.
        weights: the copy in this process.
        argument: the argument for calls. The weights themselves, or a reference to them.
    """

    number: int
    weights: Weights
    argument: Any


class WeightSnapshots:
    """Snapshots of a policy's weights. Each version is copied once, and sent once to each worker.

    Args:
        policy: returns the current policy.
        put: makes a reference. See `Transport.put`.

    Attributes:
        last: the last snapshot. None before the first one.
        num_bytes_sent: bytes of the weights that were given to calls.
    """

    def __init__(self, policy: Callable[[], Policy], put: Callable[[Any], Any]) -> None:
        self._policy = policy
        self._put = put
        self.last: WeightSnapshot | None = None
        self.num_bytes_sent = 0

    @property
    def version(self) -> int:
        """The current version of the policy's weights."""
        return self._policy().version

    def take(self, force: bool = False) -> WeightSnapshot:
        """Copies the policy's weights, unless the last snapshot has that version already.

        Args:
            force: copy the weights in any case. They may have changed without a new version, for
                example by a restore.
        """
        if force or self.last is None or self.last.weights.version != self.version:
            weights = self._policy().get_weights()
            large = weights.flat.nbytes > INLINE_BYTES
            argument = self._put(weights) if large else weights
            self.last = WeightSnapshot(next(_NUMBERS), weights, argument)
        return self.last

    def for_call(self, worker: WorkerHandle) -> Any:
        """Returns the newest weights as an argument of a call, or None if the worker has them. If
        the weights are large, the argument is a reference that all calls share."""
        if worker.shares_weights:
            return None
        self.take()
        return self.last_for(worker)

    def last_for(self, worker: WorkerHandle) -> Any:
        """Returns the weights of the last snapshot as an argument of a call, or None if the worker
        has them."""
        snapshot = self.last or self.take()
        if worker.sent_snapshot == snapshot.number:
            return None
        worker.sent_snapshot = snapshot.number
        self.num_bytes_sent += snapshot.weights.flat.nbytes
        return snapshot.argument
