"""Limits on the threads of torch and of NumPy's BLAS."""

from __future__ import annotations

import threadpoolctl
import torch


def limit_threads(count: int) -> None:
    """Sets the number of threads of torch and of NumPy's BLAS in this process.

    Several processes with one thread per core each would oversubscribe the cores, and idle BLAS
    threads spin.

    Args:
        count: at least 1.
    """
    torch.set_num_threads(count)
    threadpoolctl.threadpool_limits(count, user_api="blas")


def blas_threads() -> int:
    """The current number of threads of NumPy's BLAS in this process."""
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy brings a BLAS of its own, which has no limit if it is loaded after `limit_threads`.
    of_numpy = [pool for pool in pools if "numpy" in pool["filepath"]]
    return max((pool["num_threads"] for pool in of_numpy or pools), default=1)
