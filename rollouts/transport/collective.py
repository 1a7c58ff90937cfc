"""Sums over the workers of a group: by ZeroMQ, or by torch's process groups (gloo, NCCL).

The ranks of a torch group find each other through a store in the driver, which outlives the ranks.
The store and torch's groups neither authenticate nor encrypt; see docs/security.md. Groups that use
ZeroMQ need no store.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import zmq
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polopt.common.config import ConfigError
from polopt.rollouts.transport.endpoint import Address
from polopt.rollouts.transport.messages import AUTO_FRAME_BYTES, MAX_FRAME_BYTES
from polopt.rollouts.transport.zmq_allreduce import ZmqAllReduce

#: `backend: auto` sums tensors up to this size over ZeroMQ, in log2(ranks) exchanges of the
#: whole tensor; larger ones by torch's all-reduce, which sends each number twice for any number of
#: ranks.
SMALL_TENSOR_BYTES = AUTO_FRAME_BYTES
#: Room behind a gradient for the row count and the statistics that are summed with it.
STATISTICS_BYTES = 1 << 10


class GroupSpec(NamedTuple):
    """A group of ranks, as one rank receives it through Ray.

    Attributes:
        generation: number of the group, for messages.
        world_size: number of ranks.
        backend: `zmq`, `gloo` or `nccl`.
        timeout_s: limit of a rank's wait for the others in a sum.
        join_timeout_s: the same while the group forms.
        public_keys: CURVE keys of all ranks by rank, Z85. Only for `zmq`, as are the next three.
        secret_key: CURVE key of this rank, Z85.
        passwords: between this rank and each other, by rank; for ranks of one node.
        max_bytes: size of the largest tensor, for `zmq`; see `largest_sum`.
        host: address of the store. Only for `gloo` and `nccl`, as are the next ones.
        port: of the store.
        prefix: of the group's keys in the store. Differs for each group, which separates the keys
            of a broken group from the next.
    """

    generation: int
    world_size: int
    backend: str
    timeout_s: float
    join_timeout_s: float
    public_keys: tuple[bytes, ...] = ()
    secret_key: bytes = b""
    passwords: tuple[str, ...] = ()
    max_bytes: int = SMALL_TENSOR_BYTES + STATISTICS_BYTES
    host: str = ""
    port: int = 0
    prefix: str = ""

    def __repr__(self) -> str:
        return f"GroupSpec({self.generation}, {self.world_size} ranks)"  # without the secrets


def with_keys(spec: GroupSpec) -> list[GroupSpec]:
    """The spec of each rank, by rank, with new keys for `zmq`."""
    ranks = range(spec.world_size)
    pairs = [zmq.curve_keypair() for _ in ranks]
    passwords = [[secrets.token_hex() for _ in ranks] for _ in ranks]
    return [
        spec._replace(
            public_keys=tuple(public for public, _ in pairs),
            secret_key=pairs[rank][1],
            passwords=tuple(passwords[min(rank, r)][max(rank, r)] for r in ranks),
        )
        for rank in ranks
    ]


class GroupBroken(RuntimeError):
    """An all-reduce failed: a rank died or hung. Its buffer holds a partial sum, different on each
    survivor, and must not be used."""


def start_store(host: str) -> TCPStore:
    """A store that listens on one address of this node, at a free port.

    Raises:
        OSError: the address is not of this node.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without a bound socket, torch listens on all addresses.
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class AllReducer:
    """A rank's place in a group; sums tensors over it. `join` has to follow.

    Args:
        spec: the group.
        rank: 0 to world_size - 1.
        device: of the tensors that are summed.
        host: address of this node at which the other ranks reach it; for `zmq`.

    Attributes:
        world_size: number of ranks.
        address: at which this rank listens; None for torch's groups.

    Raises:
        zmq.ZMQError: no socket can be bound.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: str = "cpu", host: str = "") -> None:
        self.world_size = spec.world_size
        self.address: Address | None = None
        self._spec, self._rank = spec, rank
        self._device = device
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._zmq: ZmqAllReduce | None = None
        self._group: Any = None
        if spec.backend == "zmq":
            keys = spec.public_keys, spec.secret_key, spec.passwords
            self._zmq = ZmqAllReduce(host, rank, *keys, spec.timeout_s, spec.max_bytes)
            self._device, self.address = "cpu", self._zmq.address

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the other ranks.

        Args:
            addresses: `address` of all ranks, by rank.

        Raises:
            GroupBroken: the others did not connect within the timeout.
        """
        spec = self._spec
        try:
            if self._zmq is not None:
                self._zmq.connect(addresses, spec.join_timeout_s)
            else:
                self._group = _torch_group(spec, self._rank)
        except (RuntimeError, ValueError, OSError, zmq.ZMQError) as error:
            self.close()
            raise GroupBroken(
                f"rank {self._rank} of {spec.world_size} could not join group {spec.generation} "
                f"({spec.backend}) within {spec.join_timeout_s} s: {error}"
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place.

        A rank that finds the group broken leaves it at once, because others may wait for this rank
        and not for the one that failed.

        Raises:
            GroupBroken: a rank died, or did not come within the timeout.
        """
        try:
            moved = tensor.to(self._device)
            if self._zmq is not None:
                self._zmq.sum_(moved.numpy())
            elif self._group is None:
                raise RuntimeError("this rank has left the group")
            else:
                self._group.allreduce([moved]).wait(self._timeout)
            if moved is not tensor:
                tensor.copy_(moved)
        except (RuntimeError, OSError, zmq.ZMQError) as error:
            self.close()
            raise GroupBroken(f"all-reduce failed: {error}") from error

    def close(self) -> None:
        """Leaves the group."""
        if self._zmq is not None:
            self._zmq.close()
            self._zmq = None
        self._group = None  # its destructor closes the connections


def _torch_group(spec: GroupSpec, rank: int) -> Any:
    """A process group of torch. Not by `init_process_group`, whose state is global and survives
    groups that did not form."""
    timeout = timedelta(seconds=spec.join_timeout_s)
    client = TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)
    store = PrefixStore(spec.prefix, client)
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, spec.world_size, timeout)
    return dist.ProcessGroupNCCL(store, rank, spec.world_size, dist.ProcessGroupNCCL.Options())


def largest_sum(tensor_bytes: int) -> int:
    """Limit of the tensors that ranks send each other over ZeroMQ. Small in groups that sum only
    small ones, because peers that have not authenticated can make a rank allocate as much.

    Args:
        tensor_bytes: size of the group's gradient.
    """
    small = tensor_bytes <= SMALL_TENSOR_BYTES
    return (SMALL_TENSOR_BYTES if small else MAX_FRAME_BYTES) + STATISTICS_BYTES


def resolve_backend(
    backend: str, device: str, num_gpus: float, transport: str, tensor_bytes: int
) -> str:
    """The backend that `auto` means: `nccl` where each rank has a GPU of its own, else `gloo` for
    tensors above `SMALL_TENSOR_BYTES` and with `transport: ray`, else `zmq`.

    Args:
        backend: of the config.
        device: of the tensors that are summed.
        num_gpus: Ray GPUs of each rank. NCCL refuses ranks that share one.
        transport: of the config; see `RolloutConfig`.
        tensor_bytes: size of the largest one.

    Raises:
        ConfigError: `zmq` with tensors that are too large for it.
    """
    if backend == "zmq" and tensor_bytes > MAX_FRAME_BYTES:
        raise ConfigError(
            f"key 'backend': got 'zmq' with gradients of {tensor_bytes} bytes. "
            f"Allowed: up to {MAX_FRAME_BYTES}; for larger ones 'gloo' or 'auto'"
        )
    if backend != "auto":
        return backend
    if torch.device(device).type == "cuda" and num_gpus >= 1.0:
        return "nccl"
    return "gloo" if transport == "ray" or tensor_bytes > SMALL_TENSOR_BYTES else "zmq"
