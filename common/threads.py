"""Limits the number of threads of torch and of NumPy's BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import threadpoolctl
import torch

_limit = 1


def limit_threads(count: int) -> None:
    """Sets the number of threads in which this process computes.

    By default, torch and NumPy's BLAS start one thread per core in every process. Several such
    processes would oversubscribe the cores, especially because idle BLAS threads spin. So BLAS gets
    one thread. It would gain little from a second one, because the products of small networks are
    short. `polopt.policies.fast_cpu` computes several such products at the same time instead.

    Args:
        count: the number of threads, at least 1.
    """
    global _limit
    _limit = count
    torch.set_num_threads(count)
    threadpoolctl.threadpool_limits(1, user_api="blas")


def thread_limit() -> int:
    """Returns the number of threads from `limit_threads`, or 1 if nobody has set it."""
    return _limit


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A context in which torch computes in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_this_thread() -> None:
    """Makes torch compute in one thread when the calling thread calls it, also after a later
    `torch.set_num_threads`. The limit of each other thread stays."""
    torch.get_num_threads()  # torch sets the number for each new thread at its first use
    threadpoolctl.threadpool_limits(1, user_api="openmp")


def blas_threads() -> int:
    """Returns the current number of threads of NumPy's BLAS in this process."""
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy has its own BLAS. If SciPy is loaded after `limit_threads`, its BLAS has no limit.
    of_numpy = [pool for pool in pools if "numpy" in pool["filepath"]]
    return max((pool["num_threads"] for pool in of_numpy or pools), default=1)
