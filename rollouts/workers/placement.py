"""Where Ray puts workers: what is asked for, what there is, and whether a place was found."""

from __future__ import annotations

from typing import Any

import ray

from polopt.rollouts.config import RolloutConfig

#: Ray keeps larger constructor arguments in the object store, copied for every worker.
MAX_ARGUMENT_BYTES = 100_000
#: States of an actor whose process may not have been started.
_UNPLACED = {"DEPENDENCIES_UNREADY", "PENDING_CREATION"}


def actor_options(rollout: RolloutConfig, index: int) -> dict[str, Any]:
    """Ray's options for the actor of worker `index`.

    A trial of Tune reserves resources for the workers it can not start without. The others, those
    that a run may grow by, have to find theirs outside of that reservation.
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


def actor_argument(config: Any) -> Any:
    """What to give an actor's constructor for `config`: itself if it is small, else a reference to
    one object, which the driver holds and no other process can lose."""
    large = len(ray.cloudpickle.dumps(config)) > MAX_ARGUMENT_BYTES
    return ray.put(config) if large else config


def waits_for_resources(actor: Any) -> bool:
    """Whether Ray has not found a place for the actor yet, so that nothing of it can hang."""
    # The public state API needs the dashboard, which need not run.
    info = ray._private.state.actors(actor._actor_id.hex())
    # The node is the one that looks for a place; an address comes with the process.
    return bool(info) and info["State"] in _UNPLACED and not info["Address"]["IPAddress"]


def asked_and_free(rollout: RolloutConfig) -> str:
    """What one worker asks for, what the cluster has in all, and what of it is free, in words."""
    asked = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": float(rollout.memory_per_worker),
        **rollout.custom_resources_per_worker,
    }
    asked = {name: amount for name, amount in asked.items() if amount} or {"CPU": 0.0}
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = (
        f"{name} {amount:g} (the cluster has {total.get(name, 0.0):g}, "
        f"of which {free.get(name, 0.0):g} are free)"
        for name, amount in asked.items()
    )
    return "each asks for " + ", ".join(parts)
