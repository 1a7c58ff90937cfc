"""The resources that actors request from Ray's cluster, and the number of unmet requests."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray
from ray.exceptions import RayError

logger = logging.getLogger("polopt")

#: The longest time that the driver waits for an answer of Ray's control service.
ANSWER_TIMEOUT_S = 5.0
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


class UnmetRequests:
    """Asks Ray's control service which requests are unmet.

    While the control service does not answer, processes can still run calls, so the driver must not
    wait for it. Ray waits 30 s, whatever its time limit says. So a thread asks, and the driver
    waits for the thread for at most `ANSWER_TIMEOUT_S`.
    """

    def __init__(self) -> None:
        self._answer: Future[Counter[Request]] | None = None

    def count(self) -> Counter[Request]:
        """Counts the tasks and actors in the cluster that wait for resources. The keys of the
        counter are the requests of these tasks and actors. If the control service does not answer,
        logs a warning and returns an empty counter. The next calls then return an empty counter at
        once, until the thread has an answer or an error."""
        if self._answer is not None and not self._answer.done():
            return Counter()
        self._answer = answer = Future[Counter[Request]]()
        threading.Thread(target=_ask, args=(answer,), name="polopt-unmet", daemon=True).start()
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except (FutureTimeoutError, RayError) as error:
            logger.warning(
                "Ray's control service does not answer (%s), so it is not known which processes "
                "wait for resources",
                error if answer.done() else f"no answer within {ANSWER_TIMEOUT_S:g} s",
            )
            return Counter()


def _ask(answer: Future[Counter[Request]]) -> None:
    try:
        answer.set_result(_unmet_requests())
    except Exception as error:  # `count` raises the error
        answer.set_exception(error)


def _unmet_requests() -> Counter[Request]:
    # The import takes 0.1 s and is seldom needed, so it is here.
    from ray.autoscaler.v2.sdk import get_cluster_status

    # Ray's control service also answers in clusters without an autoscaler.
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    unmet: Counter[Request] = Counter()
    for demand in status.resource_demands.ray_task_actor_demand:
        for bundle in demand.bundles_by_count:
            unmet[_request(bundle.bundle)] += bundle.count
    return unmet
