"""Sums over the workers of a group: small tensors by `RankLinks`, large ones and those on GPUs by
torch's process groups.

The store through which ranks find each other is in the driver, so that it outlives the ranks. It
and gloo neither authenticate nor encrypt; see docs/security.md.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polopt.rollouts.transport.rank_links import RankLinks, address_towards


class GroupSpec(NamedTuple):
    """A group of ranks; sent through Ray.

    Attributes:
        host: address of the store.
        port: of the store.
        token: secret of the group: prefix of its keys in the store, and what its ranks show each
            other. Differs for each group, which separates the keys of a broken group from the next.
        generation: number of the group, for messages.
        world_size: number of ranks.
        backend: `gloo` or `nccl`.
        timeout_s: limit of a rank's wait for the others in a sum.
        join_timeout_s: the same while the group forms.
    """

    host: str
    port: int
    token: bytes
    generation: int
    world_size: int
    backend: str
    timeout_s: float
    join_timeout_s: float

    def __repr__(self) -> str:
        return f"GroupSpec({self.generation}, {self.world_size} ranks)"  # without the token


#: Tensors up to this size are summed by `RankLinks`, which takes log2(ranks) exchanges of the whole
#: tensor; larger ones by torch's all-reduce, which sends each number twice for any number of ranks.
LINKS_BYTES = 1 << 20


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
    """A rank's place in a group; sums tensors over it.

    Args:
        spec: the group.
        rank: 0 to world_size - 1.
        device: of the tensors that will be summed.

    Attributes:
        world_size: number of ranks.
        total_s: seconds spent in sums since the last `take_total_s`.

    Raises:
        GroupBroken: the others did not come within the timeout.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: str = "cpu") -> None:
        self.world_size = spec.world_size
        self.total_s = 0.0
        self._device = device
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._links: RankLinks | None = None
        self._group: Any = None
        joining = timedelta(seconds=spec.join_timeout_s)
        try:
            client = TCPStore(spec.host, spec.port, is_master=False, timeout=joining)
            store = PrefixStore(spec.token.hex(), client)
            # Not `init_process_group`: its state is global, and survives groups that did not form.
            if spec.backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, rank, spec.world_size, joining)
            else:
                options = dist.ProcessGroupNCCL.Options()
                self._group = dist.ProcessGroupNCCL(store, rank, spec.world_size, options)
            if spec.backend == "gloo" and torch.device(device).type == "cpu":
                host, waits_s = address_towards(spec.host), (spec.join_timeout_s, spec.timeout_s)
                self._links = RankLinks(store, spec.token, host, rank, spec.world_size, *waits_s)
        except (RuntimeError, ValueError, OSError) as error:
            self.close()
            raise GroupBroken(
                f"rank {rank} of {spec.world_size} could not join group {spec.generation} "
                f"({spec.backend}) within {spec.join_timeout_s} s: {error}"
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place.

        A rank that finds the group broken leaves it at once: others may wait for this rank, and
        not for the one that died, and would wait until the timeout.

        Raises:
            GroupBroken: a rank died, or did not come within the timeout.
        """
        started_s = time.perf_counter()
        try:
            moved = tensor.to(self._device)
            if self._links is not None and moved.nbytes <= LINKS_BYTES:
                self._links.sum_(moved.numpy())
            elif self._group is None:
                raise RuntimeError("this rank has left the group")
            else:
                self._group.allreduce([moved]).wait(self._timeout)
            if moved is not tensor:
                tensor.copy_(moved)
        except (RuntimeError, OSError) as error:
            self.close()
            raise GroupBroken(f"all-reduce failed: {error}") from error
        finally:
            self.total_s += time.perf_counter() - started_s

    def take_total_s(self) -> float:
        """Seconds spent in sums since the last call."""
        taken, self.total_s = self.total_s, 0.0
        return taken

    def close(self) -> None:
        """Leaves the group."""
        if self._links is not None:
            self._links.close()
            self._links = None
        self._group = None  # its destructor closes the connections


def resolve_backend(backend: str, device: str) -> str:
    """`auto` is `nccl` for CUDA devices and `gloo` for the CPU."""
    if backend != "auto":
        return backend
    return "nccl" if torch.device(device).type == "cuda" else "gloo"
