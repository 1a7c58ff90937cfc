"""Placement of workers: actors that wait for resources, and actors that do not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from fakes import FakeWorkerProcess
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from waiting import wait_until

from polopt.rollouts.workers.placement import cluster_request, waiting_for_resources
from polopt.rollouts.workers.worker_handle import WorkerHandle


def test_actor_waits_for_missing_resources(ray_session: None) -> None:
    options: dict[str, Any] = {"num_cpus": 0.125, "resources": {"absent": 1.0}}
    actor = ray.remote(FakeWorkerProcess).options(**options).remote()
    pending = actor.pid.remote()
    assert ray.wait([pending], timeout=2.0)[0] == []
    worker = WorkerHandle(1, actor, request=cluster_request(options))
    assert waiting_for_resources([worker]) == ([worker], 1)
    reserved = WorkerHandle(1, actor, request=None)
    assert waiting_for_resources([reserved]) == ([], 0)
    ray.kill(actor)


def test_started_actor_does_not_wait(ray_session: None) -> None:
    actor = ray.remote(FakeWorkerProcess).options(num_cpus=0).remote()
    ray.get(actor.pid.remote(), timeout=120.0)
    worker = WorkerHandle(1, actor, request=cluster_request({"num_cpus": 0}))
    assert waiting_for_resources([worker]) == ([], 0)
    ray.kill(actor)


def test_placed_actors_that_boot_slowly_do_not_wait(ray_session: None, tmp_path: Path) -> None:
    """Two actors have all resources; Ray shows them as it shows the third, which has none."""
    code = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.1)\n"
    (tmp_path / "sitecustomize.py").write_text(code.format(str(tmp_path / "boot")))
    options: dict[str, Any] = {
        "num_cpus": 0.125,
        "resources": {"seat": 4.0},
        "runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}},
    }
    slow_class = ray.remote(FakeWorkerProcess).options(**options)
    request = cluster_request(options)
    workers = [WorkerHandle(i, slow_class.remote(), request=request) for i in (1, 2)]
    wait_until(lambda: "seat" not in ray.available_resources())
    for _ in range(3):
        assert waiting_for_resources(workers) == ([], 0)
        time.sleep(0.5)
    workers.append(WorkerHandle(3, slow_class.remote(), request=request))
    wait_until(lambda: waiting_for_resources(workers) == (workers, 1), interval_s=0.2)
    for worker in workers:
        ray.kill(worker.actor)
    (tmp_path / "boot").touch()  # else Ray waits for these processes before it starts others


def test_placement_group_reserves_resources(ray_session: None) -> None:
    group = placement_group([{"CPU": 0.1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def inside() -> tuple[bool, bool]:
        options = {"num_cpus": 0.1}
        outside = {**options, "scheduling_strategy": "DEFAULT"}
        return cluster_request(options) is None, cluster_request(outside) is None

    assert inside() == (False, False)
    task = ray.remote(inside).options(num_cpus=0.1, scheduling_strategy=strategy)
    assert ray.get(task.remote(), timeout=120.0) == (True, False)
    remove_placement_group(group)
