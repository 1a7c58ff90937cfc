"""A driver and workers on two nodes: calls through Ray, early stops, and progress on both nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from source_tree import ROOT

SCRIPT = """
import json, os, sys, tempfile, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

sys.path.insert(0, sys.argv[1])
import channel_helpers
from channel_helpers import Line, Notebook, note

from polopt.rollouts.transport.channel import TransportError
from polopt.rollouts.transport.socket_channel import open_transport

ray.cloudpickle.register_pickle_by_value(channel_helpers)  # workers cannot import it

def until_stopped(runner):
    until_s = time.monotonic() + 60.0
    while runner.stop_after() is None and time.monotonic() < until_s:
        time.sleep(0.01)
    return runner.stop_after()

def progress(runner):
    with runner.phase("learn"):
        pass

cluster = Cluster()
nodes = [cluster.add_node(num_cpus=2, object_store_memory=100_000_000) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
own = ray.get_runtime_context().get_node_id()
(elsewhere,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != own]

def start(kind, node, name):
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": place}
    transport = transports[kind]
    line = Line(kind, transport, transport.start(Notebook, (), options, name))
    line.note_started()
    return line

found = {}
transports = {kind: open_transport(kind, 60.0) for kind in ("auto", "ray", "socket")}
near, far = start("auto", own, "near"), start("auto", elsewhere, "far")
found["nodes"] = [line.channel.started.node == own for line in (near, far)]
for number in range(20):
    assert near.call(note, number) == far.call(note, number) == number
found["paths"] = [transports["auto"].paths([line.channel]) for line in (near, far)]
reference = near.call(note, list(range(1000)), by_reference=True)
assert far.call(note, reference) == list(range(1000))
reference = far.call(note, list(range(1000)), by_reference=True)
assert near.call(note, reference) == list(range(1000))
for kind, line in (("auto", far), ("ray", start("ray", elsewhere, "far too"))):
    ticket = line.send(until_stopped)
    time.sleep(1.0)
    before_s = line.channel.silent_s()
    line.channel.stop_early(next(Line._numbers) - 1, 7)
    found[f"stopped {kind}"] = line.answer(ticket).value
    found[f"silent {kind}"] = before_s
    line.call(progress)
    found[f"silent then {kind}"] = line.channel.silent_s()
agents = list(transports["auto"].through_ray._agents.values())
page = far.channel.started.control
found["pages"] = [ray.get(agent.silent_s.remote(page)) < 60.0 for agent in agents]
ray.kill(agents[0], no_restart=False)  # Ray starts a new agent, which opens the page again
until_s = time.monotonic() + 60.0
while (silent_s := far.channel.silent_s()) is None and time.monotonic() < until_s:
    time.sleep(0.1)
found["silent with a new agent"] = silent_s
transports["ray"].stop([line.channel], 10.0)
transports["auto"].kill(far.channel)
until_s = time.monotonic() + 60.0
while not found.get("forgotten") and time.monotonic() < until_s:
    try:  # a restarted agent may answer calls in another order
        ray.get(agents[0].silent_s.remote(page))
        time.sleep(0.1)
    except FileNotFoundError:
        found["forgotten"] = True
found["files"] = [path.name for path in Path(tempfile.gettempdir()).glob("polopt-control-*")]
try:
    start("socket", elsewhere, "far")
except TransportError as error:
    found["error"] = str(error)
for transport in transports.values():
    transport.close()
print(json.dumps(found))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:  # `tmp_path` can be too long for a Unix socket
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(ROOT / "tests")],
            env={**os.environ, "TMPDIR": own},
            capture_output=True,
            text=True,
            timeout=180.0,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_auto_goes_through_ray_to_another_node(found: dict[str, Any]) -> None:
    assert found["nodes"] == [True, False]
    assert found["paths"] == ["socket", "ray"]


def test_socket_to_another_node_is_one_clear_error(found: dict[str, Any]) -> None:
    assert "far cannot connect to the driver (it runs on another node)" in found["error"]
    assert "Use transport: auto or ray, or start all workers on the driver's node" in found["error"]


@pytest.mark.parametrize("kind", ["auto", "ray"])
def test_agent_carries_early_stops_and_progress(found: dict[str, Any], kind: str) -> None:
    assert found[f"stopped {kind}"] == 7
    assert found[f"silent {kind}"] > 0.5
    assert found[f"silent then {kind}"] < found[f"silent {kind}"]


def test_new_agent_reads_the_progress(found: dict[str, Any]) -> None:
    assert 0.0 <= found["silent with a new agent"] < 60.0


def test_pages_are_forgotten_and_their_files_removed(found: dict[str, Any]) -> None:
    assert found["pages"] == [True]
    assert found["forgotten"]
    assert not found["files"]
