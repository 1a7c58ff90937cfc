"""Connecting this process to Ray: to a running cluster, or to one that is started here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray


def attach_or_start(num_cpus: float, init_config: Mapping[str, Any] | None = None) -> bool:
    """Connects this process to Ray, unless it is connected already.

    Args:
        num_cpus: logical CPUs that the run needs. Ray that is started here has at least as many;
            they only limit scheduling, and the machine may have fewer.
        init_config: arguments of `ray.init`, which are then the only ones; None: attach to a
            running cluster if there is one, else start Ray here.

    Returns:
        True if this call connected. `ray.shutdown()` then stops what the call started; a cluster
        that was running continues.
    """
    if ray.is_initialized():
        return False
    if init_config is not None:
        ray.init(**init_config)
        return True
    # Without `address`, Ray attaches only to a cluster from RAY_ADDRESS or `ray start`. With
    # address="auto" it would also attach to one that another program has started for itself.
    cpus = max(os.cpu_count() or 1, int(num_cpus) + 1)
    try:
        ray.init(num_cpus=cpus, include_dashboard=False)
    except ValueError:  # `num_cpus` is not allowed for a cluster that is running already
        ray.init()
    return True
