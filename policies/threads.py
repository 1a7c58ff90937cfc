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
