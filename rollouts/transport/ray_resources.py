"""The resources that actors request from Ray's cluster, and the number of unmet requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray

#: Pairs of a resource and its amount. The resources have Ray's names.
Request = frozenset[tuple[str, float]]


def cluster_request(options: Mapping[str, Any]) -> Request | None:
    """Returns the resources that an actor with these options requests from the cluster. None if the
    placement group of this process, for example of a Tune trial, has reserved the resources."""
    if options.get("scheduling_strategy") is None and ray.util.get_current_placement_group():
        return None
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {name: options.get(option) for name, option in names.items()}
    return _request({**amounts, **(options.get("resources") or {})})


def _request(amounts: Mapping[str, float | None]) -> Request:
    # Ray rounds amounts to 1e-4.
    return frozenset((name, round(amount, 4)) for name, amount in amounts.items() if amount)


def unmet_requests() -> Counter[Request]:
    """Counts the tasks and actors in the cluster that wait for resources. The keys of the counter
    are the requests of these tasks and actors.

    Raises:
        ray.exceptions.RpcError: Ray's control service does not answer within 10 s.
    """
    # The import takes 0.1 s and is seldom needed, so it is here.
    from ray.autoscaler.v2.sdk import get_cluster_status

    # Ray's control service also answers in clusters without an autoscaler.
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    unmet: Counter[Request] = Counter()
    for demand in status.resource_demands.ray_task_actor_demand:
        for bundle in demand.bundles_by_count:
            unmet[_request(bundle.bundle)] += bundle.count
    return unmet
