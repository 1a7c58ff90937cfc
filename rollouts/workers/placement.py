"""Placement of workers by Ray: actor options, and whether an actor still waits for resources."""

from __future__ import annotations

from typing import Any

import ray

from polopt.rollouts.config import RolloutConfig

#: Ray copies larger constructor arguments into the object store once for every worker.
MAX_ARGUMENT_BYTES = 100_000
#: States of an actor whose process may not have started.
_UNPLACED = {"DEPENDENCIES_UNREADY", "PENDING_CREATION"}


def actor_options(rollout: RolloutConfig, index: int) -> dict[str, Any]:
    """Ray's options for the actor of worker `index`.

    A trial of Tune reserves resources for the workers that a run needs to begin. Further workers
    are scheduled outside of that reservation.
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


def in_reservation(options: dict[str, Any]) -> bool:
    """Whether an actor with these options gets resources that the placement group of this process,
    such as that of a Tune trial, has reserved."""
    if options.get("scheduling_strategy") is not None:
        return False
    return ray.util.get_current_placement_group() is not None


def actor_argument(config: Any) -> Any:
    """The constructor argument for `config`: the config itself if it is small, else a reference to
    one object for all workers. This process owns the object, so it survives the loss of others."""
    large = len(ray.cloudpickle.dumps(config)) > MAX_ARGUMENT_BYTES
    return ray.put(config) if large else config


def waits_for_resources(actor: Any) -> bool:
    """Whether Ray has not found resources for the actor yet. Such an actor cannot hang."""
    # The public state API (ray.util.state) needs the dashboard, which may not run.
    info = ray._private.state.actors(actor._actor_id.hex())
    # Ray sets the node before it has resources, and the IP address with the process.
    return bool(info) and info["State"] in _UNPLACED and not info["Address"]["IPAddress"]


def describe_resources(rollout: RolloutConfig, ray: Any = ray) -> str:
    """Resources that one worker needs, with the amounts in the cluster and those free, as text.

    Args:
        rollout: options of the worker.
        ray: the module, or a fake of it.
    """
    needed = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": float(rollout.memory_per_worker),
        **rollout.custom_resources_per_worker,
    }
    needed = {name: amount for name, amount in needed.items() if amount} or {"CPU": 0.0}
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = (
        f"{name} {amount:g} (the cluster has {total.get(name, 0.0):g}, "
        f"of which {free.get(name, 0.0):g} are free)"
        for name, amount in needed.items()
    )
    return "each needs " + ", ".join(parts)
