"""How many threads arithmetic may use."""

from __future__ import annotations

import threadpoolctl
import torch


def limit_threads(count: int) -> None:
    """For torch and for NumPy's BLAS alike, in this process, from now on. Processes that each use
    all cores fight for them, and threads that wait for work spin.

    Args:
        count: at least 1.
    """
    torch.set_num_threads(count)
    threadpoolctl.threadpool_limits(count, user_api="blas")


def blas_threads() -> int:
    """How many threads NumPy's BLAS may use in this process now."""
    pools = threadpoolctl.threadpool_info()
    return max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)
