"""Limits the number of threads of torch and of NumPy's BLAS."""

from __future__ import annotations

import threadpoolctl
import torch


def limit_threads(count: int) -> None:
    """Sets the number of threads of torch and of NumPy's BLAS in this process.

    By default, every process starts one thread per core. Several such processes would oversubscribe
    the cores, especially because idle BLAS threads spin.

    Args:
        count: the number of threads, at least 1.
    """
    torch.set_num_threads(count)
    threadpoolctl.threadpool_limits(count, user_api="blas")


def blas_threads() -> int:
    """Returns the current number of threads of NumPy's BLAS in this process."""
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy has its own BLAS. If SciPy is loaded after `limit_threads`, its BLAS has no limit.
    of_numpy = [pool for pool in pools if "numpy" in pool["filepath"]]
    return max((pool["num_threads"] for pool in of_numpy or pools), default=1)
