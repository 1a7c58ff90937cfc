"""Sums over workers, in groups that can be formed again and again: small ones by `RankLinks`, large
ones and those on GPUs by `torch.distributed`.

The store through which ranks find each other is held by the driver, outside the ranks, so that it
outlives any of them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from polopt.rollouts.transport.rank_links import RankLinks, address_towards


class GroupSpec(NamedTuple):
    """How a rank finds its group.

    Attributes:
        host: of the store.
        port: of the store.
        generation: counts the groups formed; keeps the keys of a broken one out of the next.
        world_size: number of ranks.
        backend: `gloo` or `nccl`.
        timeout_s: a rank that waits longer for another in a sum gives up with an error.
        join_timeout_s: likewise while the group forms, when all are there and idle.
    """

    host: str
    port: int
    generation: int
    world_size: int
    backend: str
    timeout_s: float
    join_timeout_s: float


#: Tensors up to this size are summed by `RankLinks`, which takes log2(ranks) exchanges of all of
#: it; larger ones by torch's all-reduce, which sends each number twice, however many ranks.
LINKS_BYTES = 1 << 20


class GroupBroken(RuntimeError):
    """An all-reduce failed: a rank died or hung. Its buffer holds a partial sum, different on each
    survivor, and must not be used."""


def start_store(host: str) -> TCPStore:
    """The store of a driver, at a free port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class AllReducer:
    """A rank's place in a group; sums tensors over it. One group for each process at a time.

    Args:
        spec: the group.
        rank: 0 to world_size - 1.
        device: of the tensors that will be summed.

    Attributes:
        world_size: number of ranks.
        total_s: seconds spent in sums since `take_total_s` was last called.

    Raises:
        GroupBroken: if the others do not come within the timeout.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: str = "cpu") -> None:
        self.world_size = spec.world_size
        self.total_s = 0.0
        self._device = device
        self._links: RankLinks | None = None
        timeout = timedelta(seconds=spec.join_timeout_s)
        try:
            client = TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)
            store = PrefixStore(f"polopt/{spec.generation}", client)
            dist.init_process_group(
                spec.backend, store=store, rank=rank, world_size=spec.world_size, timeout=timeout
            )
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=spec.timeout_s))
            if spec.backend == "gloo" and torch.device(device).type == "cpu":
                host, waits_s = address_towards(spec.host), (spec.join_timeout_s, spec.timeout_s)
                self._links = RankLinks(store, host, rank, spec.world_size, *waits_s)
        except (RuntimeError, ValueError, OSError) as error:
            self.close()
            # torch counts groups to name them, and also those that never formed. A rank that is
            # ahead of the others would look for them under another name for ever.
            dist.distributed_c10d._world.group_count = 0
            raise GroupBroken(
                f"rank {rank} of {spec.world_size} could not join group {spec.generation} "
                f"({spec.backend}) within {spec.join_timeout_s} s: {error}"
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, in place.

        A rank that finds the group broken leaves it at once: others may be waiting for this one,
        and not for the one that died, and would wait until the timeout.

        Raises:
            GroupBroken: a rank died, or did not come within the timeout.
        """
        started_s = time.perf_counter()
        try:
            moved = tensor.to(self._device)
            if self._links is not None and moved.nbytes <= LINKS_BYTES:
                self._links.sum_(moved.numpy())
            else:
                dist.all_reduce(moved)
            if moved is not tensor:
                tensor.copy_(moved)
        except (RuntimeError, OSError) as error:
            self.close()
            raise GroupBroken(f"all-reduce failed: {error}") from error
        finally:
            self.total_s += time.perf_counter() - started_s

    def take_total_s(self) -> float:
        """Seconds spent in sums since last asked."""
        taken, self.total_s = self.total_s, 0.0
        return taken

    def close(self) -> None:
        """Leaves the group."""
        if self._links is not None:
            self._links.close()
            self._links = None
        if dist.is_initialized():
            dist.destroy_process_group()


def resolve_backend(backend: str, device: str) -> str:
    """`auto` is `nccl` for CUDA devices and `gloo` for the CPU."""
    if backend != "auto":
        return backend
    return "nccl" if torch.device(device).type == "cuda" else "gloo"
