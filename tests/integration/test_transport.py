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
from typing import Any

import pytest
import ray
from rpc_fakes import CalledTarget, call

from polopt.common.config import ConfigError
from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.messages import AUTO_FRAME_BYTES, MAX_FRAME_BYTES
from polopt.rollouts.transport.rpc_client import (
    RpcChannel,
    RpcClient,
    RpcFuture,
    TransportError,
    open_rpc,
)
from polopt.rollouts.transport.rpc_server import RpcServer

HOST = "127.0.0.1"
LIMIT_S = 60.0


class Recorder(CalledTarget):
    """Actor that takes calls through Ray and over ZeroMQ, and lists them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.server = RpcServer()
        self.dies_in_between = False

    def connect(self, endpoint: Endpoint) -> str:
        return self.server.connect(endpoint)

    def serve(self, endpoint: Endpoint) -> str:
        return self.server.serve(self, endpoint)

    def record(self, value: Any) -> Any:
        self.calls.append(value)
        return value

    def take_large_answer(self, endpoint: Endpoint, number: int) -> list[bytes]:
        if self.dies_in_between:
            os._exit(1)
        return self.server.take_large_answer(endpoint, number)

    def zeros(self, count: int, dies_in_between: bool = False) -> bytes:
        self.dies_in_between = dies_in_between
        return bytes(count)

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
        options = {"num_cpus": 0, "concurrency_groups": {"control": 1}}
        made.append(ray.remote(**options)(Recorder).remote())
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


def result(client: RpcClient, made: Any) -> Any:
    if not isinstance(made, RpcFuture):
        return ray.get(made, timeout=LIMIT_S)
    until_s = time.monotonic() + LIMIT_S
    while not made.done:
        assert time.monotonic() < until_s
        client.poll(1.0)
    return made.result()


def test_actor_calls_and_rpc_keep_their_order(client: RpcClient, actors: Any) -> None:
    actor = actors()
    channel = connect(client, actor)
    calls: list[Any] = []
    for number in range(60):
        if number % 7 in (2, 3):
            channel.pause()
            calls.append(actor.record.remote(number))
        else:
            calls.append(call(channel, "record", number))
    assert [result(client, made) for made in calls] == list(range(60))
    channel.pause()
    assert ray.get(actor.all.remote(), timeout=LIMIT_S) == list(range(60))


def test_exception_is_the_one_that_ray_reports(client: RpcClient, actors: Any) -> None:
    failing = call(connect(client, actors()), "fail")
    with pytest.raises(ray.exceptions.RayTaskError, match="division in the worker"):
        result(client, failing)


@pytest.mark.parametrize("paused", [False, True])
def test_death_of_a_process_is_reported(client: RpcClient, actors: Any, paused: bool) -> None:
    actor = actors()
    channel = connect(client, actor)
    assert result(client, call(channel, "record", 1)) == 1
    if paused:
        channel.pause()
        actor.exit.remote()
        lost = call(channel, "record", 2)
    else:
        lost = call(channel, "exit")
    with pytest.raises(ray.exceptions.RayActorError):
        result(client, lost)


@pytest.mark.parametrize("kill_after_s", [0.01, 0.05, 0.1])
def test_kill_within_a_message_fails_only_that_worker(actors: Any, kill_after_s: float) -> None:
    client = RpcClient(HOST, LIMIT_S, required=True)
    other = connect(client, actors(), "worker 2")
    assert result(client, call(other, "record", 1)) == 1
    large = call(connect(client, actors()), "large", kill_after_s)
    assert result(client, call(other, "record", 2)) == 2
    with contextlib.suppress(ray.exceptions.RayActorError):
        assert len(result(client, large)) == MAX_FRAME_BYTES - 1000, "sent before the kill"
    assert result(client, call(other, "record", 3)) == 3
    client.close()


def test_large_answer_comes_through_ray(client: RpcClient, actors: Any) -> None:
    channel = connect(client, actors())
    count = AUTO_FRAME_BYTES + 1
    large, small = call(channel, "zeros", count), call(channel, "zeros", 1)
    assert result(client, large) == bytes(count)
    assert result(client, small) == bytes(1)
    assert client.num_large_messages == 1
    assert channel.open, "the worker goes on serving"


def test_death_before_a_large_answer_is_fetched_is_reported(client: RpcClient, actors: Any) -> None:
    lost = call(connect(client, actors()), "zeros", AUTO_FRAME_BYTES + 1, True)
    with pytest.raises(ray.exceptions.RayActorError):
        result(client, lost)


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
from polopt.rollouts.transport.rpc_client import Router

def entries():
    return len(os.listdir(tempfile.gettempdir()))

router = Router("127.0.0.1", 60.0, 1 << 20)
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
