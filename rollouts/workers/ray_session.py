"""Ray for those who did not start it: attach to what runs, else start it, and end only that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray


def attach_or_start(num_cpus: float, init_config: Mapping[str, Any] | None = None) -> bool:
    """Sees to it that this process is connected to Ray.

    Args:
        num_cpus: logical CPUs that will be needed; a Ray that is started has at least as many, for
            they are a number to schedule by and no promise.
        init_config: arguments of `ray.init`; with any, it is called with just these.

    Returns:
        True if this call connected; `ray.shutdown()` then ends what it started, and leaves a
        cluster that was running.
    """
    if ray.is_initialized():
        return False
    if init_config is not None:
        ray.init(**init_config)
        return True
    # By Ray's own rule a cluster is one that RAY_ADDRESS or `ray start` tells of; address="auto"
    # would also take whatever another program on this machine has started for itself.
    cpus = max(os.cpu_count() or 1, int(num_cpus) + 1)
    try:
        ray.init(num_cpus=cpus, include_dashboard=False)
    except ValueError:  # there is one, and its CPUs are not ours to say
        ray.init()
    return True
