"""What actors request of Ray's cluster, and how many of them still wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray

#: Amounts of resources by Ray's names of them.
Request = frozenset[tuple[str, float]]


def cluster_request(options: Mapping[str, Any]) -> Request | None:
    """What an actor with these options requests of the cluster. None if it gets resources that are
    reserved by the placement group of this process, for example of a Tune trial."""
    if options.get("scheduling_strategy") is None and ray.util.get_current_placement_group():
        return None
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {name: options.get(option) for name, option in names.items()}
    return _request({**amounts, **(options.get("resources") or {})})


def _request(amounts: Mapping[str, float | None]) -> Request:
    # Ray rounds amounts to 1e-4.
    return frozenset((name, round(amount, 4)) for name, amount in amounts.items() if amount)


def unmet_requests() -> Counter[Request]:
    """Number of tasks and actors of the cluster that wait for resources, by what they request.

    Raises:
        ray.exceptions.RpcError: Ray's control service does not answer within 10 s.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status  # 0.1 s. Seldom needed

    # The cluster's control service answers, also where no autoscaler runs.
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    unmet: Counter[Request] = Counter()
    for demand in status.resource_demands.ray_task_actor_demand:
        for bundle in demand.bundles_by_count:
            unmet[_request(bundle.bundle)] += bundle.count
    return unmet
