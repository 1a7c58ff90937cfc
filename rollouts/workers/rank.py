"""A worker's place in a group of ranks, which it keeps as `worker.state["group"]`.

The functions run in the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from torch import Tensor

from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.transport.endpoint import Address
from polopt.rollouts.workers.rollout_worker import RolloutWorker


def listen(worker: RolloutWorker, spec: GroupSpec, rank: int) -> Address | None:
    """Leaves the group before, and listens for the other ranks of the next one.

    Returns:
        the address at which they reach this rank; None for torch's groups.
    """
    leave(worker)
    host = ray.util.get_node_ip_address()
    group = worker.state["group"] = AllReducer(spec, rank, worker.config.device, host)
    return group.address


def join(worker: RolloutWorker, addresses: Sequence[Any]) -> str | None:
    """Connects to the other ranks of the group that `listen` named.

    Args:
        worker: the rank.
        addresses: of all ranks, by rank.

    Returns:
        None, or why the group was not formed. Not an exception: the cause is another rank, and an
        exception would cost this one its process, and what it has learned.
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
    """Leaves the group, if there is one."""
    group = worker.state.pop("group", None)
    if group is not None:
        group.close()


class TimedReducer:
    """Sums over the group of a rank, in the phase `allreduce` of its call.

    Attributes:
        world_size: number of ranks.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._group: AllReducer = worker.state["group"]
        self.world_size = self._group.world_size

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place; see `AllReducer.sum_`."""
        with self._worker.phase("allreduce"):
            self._group.sum_(tensor)
