"""Placement of workers by Ray: actor options, and how many actors still wait for resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from polopt.rollouts.rollout_config import RolloutConfig

#: Amounts of resources by Ray's names of them.
Request = frozenset[tuple[str, float]]


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


def cluster_request(options: Mapping[str, Any]) -> Request | None:
    """What an actor with these options requests of the cluster; None if it gets resources that the
    placement group of this process, such as that of a Tune trial, has reserved."""
    if options.get("scheduling_strategy") is None and ray.util.get_current_placement_group():
        return None
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {name: options.get(option) for name, option in names.items()}
    return _request({**amounts, **(options.get("resources") or {})})


def _request(amounts: Mapping[str, float | None]) -> Request:
    # Ray rounds amounts to 1e-4.
    return frozenset((name, round(amount, 4)) for name, amount in amounts.items() if amount)


def waiting_for_resources(workers: Iterable[Any]) -> tuple[list[Any], int]:
    """Workers that may wait for resources.

    Ray tells how many requests it cannot meet, and which actors have no process; an actor without
    a process may also have its resources and start slowly.

    Args:
        workers: each a `WorkerHandle`, without an answer yet. One that gets reserved resources does
            not wait for them.

    Returns:
        The workers without a process that request what Ray cannot meet now, and how many of them
        wait, at most: other programs may request the same.

    Raises:
        ray.exceptions.RpcError: Ray's control service does not answer within 10 s.
    """
    requests = [(worker, worker.request) for worker in workers if worker.request is not None]
    unmet = _unmet_requests() if requests else Counter()
    waiting = [pair for pair in requests if unmet[pair[1]] and not pair[0].channel.has_process()]
    number = sum((Counter(request for _, request in waiting) & unmet).values())
    return [worker for worker, _ in waiting], number


def _unmet_requests() -> Counter[Request]:
    """Number of tasks and actors of the cluster that wait for resources, by what they request."""
    from ray.autoscaler.v2.sdk import get_cluster_status  # 0.1 s; seldom needed

    # The cluster's control service answers, also where no autoscaler runs.
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    unmet: Counter[Request] = Counter()
    for demand in status.resource_demands.ray_task_actor_demand:
        for bundle in demand.bundles_by_count:
            unmet[_request(bundle.bundle)] += bundle.count
    return unmet


def describe_resources(rollout: RolloutConfig) -> str:
    """Resources that one worker needs, with the amounts in the cluster and those free, as text.

    Args:
        rollout: options of the worker.
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
