"""The weights that calls carry: the placeholder `WEIGHTS`, and `WeightSnapshots`, which makes the
copies of the weights that replace it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.workers.worker_handle import WorkerHandle

#: The driver puts weights above this size into the object store once for all workers, and calls
#: carry a reference. A call carries smaller weights directly, because Ray copies objects up to
#: about this size into the call even if the argument is a reference.
INLINE_BYTES = 100_000
#: The serial numbers for snapshots in this process.
_NUMBERS = itertools.count(1)


class _Weights:
    """The type of `WEIGHTS`."""

    def __repr__(self) -> str:
        return "WEIGHTS"


#: A placeholder for the policy's weights among the arguments of a call. When `Calls` sends a call,
#: `WeightSnapshots.for_call` replaces the placeholder by the weights for this worker, or by None if
#: the worker keeps its weights.
WEIGHTS: Any = _Weights()


class WeightSnapshot(NamedTuple):
    """One copy of the weights.

    Attributes:
        number: serial number in this process. The version does not identify the weights: after a
            restore, or after a user has set older weights, other weights can have the same version.
        weights: the copy.
        changing: the weights without the parameters of policies that do not learn. The same object
            as `weights` if all learn.
        fixed: the parameters of policies that do not learn. None if all learn.
        base: number of the first snapshot that had the same `fixed`. A process that has got all
            weights since then only needs `changing`.
        arguments: the arguments of calls: True for calls that carry `changing`, False for calls
            that carry `weights`. An argument is the weights themselves or a reference. It is made
            at the first such call, because without remote workers, there may be no store for large
            weights.
    """

    number: int
    weights: Weights
    changing: Weights
    fixed: np.ndarray | None
    base: int
    arguments: dict[bool, Any]


class WeightSnapshots:
    """Makes snapshots of a policy's weights. Usually there is one snapshot per version. A call
    carries weights only if its worker does not have the weights yet.

    Args:
        policy: a function that returns the current policy.
        put: a function that stores an object and returns a reference. See `Transport.put`.

    Attributes:
        last: the newest snapshot. None before the first snapshot.
        num_bytes_sent: sum of the bytes of the weights over all calls that carried weights.
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
        """Returns a snapshot of the policy's current weights. Makes a new snapshot only if there is
        none yet, if the policy's version has changed since the last snapshot, or if `force` is
        True.

        Args:
            force: if True, make a new snapshot in any case. Use this if the weights may have
                changed without a new version, for example by a restore.
        """
        if force or self.last is None or self.last.weights.version != self.version:
            policy, before, number = self._policy(), self.last, next(_NUMBERS)
            weights = changing = policy.get_weights()
            fixed, base = None, number
            if isinstance(policy, PolicyGroup) and len(policy.trained) < len(policy.policies):
                changing, fixed = policy.split_weights(weights)
                kept = None if force or before is None else before.fixed
                if before is not None and kept is not None and np.array_equal(kept, fixed):
                    base = before.base
            self.last = WeightSnapshot(number, weights, changing, fixed, base, {})
        return self.last

    def for_call(self, handle: WorkerHandle) -> Any:
        """Returns the current weights as an argument of a call, or None if the worker already has
        them. For large weights, the argument is a reference that all calls share. A worker gets the
        parameters of policies that do not learn only once."""
        if handle.shares_weights:
            return None
        self.take()
        return self.last_for(handle)

    def last_for(self, handle: WorkerHandle) -> Any:
        """Returns the weights of the last snapshot as an argument of a call, or None if the worker
        already has them."""
        snapshot = self.last or self.take()
        if handle.sent_snapshot == snapshot.number:
            return None
        # The snapshots that the process has got since `base` had the same `fixed`.
        has_fixed = handle.sent_snapshot is not None and handle.sent_snapshot >= snapshot.base
        weights = snapshot.changing if has_fixed else snapshot.weights
        handle.sent_snapshot = snapshot.number
        self.num_bytes_sent += weights.flat.nbytes
        if has_fixed not in snapshot.arguments:
            large = weights.flat.nbytes > INLINE_BYTES
            snapshot.arguments[has_fixed] = self._put(weights) if large else weights
        return snapshot.arguments[has_fixed]
