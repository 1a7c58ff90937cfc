"""All-reduce over the workers of a group, over sockets or with torch's process groups (gloo, NCCL).

The ranks of a torch group find each other through a store. The store runs in the driver, because
the driver outlives the ranks. The store and torch's process groups have no authentication and no
encryption. See docs/security.md. Groups that use sockets do not need a store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polopt.common.sums import SUMS
from polopt.rollouts.transport.channel import TransportError
from polopt.rollouts.transport.socket_allreduce import SocketAllReduce
from polopt.rollouts.transport.sockets import CONNECTION_ERRORS

#: With `backend: auto`, a group may use sockets only if its largest tensor has at most this size.
#: See `resolve_backend`. Over sockets, a sum takes about log2(ranks) exchanges of the whole tensor.
#: In torch's all-reduce, each rank sends the tensor about twice, whatever the number of ranks.
SMALL_TENSOR_BYTES = 1 << 20


class GroupSpec(NamedTuple):
    """The description of a group. The driver sends it to each rank.

    Attributes:
        generation: the number of this attempt of the driver to form a group, for error messages.
        world_size: number of ranks.
        backend: `socket`, `gloo` or `nccl`.
        timeout_s: the longest time that a rank waits for another rank in a sum, in seconds.
        join_timeout_s: the longest time that a rank waits for another rank while the group forms.
        key: the key with which ranks authenticate. Only for `socket`.
        host: address of the store. Only for `gloo` and `nccl`.
        port: port of the store. Only for `gloo` and `nccl`.
        prefix: prefix of the group's keys in the store. Each group has a different prefix, so a new
            group does not read keys of a broken group. Only for `gloo` and `nccl`.
    """

    generation: int
    world_size: int
    backend: str
    timeout_s: float
    join_timeout_s: float
    key: bytes = b""
    host: str = ""
    port: int = 0
    prefix: str = ""

    def __repr__(self) -> str:
        return f"GroupSpec({self.generation}, {self.world_size} ranks)"  # omits the secrets


class GroupBroken(RuntimeError):
    """A group could not form, or an all-reduce failed, usually because a rank died or did not
    answer in time. After a failed all-reduce, do not use the tensor: it may hold a partial sum,
    which differs between the surviving ranks."""


def start_store(host: str) -> TCPStore:
    """Returns a store that listens on one address of this node, at a free port.

    Raises:
        OSError: this node does not have the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If torch gets no bound socket, it listens on all addresses.
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class AllReducer:
    """The connection of one rank to its group. Sums tensors over all ranks. Call `join` before
    `sum_`.

    Args:
        spec: the group.
        rank: rank of this process, from 0 to `world_size - 1`.
        device: device on which tensors are summed. The backend `socket` always sums on the CPU.

    Attributes:
        world_size: number of ranks.
        address: address at which this rank listens. None for torch's process groups.

    Raises:
        OSError: the rank cannot bind a socket.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: str = "cpu") -> None:
        self.world_size = spec.world_size
        self.address: str | None = None
        self._spec, self._rank = spec, rank
        self._device = device
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._sockets: SocketAllReduce | None = None
        self._group: Any = None
        if spec.backend == "socket":
            self._sockets = SocketAllReduce(rank, spec.world_size, spec.key, spec.timeout_s)
            self._device, self.address = "cpu", self._sockets.address

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the other ranks.

        Args:
            addresses: `address` of all ranks, in order of rank.

        Raises:
            GroupBroken: the group did not form, usually because another rank did not connect
                within the timeout.
        """
        spec = self._spec
        try:
            if self._sockets is not None:
                self._sockets.connect(addresses, spec.join_timeout_s)
            else:
                self._group = _torch_group(spec, self._rank)
        except (RuntimeError, ValueError, *CONNECTION_ERRORS) as error:
            self.close()
            SUMS.broken = True
            raise GroupBroken(
                f"rank {self._rank} of {spec.world_size} could not join group {spec.generation} "
                f"({spec.backend}) within {spec.join_timeout_s} s: {error}"
            ) from error
        self._count_sum()

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place.

        If the sum fails, this rank leaves the group at once. Other ranks may be waiting for this
        rank instead of the rank that failed. They notice that this rank has left, and do not wait
        until the timeout.

        Raises:
            GroupBroken: the sum failed, usually because a rank died, has left the group, or did not
                join the sum within the timeout.
        """
        try:
            moved = tensor.to(self._device)
            if self._sockets is not None:
                self._sockets.sum_(moved.numpy())
            elif self._group is None:
                raise RuntimeError("this rank has left the group")
            else:
                self._group.allreduce([moved]).wait(self._timeout)
            if moved is not tensor:
                tensor.copy_(moved)
        except (RuntimeError, *CONNECTION_ERRORS) as error:
            self.close()
            SUMS.broken = True
            raise GroupBroken(f"all-reduce failed: {error}") from error
        self._count_sum()

    def _count_sum(self) -> None:
        if not SUMS.completed():
            self.close()
            raise GroupBroken("the group broke at this sum in the run that is repeated")

    def close(self) -> None:
        """Leaves the group."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        self._group = None  # the destructor of the group closes its connections


class TimedReducer:
    """Sums tensors over a group, and measures the time that this takes.

    Args:
        group: the group that this process has joined.
        phase: a function that returns a context manager. The context manager measures the time. An
            example is `lambda: worker.phase("allreduce")`.

    Attributes:
        world_size: number of ranks.
    """

    def __init__(
        self, group: AllReducer, phase: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._group = group
        self._phase = phase
        self.world_size = group.world_size

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place. See `AllReducer.sum_`."""
        with self._phase():
            self._group.sum_(tensor)


def _torch_group(spec: GroupSpec, rank: int) -> Any:
    """Returns a process group of torch. Does not use `init_process_group`, because its global state
    remains after a group has failed to form."""
    timeout = timedelta(seconds=spec.join_timeout_s)
    client = TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)
    store = PrefixStore(spec.prefix, client)
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, spec.world_size, timeout)
    return dist.ProcessGroupNCCL(store, rank, spec.world_size, dist.ProcessGroupNCCL.Options())


def resolve_backend(
    backend: str,
    device: str,
    num_gpus: float,
    transport: str,
    tensor_bytes: int,
    nodes: Collection[str],
) -> str:
    """Returns the backend for a group. `auto` chooses one of these backends:

    - `nccl`, if `device` is a GPU and each rank has its own GPU.
    - `socket`, if all ranks are on one node, tensors have at most `SMALL_TENSOR_BYTES`, and
      `transport` is not `ray`.
    - `gloo` in all other cases.

    Args:
        backend: the option `backend` of the config.
        device: device of the tensors that are summed.
        num_gpus: number of Ray GPUs of each rank. NCCL refuses ranks that share a GPU.
        transport: the option `transport` of the config. See `RolloutConfig`.
        tensor_bytes: size of the largest tensor in bytes.
        nodes: the id of each rank's node.

    Raises:
        TransportError: `backend` is `socket`, and the ranks are on several nodes.
    """
    if backend == "socket" and len(set(nodes)) > 1:
        raise TransportError(
            f"backend: socket works only within one node, but the ranks are on {len(set(nodes))} "
            "nodes. Allowed for several nodes: gloo, nccl or auto"
        )
    if backend != "auto":
        return backend
    if torch.device(device).type == "cuda" and num_gpus >= 1.0:
        return "nccl"
    small = tensor_bytes <= SMALL_TENSOR_BYTES
    return "socket" if small and len(set(nodes)) <= 1 and transport != "ray" else "gloo"
