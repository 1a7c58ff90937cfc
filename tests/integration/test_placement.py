"""Placement of workers: actors that wait for resources, and actors that do not."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from fakes import FakeWorkerProcess, worker_config
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polopt.rollouts.workers.placement import in_reservation, waits_for_resources
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


@pytest.mark.parametrize("reserved", [False, True])
def test_actor_waits_for_missing_resources(ray_session: None, reserved: bool) -> None:
    options: dict[str, Any] = {"num_cpus": 0, "resources": {"absent": 1.0}}
    actor = ray.remote(FakeWorkerProcess).options(**options).remote()
    pending = actor.pid.remote()
    assert ray.wait([pending], timeout=2.0)[0] == []
    assert waits_for_resources(actor)
    workers = WorkerSet(worker_config(rollout={"num_workers": 0}))
    worker = WorkerHandle(1, actor, reserved=reserved)
    assert workers.waits_for_resources(worker) is not reserved
    ray.kill(actor)


def test_started_actor_does_not_wait(ray_session: None) -> None:
    actor = ray.remote(FakeWorkerProcess).options(num_cpus=0).remote()
    ray.get(actor.pid.remote(), timeout=120.0)
    assert not waits_for_resources(actor)
    ray.kill(actor)


def test_placement_group_reserves_resources(ray_session: None) -> None:
    group = placement_group([{"CPU": 0.1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def inside() -> tuple[bool, bool]:
        return in_reservation({}), in_reservation({"scheduling_strategy": "DEFAULT"})

    assert inside() == (False, False)
    task = ray.remote(inside).options(num_cpus=0.1, scheduling_strategy=strategy)
    assert ray.get(task.remote(), timeout=120.0) == (True, False)
    remove_placement_group(group)
