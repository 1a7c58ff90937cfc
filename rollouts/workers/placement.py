"""Placement of workers: the options of their actors, and a text about the resources they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.rollouts.rollout_config import RolloutConfig


def actor_options(rollout: RolloutConfig, index: int) -> dict[str, Any]:
    """Returns Ray's options for the actor of worker `index`.

    A Tune trial reserves resources for the workers that a run needs to begin. Ray schedules further
    workers outside of this reservation.
    """
    options: dict[str, Any] = {
        "num_cpus": rollout.num_cpus_per_worker,
        "num_gpus": rollout.num_gpus_per_worker,
        "resources": rollout.custom_resources_per_worker or None,
    }
    if rollout.memory_per_worker:
        options["memory"] = rollout.memory_per_worker
    if index > rollout.workers_needed:
        options["scheduling_strategy"] = "DEFAULT"
    return options


def describe_resources(
    rollout: RolloutConfig, total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Returns a text with the resources that one worker needs, and with the total and the free
    amount of each of these resources in the cluster.

    Args:
        rollout: options of the worker.
        total: the total amount of each resource in the cluster, by Ray's name of the resource.
        free: the free amount of each resource in the cluster, by Ray's name of the resource.
    """
    needed = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": float(rollout.memory_per_worker),
        **rollout.custom_resources_per_worker,
    }
    needed = {name: amount for name, amount in needed.items() if amount} or {"CPU": 0.0}
    parts = (
        f"{name} {amount:g} (the cluster has {total.get(name, 0.0):g}, "
        f"of which {free.get(name, 0.0):g} are free)"
        for name, amount in needed.items()
    )
    return "each needs " + ", ".join(parts)
