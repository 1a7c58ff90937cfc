"""A firewall between a worker and the driver, in a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rpc_fakes import Echo, FakeActor, FakeMethod, call

from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.rpc_client import RpcClient
from polopt.rollouts.transport.rpc_server import CONNECT_TIMEOUT_S

LIMIT_S = 60.0
NAMESPACE, OUTSIDE, INSIDE = f"polopt{os.getpid() % 10_000}", "10.213.77.1", "10.213.77.2"
WORKER = """
import json, sys, time
from polopt.rollouts.transport.endpoint import Address, Endpoint
from polopt.rollouts.transport.rpc_server import RpcServer
print("ready", flush=True)
values = json.loads(sys.stdin.readline())
keys = [value.encode() for value in values[1:4]]
endpoint = Endpoint(Address(values[0][0]), *keys, *values[4:])  # no files in common
began_s = time.monotonic()
problem = RpcServer().connect(endpoint)
print(json.dumps([problem, time.monotonic() - began_s]), flush=True)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30.0)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace whose only link leads to this one."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "iptables")):
        pytest.skip("needs root, iproute2 and iptables")
    try:
        run("ip", "netns", "add", NAMESPACE)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    try:
        run("ip", "link", "add", f"{NAMESPACE}a", "type", "veth", "peer", "name", f"{NAMESPACE}b")
        run("ip", "link", "set", f"{NAMESPACE}b", "netns", NAMESPACE)
        run("ip", "addr", "add", f"{OUTSIDE}/24", "dev", f"{NAMESPACE}a")
        run("ip", "link", "set", f"{NAMESPACE}a", "up")
        inside = ("ip", "netns", "exec", NAMESPACE)
        run(*inside, "ip", "addr", "add", f"{INSIDE}/24", "dev", f"{NAMESPACE}b")
        run(*inside, "ip", "link", "set", f"{NAMESPACE}b", "up")
        yield NAMESPACE
    finally:
        run("ip", "netns", "del", NAMESPACE)


class NamespaceActor(FakeActor):
    """Actor whose connection is made by a process in the namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(Echo())
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.duration_s = 0.0

    @property
    def connect(self) -> FakeMethod:
        def connect(endpoint: Endpoint) -> str:
            values = [v.decode() if isinstance(v, bytes) else v for v in endpoint]
            said, _ = self.process.communicate(json.dumps(values) + "\n", timeout=LIMIT_S)
            problem, self.duration_s = json.loads(said)
            return str(problem)

        return FakeMethod(self, connect)


@pytest.mark.parametrize("target", ["none", "DROP", "REJECT"])
def test_only_the_worker_behind_a_firewall_uses_ray(
    namespace: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    if target != "none":
        rule = ("OUTPUT", "-p", "tcp", "-j", target)
        try:
            run("ip", "netns", "exec", namespace, "iptables", "-A", *rule)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"iptables is not permitted: {error.stderr.decode().strip()}")
    client = RpcClient(OUTSIDE, LIMIT_S)
    behind, other = NamespaceActor(namespace), FakeActor(Echo())
    channels = [client.channel(None, behind, "worker 1"), client.channel(None, other, "worker 2")]
    until_s = time.monotonic() + LIMIT_S
    while not (channels[1].connected and (channels[0].connected or channels[0].refused)):
        assert time.monotonic() < until_s
        client.poll(0.2)
    assert channels[0].refused == (target != "none")
    assert not channels[1].refused
    assert CONNECT_TIMEOUT_S < 5.0
    assert behind.duration_s < 30.0, "limited, with room for a busy machine"
    warnings = [record for record in caplog.records if "cannot connect" in record.message]
    assert len(warnings) == (target != "none")
    future = call(channels[1], "echo", 1)
    while not future.done:
        assert time.monotonic() < until_s
        client.poll(0.2)
    assert future.result() == 1
    client.close()
    behind.stop()
    other.stop()
