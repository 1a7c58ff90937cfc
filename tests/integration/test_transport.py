"""Calls of actors over ZeroMQ and through Ray: order, failures, and the choice of a transport."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from polopt.common.config import ConfigError
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.messages import MAX_FRAME_BYTES
from polopt.rollouts.transport.mixed_wait import wait_any
from polopt.rollouts.transport.rpc_channel import RpcChannel
from polopt.rollouts.transport.rpc_client import RpcClient, TransportError, open_rpc
from polopt.rollouts.transport.rpc_future import RpcFuture
from polopt.rollouts.transport.rpc_server import RpcServer

HOST = "127.0.0.1"
LIMIT_S = 60.0


class Recorder:
    """Actor that takes calls through Ray and over ZeroMQ, and lists them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.server = RpcServer()

    def connect(self, endpoint: Endpoint) -> str:
        return self.server.connect(endpoint)

    def serve(self, endpoint: Endpoint) -> str:
        return self.server.serve(self, endpoint)

    def record(self, value: Any) -> Any:
        self.calls.append(value)
        return value

    def fail(self) -> None:
        raise ZeroDivisionError("division in the worker")

    def exit(self) -> None:
        os._exit(1)

    def large(self, kill_after_s: float) -> bytes:
        """An answer that takes a while to send; the process is killed meanwhile."""
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
        return bytes(MAX_FRAME_BYTES - 1000)

    def all(self) -> list[Any]:
        return self.calls


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[Callable[[], Any]]:
    made = []

    def make() -> Any:
        made.append(ray.remote(num_cpus=0)(Recorder).remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def client() -> Iterator[RpcClient]:
    made = RpcClient(HOST, LIMIT_S)
    yield made
    made.close()


def connect(client: RpcClient, actor: Any, name: str = "worker 1") -> RpcChannel:
    channel = client.channel(None, actor, name)
    until_s = time.monotonic() + LIMIT_S
    while not channel.connected:
        assert time.monotonic() < until_s
        client.poll(1.0)
    return channel


def result(client: RpcClient, call: Any) -> Any:
    if not isinstance(call, RpcFuture):
        return ray.get(call, timeout=LIMIT_S)
    until_s = time.monotonic() + LIMIT_S
    while not call.done:
        assert time.monotonic() < until_s
        client.poll(1.0)
    return call.result()


def test_actor_calls_and_rpc_keep_their_order(client: RpcClient, actors: Any) -> None:
    actor = actors()
    channel = connect(client, actor)
    calls: list[Any] = []
    for number in range(60):
        if number % 7 in (2, 3):
            channel.pause()
            calls.append(actor.record.remote(number))
        else:
            calls.append(channel.call("record", (number,)))
    assert [result(client, call) for call in calls] == list(range(60))
    channel.pause()
    assert ray.get(actor.all.remote(), timeout=LIMIT_S) == list(range(60))


def test_exception_is_the_one_that_ray_reports(client: RpcClient, actors: Any) -> None:
    call = connect(client, actors()).call("fail", ())
    with pytest.raises(ray.exceptions.RayTaskError, match="division in the worker"):
        result(client, call)


@pytest.mark.parametrize("paused", [False, True])
def test_death_of_a_process_is_reported(client: RpcClient, actors: Any, paused: bool) -> None:
    actor = actors()
    channel = connect(client, actor)
    assert result(client, channel.call("record", (1,))) == 1
    if paused:
        channel.pause()
        actor.exit.remote()
        call = channel.call("record", (2,))
    else:
        call = channel.call("exit", ())
    with pytest.raises(ray.exceptions.RayActorError):
        result(client, call)


@pytest.mark.parametrize("kill_after_s", [0.01, 0.05, 0.1])
def test_kill_within_a_message_fails_only_that_worker(
    client: RpcClient, actors: Any, kill_after_s: float
) -> None:
    other = connect(client, actors(), "worker 2")
    assert result(client, other.call("record", (1,))) == 1
    call = connect(client, actors()).call("large", (kill_after_s,))
    assert result(client, other.call("record", (2,))) == 2
    with contextlib.suppress(ray.exceptions.RayActorError):
        assert len(result(client, call)) == MAX_FRAME_BYTES - 1000, "sent before the kill"
    assert result(client, other.call("record", (3,))) == 3


def test_wait_returns_the_first_ended_call_in_order(client: RpcClient, actors: Any) -> None:
    serving, idle = actors(), actors()
    channel = connect(client, serving)
    over_zmq = channel.call("record", (1,))
    assert result(client, over_zmq) == 1
    through_ray = idle.record.remote(2)
    ray.wait([through_ray], timeout=LIMIT_S)
    unanswered = RpcFuture("record", Future())
    behind = serving.record.remote(3)  # runs once `serve` has ended
    pending = [unanswered, behind]
    assert wait_any(client, [*pending, over_zmq, through_ray], LIMIT_S) == [over_zmq]
    assert wait_any(client, [*pending, through_ray, over_zmq], LIMIT_S) == [through_ray]
    for timeout_s in (0.0, 0.2):
        began_s = time.monotonic()
        assert wait_any(client, pending, timeout_s) == []
        assert timeout_s <= time.monotonic() - began_s < LIMIT_S
    channel.pause()
    assert wait_any(client, pending, LIMIT_S) == [behind]
    assert time.monotonic() - began_s < LIMIT_S, "it waits for calls through Ray, too"


# ---- config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "message_bytes", "over_zmq"),
    [
        ("auto", 100_000, True),
        ("auto", 100_001, False),
        ("ray", 100, False),
        ("zmq", 10_000_000, True),
    ],
)
def test_size_of_messages_decides_for_auto(
    ray_session: None, transport: str, message_bytes: int, over_zmq: bool
) -> None:
    client = open_rpc(transport, message_bytes, LIMIT_S)
    assert (client is not None) == over_zmq
    if client is not None:
        assert client.address.startswith(f"tcp://{ray.util.get_node_ip_address()}:")
        client.close()


def test_zmq_with_too_large_messages_is_an_error(ray_session: None) -> None:
    with pytest.raises(ConfigError, match=r"'transport'.*Allowed: up to"):
        open_rpc("zmq", MAX_FRAME_BYTES + 1, LIMIT_S)


def test_only_auto_goes_through_ray_where_nothing_can_listen(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.77")
    assert open_rpc("auto", 100, LIMIT_S) is None
    assert "cannot listen at 192.0.2.77" in caplog.text
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.77"):
        open_rpc("zmq", 100, LIMIT_S)


BIND = """
import os, sys, tempfile
from polopt.rollouts.transport.router import Router

def entries():
    return len(os.listdir(tempfile.gettempdir()))

router = Router("127.0.0.1", 60.0)
assert entries() == 1
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert entries() == 1, "removed by a forked process"
    print("bound")
sys.exit()
"""


def test_process_that_ends_without_close_leaves_no_directory() -> None:
    command = [sys.executable, "-c", BIND]
    with tempfile.TemporaryDirectory() as parent:  # `tmp_path` can be too long for a Unix socket
        env = {**os.environ, "TMPDIR": parent}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout) == (0, "bound\n"), done.stderr
        assert not os.listdir(parent)


@pytest.mark.parametrize(("direct_calls", "transport"), [(True, "auto"), (False, "ray")])
def test_direct_calls_is_read_as_transport(direct_calls: bool, transport: str) -> None:
    config = RolloutConfig.parse({"direct_calls": direct_calls})
    assert config.transport == transport
