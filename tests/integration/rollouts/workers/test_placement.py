"""Placement of workers: actors that wait for resources, and actors that do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from waiting import wait_until

from polopt.rollouts.transport.ray_channel import RayTransport, cluster_request
from polopt.rollouts.workers.call_runner import CallRunner


@pytest.fixture
def transport(ray_session: None) -> Iterator[RayTransport]:
    transport = RayTransport()
    yield transport
    transport.close()


def test_actor_waits_for_missing_resources(transport: RayTransport) -> None:
    options: dict[str, Any] = {"num_cpus": 0.125, "resources": {"absent": 1.0}}
    channel = transport.start(CallRunner, (), options, "process 1")
    assert transport.wait([channel.start], timeout_s=2.0) == []
    assert transport.waiting([channel]) == ([channel], 1)
    channel.request = None  # as if a placement group had reserved the resources
    assert transport.waiting([channel]) == ([], 0)
    transport.kill(channel)


def test_started_actor_does_not_wait(transport: RayTransport) -> None:
    channel = transport.start(CallRunner, (), {"num_cpus": 0}, "process 1")
    assert transport.wait([channel.start], timeout_s=120.0)
    assert transport.waiting([channel]) == ([], 0)
    transport.kill(channel)


def test_placed_actors_that_boot_slowly_do_not_wait(
    transport: RayTransport, tmp_path: Path
) -> None:
    """Two actors have their resources, and the third actor waits for resources. Ray reports the
    same state for all three actors."""
    code = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.1)\n"
    (tmp_path / "sitecustomize.py").write_text(code.format(str(tmp_path / "boot")))
    options: dict[str, Any] = {
        "num_cpus": 0.125,
        "resources": {"seat": 4.0},
        "runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}},
    }
    channels = [transport.start(CallRunner, (), options, f"process {i}") for i in (1, 2)]
    wait_until(lambda: "seat" not in ray.available_resources())
    for _ in range(3):
        assert transport.waiting(channels) == ([], 0)
        time.sleep(0.5)
    channels.append(transport.start(CallRunner, (), options, "process 3"))
    wait_until(lambda: transport.waiting(channels) == (channels, 1), interval_s=0.2)
    for channel in channels:
        transport.kill(channel)
    (tmp_path / "boot").touch()  # otherwise, Ray starts no other actors until these boot


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
