"""RPC beside broken and hostile peers: raw sockets, wrong keys, stalled connections. Each test runs
for connections over tcp (CURVE) and within a node (PLAIN)."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from rpc_fakes import Echo, FakeActor, Proxy, SilentActor, call, connect_raw
from zmq.utils.monitor import recv_monitor_message

from polopt.rollouts.transport import messages, rpc_client
from polopt.rollouts.transport.endpoint import Address, Endpoint
from polopt.rollouts.transport.messages import (
    ANSWER,
    HELLO,
    decode,
    encode,
)
from polopt.rollouts.transport.rpc_client import RpcChannel, RpcClient, RpcError
from polopt.rollouts.transport.rpc_server import RpcServer

HOST = "127.0.0.1"
LIMIT_S = 60.0


def greeting(client: RpcClient) -> bytes:
    """Greeting of ZMTP 3.1, of a client (RFC 37)."""
    mechanism = b"PLAIN" if address_of(client).ipc else b"CURVE"
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


class Peer:
    """Raw DEALER socket."""

    def __init__(self, address: Address, keys: Endpoint | None, routing_id: bytes = b"") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        self.socket.rcvhwm = 1
        if routing_id:
            self.socket.routing_id = routing_id
        if keys is not None and address.ipc:
            self.socket.plain_username = keys.public_key
            self.socket.plain_password = keys.password.encode()
        elif keys is not None:
            self.socket.curve_serverkey = keys.server_key
            self.socket.curve_publickey = keys.public_key
            self.socket.curve_secretkey = keys.secret_key
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(address.ipc or address.tcp)

    def event(self, timeout_s: float = LIMIT_S) -> str:
        """Name of the next event; empty: none within the timeout."""
        if not self.monitor.poll(int(1e3 * timeout_s)):
            return ""
        return str(zmq.Event(recv_monitor_message(self.monitor)["event"]).name)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.context.destroy(linger=0)


def make_client(network: str) -> RpcClient:
    made = RpcClient(HOST, LIMIT_S)
    address = made._router.address
    assert address.ipc
    if network == "tcp":
        made._router.address = address._replace(ipc="")
    return made


@pytest.fixture(params=["tcp", "ipc"])
def network(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(network: str) -> Iterator[RpcClient]:
    made = make_client(network)
    yield made
    made.close()


@pytest.fixture
def worker(client: RpcClient) -> Iterator[RpcChannel]:
    actor = FakeActor(Echo())
    made = client.channel(None, actor, "worker 1")
    wait_until(client, lambda: made.connected)
    yield made
    made.close()
    actor.stop()


@pytest.fixture
def peers() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for peer in made:
        peer.close()


def wait_until(client: RpcClient, condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        client.poll(0.1)


def echo(client: RpcClient, channel: RpcChannel, value: Any) -> Any:
    future = call(channel, "echo", value)
    wait_until(client, lambda: future.done)
    return future.result()


def address_of(client: RpcClient) -> Address:
    return client._router.address


def silent_channel(client: RpcClient, name: str) -> tuple[RpcChannel, Endpoint]:
    """A channel whose worker the test plays, and the worker's keys."""
    actor = SilentActor()
    channel = client.channel(None, actor, name)
    return channel, actor.endpoints[0]


def silent_worker(
    client: RpcClient, peers: list[Any], name: str, routing_id: bytes = b""
) -> tuple[RpcChannel, Peer]:
    """A channel and a peer that has connected with its keys."""
    channel, keys = silent_channel(client, name)
    peers.append(Peer(address_of(client), keys, routing_id))
    peers[-1].socket.send_multipart(encode(HELLO))
    wait_until(client, lambda: channel.connected)
    return channel, peers[-1]


class Trap:
    """Unpickling it leaves a trace."""

    sprung: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return (Trap.sprung.append, (1,))


# ---- without a key -----------------------------------------------------------------------------


def test_silent_connections_delay_no_worker(client: RpcClient) -> None:
    silent = [connect_raw(address_of(client)) for _ in range(100)]
    began_s = time.monotonic()
    actor = FakeActor(Echo())
    channel = client.channel(None, actor, "worker 1")
    wait_until(client, lambda: channel.connected)
    assert echo(client, channel, 1) == 1
    assert time.monotonic() - began_s < LIMIT_S / 2.0, "100 timeouts of a handshake are 400 s"
    for connection in silent:
        connection.settimeout(LIMIT_S)
        with connection:
            while connection.recv(4096):  # the greeting of ZMTP; then the handshake times out
                pass
    channel.close()
    actor.stop()


@pytest.mark.parametrize("keys", ["none", "unknown", "wrong"])
def test_unauthenticated_peer_reaches_no_deserialiser(
    client: RpcClient, worker: RpcChannel, peers: list[Any], keys: str
) -> None:
    Trap.sprung.clear()
    assert echo(client, worker, 1) == 1
    endpoint = None
    if keys != "none":
        _, known = silent_channel(client, "worker 2")
        public, secret = zmq.curve_keypair()
        endpoint = known._replace(public_key=public, secret_key=secret)
        if keys == "wrong":
            endpoint = known._replace(server_key=public, password="wrong")
    peers.append(Peer(address_of(client), endpoint))
    # Once the handshake has failed, there is no connection to send to.
    with contextlib.suppress(zmq.Again):
        for frames in (encode(HELLO), encode(ANSWER, 1, Trap())):
            peers[0].socket.send_multipart(frames, zmq.NOBLOCK)
    pending = call(worker, "echo", 2)
    assert peers[0].event() == "DISCONNECTED"
    wait_until(client, lambda: pending.done)
    assert pending.result() == 2
    assert not Trap.sprung


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x04\x26\x05READY" * 9])
def test_malformed_bytes_disturb_no_worker(
    client: RpcClient, worker: RpcChannel, sent: bytes
) -> None:
    with connect_raw(address_of(client)) as raw:
        raw.sendall(sent if sent.startswith(b"GET") else greeting(client) + sent)
        assert echo(client, worker, 1) == 1


def memory_peak() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmPeak"))
    return int(line.split()[1]) * 1024


def test_four_gib_header_allocates_nothing(client: RpcClient, worker: RpcChannel) -> None:
    assert echo(client, worker, 1) == 1
    before = memory_peak()
    with connect_raw(address_of(client)) as raw:
        raw.settimeout(LIMIT_S)
        raw.sendall(greeting(client) + b"\x06" + struct.pack(">Q", 4 << 30))
        while raw.recv(4096):
            pass
    assert echo(client, worker, 2) == 2
    assert memory_peak() - before < 1 << 30


@pytest.mark.parametrize("excess", [1, messages.MAX_FRAME_BYTES])
def test_large_frame_before_authentication_disconnects(
    monkeypatch: pytest.MonkeyPatch, network: str, excess: int
) -> None:
    monkeypatch.setattr(messages, "HANDSHAKE_TIMEOUT_S", 100.0 * LIMIT_S)
    client = make_client(network)
    announced = messages.AUTO_FRAME_BYTES + messages.ENVELOPE_BYTES + excess
    with connect_raw(address_of(client)) as raw:
        raw.settimeout(LIMIT_S)
        raw.sendall(greeting(client) + b"\x06" + struct.pack(">Q", announced))
        while raw.recv(4096):
            pass
    client.close()


# ---- with a key --------------------------------------------------------------------------------


def test_worker_cannot_answer_for_another(client: RpcClient, peers: list[Any]) -> None:
    one, _ = silent_worker(client, peers, "worker 1")
    other, peer = silent_worker(client, peers, "worker 2")
    first, second = (call(each, "echo", number=1) for each in (one, other))
    peer.socket.send_multipart(encode(ANSWER, 1, "of 2"))
    wait_until(client, lambda: second.done)
    assert second.result() == "of 2"
    assert not first.done, "both calls have the same number"


def test_routing_id_cannot_be_chosen_to_take_calls(client: RpcClient, peers: list[Any]) -> None:
    one, keys = silent_channel(client, "worker 1")
    silent_worker(client, peers, "worker 2", routing_id=keys.public_key)
    assert not one.connected
    peers.append(Peer(address_of(client), keys))
    peers[1].socket.send_multipart(encode(HELLO))
    wait_until(client, lambda: one.connected)
    call(one, "echo", "for worker 1")
    assert peers[1].socket.poll(int(1e3 * LIMIT_S))
    frames = peers[1].socket.recv_multipart(copy=False)
    assert decode(frames)[:2] == (b"echo", ("for worker 1",))


def test_key_of_a_closed_channel_is_refused(client: RpcClient, peers: list[Any]) -> None:
    channel, keys = silent_channel(client, "worker 1")
    peers.append(Peer(address_of(client), keys))
    assert peers[0].event() == "HANDSHAKE_SUCCEEDED"
    channel.close()
    peers.append(Peer(address_of(client), keys))
    assert peers[1].event() == "DISCONNECTED"


def test_half_a_message_blocks_nothing(client: RpcClient, worker: RpcChannel) -> None:
    actor = FakeActor(Echo())
    proxy = Proxy(address_of(client))
    address, client._router.address = client._router.address, proxy.address
    stalled = client.channel(None, actor, "worker 2")
    client._router.address = address
    wait_until(client, lambda: stalled.connected)
    assert echo(client, stalled, 1) == 1
    proxy.stall(after_bytes=20_000)
    pending = call(stalled, "echo", np.zeros(10_000))
    wait_until(client, lambda: proxy.left == 0)
    for number in range(20):
        began_s = time.monotonic()
        client.poll(0.0)
        assert echo(client, worker, number) == number
        assert time.monotonic() - began_s < LIMIT_S / 4.0
    assert not pending.done
    proxy.close()
    stalled.close()
    actor.stop()


def test_frame_over_the_limit_disconnects_its_peer(
    client: RpcClient, worker: RpcChannel, peers: list[Any]
) -> None:
    channel, peer = silent_worker(client, peers, "worker 2")
    future = call(channel, "echo", 1)
    assert peer.event() == "HANDSHAKE_SUCCEEDED"
    too_large = messages.AUTO_FRAME_BYTES + messages.ENVELOPE_BYTES + 1
    peer.socket.send_multipart([*encode(ANSWER, 1), bytes(too_large)])
    assert peers[0].event() == "DISCONNECTED"
    assert echo(client, worker, 1) == 1
    assert not future.done


def test_frame_of_the_limit_arrives(client: RpcClient, worker: RpcChannel) -> None:
    largest = np.full(messages.AUTO_FRAME_BYTES, 7, np.uint8)
    np.testing.assert_array_equal(echo(client, worker, largest), largest)
    assert client.num_large_messages == 0


def test_peer_that_reads_nothing_fails_and_blocks_nothing(
    client: RpcClient, peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_client, "REASON_TIMEOUT_S", 0.1)
    channel, _ = silent_worker(client, peers, "worker 1")
    first = call(channel, "echo", 1)
    calls = 0
    while not channel.broken:
        call(channel, "echo", bytes(20_000))
        calls += 1
        assert calls < 10 * messages.HIGH_WATER_MARK
    with pytest.raises(RpcError, match="worker 1: Resource temporarily unavailable"):
        first.result()
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < LIMIT_S / 2.0, "LINGER limits closing"


def test_call_to_a_disconnected_peer_fails_at_once(
    client: RpcClient, peers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_client, "REASON_TIMEOUT_S", 0.1)
    channel, _ = silent_worker(client, peers, "worker 1")
    peers.pop().close()
    until_s = time.monotonic() + LIMIT_S
    while not channel.broken:  # until ZeroMQ has noticed
        assert time.monotonic() < until_s
        last = call(channel, "echo", 1)
    with pytest.raises(RpcError, match="worker 1"):
        last.result()


def test_missing_heartbeats_end_serve(client: RpcClient) -> None:
    """The connection stays open, but forwards nothing, as to a host without power."""
    channel, keys = silent_channel(client, "worker 1")
    proxy = Proxy(address_of(client))
    endpoint = keys._replace(address=proxy.address, heartbeat_timeout_s=0.5)
    server, ended = RpcServer(), []
    assert not server.connect(endpoint)
    thread = threading.Thread(target=lambda: ended.append(server.serve(Echo(), endpoint)))
    thread.start()
    wait_until(client, lambda: channel.connected)
    proxy.stall()
    thread.join(LIMIT_S)
    assert ended == ["the connection was lost"]
    proxy.close()
