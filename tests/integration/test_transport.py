"""`SocketTransport`: connections, broken and hostile peers, and calls that go through Ray."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import ray
from channel_helpers import LIMIT_S, NO_RESOURCES, Line, Notebook, note, note_slowly, pid, wait_for

from polopt.rollouts.transport import socket_channel
from polopt.rollouts.transport.channel import ChannelError, TransportError
from polopt.rollouts.transport.ray_channel import RayChannel, RayTransport
from polopt.rollouts.transport.socket_channel import (
    SocketChannel,
    SocketTransport,
    open_transport,
)
from polopt.rollouts.transport.sockets import MAX_HANDSHAKES, dial, shut_down

Make = Callable[..., Line]


@pytest.fixture
def transport(ray_session: None) -> Iterator[SocketTransport]:
    made = SocketTransport(RayTransport(), LIMIT_S)
    yield made
    made.close()


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[list[RayChannel]]:
    """Returns the channels through Ray of two processes. Each test makes new connections to these
    processes."""
    through_ray = RayTransport()
    made = [through_ray.start(Notebook, (), NO_RESOURCES, f"worker {i}") for i in (1, 2)]
    for channel in made:
        channel.note_started(channel.start.result(LIMIT_S))
    yield made
    for channel in made:
        through_ray.kill(channel)


@pytest.fixture
def lines(transport: SocketTransport, actors: list[RayChannel]) -> list[Line]:
    return [Line("socket", transport, SocketChannel(channel, transport)) for channel in actors]


def connect(*lines: Line) -> None:
    for line in lines:
        channel: Any = line.channel
        channel.connect()
        wait_for(line.transport, lambda channel=channel: channel.is_connected)


@pytest.fixture
def connected(lines: list[Line]) -> list[Line]:
    connect(*lines)
    return lines


@ray.remote
class Silent:
    """An actor that does not connect and does not answer. A test can act as this process on the
    socket."""

    def booted(self) -> None:
        pass

    def make(self) -> None:
        pass

    def serve(self, endpoint: Any) -> str:
        time.sleep(3600.0)
        return ""

    def run_encoded(self, call: bytes) -> None:
        pass


@pytest.fixture(scope="module")
def silent_actor(ray_session: None) -> Iterator[Any]:
    actor: Any = Silent.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    yield actor
    ray.kill(actor)


@pytest.fixture
def played(transport: SocketTransport, silent_actor: Any) -> Iterator[tuple[Line, Connection]]:
    """Returns a `Line` to a process, and the end of the connection that belongs to the process. The
    test acts as the process."""
    channel: Any = SocketChannel(
        RayChannel(silent_actor, "worker 3", None, transport.through_ray, ()), transport
    )
    endpoint = channel._endpoint = transport.endpoint_for(channel)
    peer = dial(endpoint.address, endpoint.key, LIMIT_S)
    peer.send_bytes(endpoint.token)
    wait_for(transport, lambda: channel.is_connected)
    yield Line("socket", transport, channel), peer
    peer.close()


# ---- what goes over the socket -----------------------------------------------------------------


def test_calls_go_through_ray_until_the_process_has_connected(lines: list[Line]) -> None:
    line = lines[0]
    transport: Any = line.transport
    tickets = [line.send(note, number) for number in range(5)]
    connect(line)
    before = transport.num_calls
    tickets += [line.send(note, number) for number in range(5, 10)]
    assert [line.answer(ticket).value for ticket in tickets] == list(range(10))
    assert transport.num_calls == before + 5


def test_connected_process_does_not_connect_again(connected: list[Line]) -> None:
    line = connected[0]
    channel: Any = line.channel
    connection = channel._connection
    channel.connect()
    assert line.call(note, 1) == 1
    assert channel._connection is connection
    assert channel._connecting is None


def test_connection_that_is_admitted_late_is_the_only_connection(
    transport: SocketTransport, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy driver may hear through Ray that the process has connected, before the thread of the
    listener has admitted the connection. A second connection would end the first connection, and
    the calls over the first connection would fail."""
    line, channel, listener = lines[0], cast(Any, lines[0].channel), cast(Any, transport._listener)
    admit, may_admit = listener._admitted, threading.Event()

    def admit_late(connection: Connection, token: bytes) -> None:
        may_admit.wait(LIMIT_S)
        admit(connection, token)

    monkeypatch.setattr(listener, "_admitted", admit_late)
    channel.connect()
    connecting = channel._connecting
    wait_for(transport, connecting.done)
    transport.poll(0.1)
    assert line.call(note, 1) == 1
    assert not channel.is_connected
    may_admit.set()
    wait_for(transport, lambda: channel.is_connected)
    connection, before = channel._connection, transport.num_calls
    assert [line.call(note, number) for number in range(5)] == list(range(5))
    assert transport.num_calls == before + 5
    assert channel._connection is connection


def test_only_calls_that_need_ray_go_through_ray(connected: list[Line]) -> None:
    """Calls through Ray can come between calls over the socket. The connection stays the same."""
    line = connected[0]
    transport: Any = line.transport
    channel: Any = line.channel
    connection, reference = channel._connection, transport.put(1)
    room = channel._room
    for argument, by_reference, over_socket in [
        (1, False, 1),
        (reference, False, 0),
        (bytes(room + 1), False, 0),
        (bytes(room // 2), False, 1),
        (1, True, 0),
        (1, False, 1),
    ]:
        before = transport.num_calls
        line.call(note, argument, by_reference=by_reference)
        assert transport.num_calls - before == over_socket, argument
    assert channel._connection is connection
    assert channel._room == room, "answered calls take no space in the buffer"


def test_pending_call_through_ray_slows_no_call_over_a_socket(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver asks Ray rarely, because an answer from Ray takes longer than a call."""
    first, second = connected
    num_asked, ask = 0, ray.wait

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return ask(*args, **options)

    monkeypatch.setattr(ray, "wait", counted)
    began_s = time.monotonic()
    pending = first.send(note_slowly, 1, 2.0, by_reference=True)
    for number in range(100):
        ticket = second.send(note, number)
        until_s = time.monotonic() + LIMIT_S
        while ticket not in second.transport.wait([pending, ticket], 1.0):
            assert time.monotonic() < until_s
        assert ticket.result(LIMIT_S).value == number
    assert num_asked <= 2 + (time.monotonic() - began_s) / socket_channel.RECHECK_S
    assert first.transport.get(first.answer(pending).value) == 1


def test_full_buffer_sends_the_next_calls_through_ray(connected: list[Line]) -> None:
    line = connected[0]
    transport: Any = line.transport
    channel: Any = line.channel
    size, before = channel._room // 5, transport.num_calls
    tickets = [line.send(note_slowly, 0, 0.5)]
    tickets += [line.send(note, (number, bytes(size))) for number in range(1, 10)]
    sent = transport.num_calls - before
    assert 2 <= sent < 10
    values = [line.answer(ticket).value for ticket in tickets]
    assert [value[0] for value in values[1:]] == list(range(1, 10))


def test_answer_larger_than_the_buffer_does_not_stop_the_process(connected: list[Line]) -> None:
    """The driver may learn for a while before it reads the answer."""
    line = connected[0]
    began_s = time.monotonic()
    large = line.send(lambda book: bytes(5_000_000))
    noted = line.send(lambda book: time.monotonic())
    time.sleep(2.0)
    assert len(line.answer(large).value) == 5_000_000
    assert line.answer(noted).value - began_s < 1.9


# ---- connections that end ----------------------------------------------------------------------


def test_lost_connection_is_made_again(connected: list[Line]) -> None:
    line = connected[0]
    channel: Any = line.channel
    pending = line.send(note_slowly, 1, 0.3)
    channel.fail("of the test")
    with pytest.raises(ChannelError, match="of the test"):
        line.answer(pending)
    assert line.call(note, 2) == 2
    connect(line)
    assert line.call(note, 3) == 3


def test_end_of_an_earlier_connection_does_not_end_the_next_connection(
    connected: list[Line],
) -> None:
    """Ray may report this end after the process has connected again."""
    line = connected[0]
    channel: Any = line.channel
    line.call(note, 1)
    earlier = channel._serving
    channel.fail("of the test")
    connect(line)
    pending = line.send(note_slowly, 2, 0.3)
    assert "lost" in earlier.result(LIMIT_S)
    channel.actor_call_ended(earlier)
    assert channel.is_connected
    assert line.answer(pending).value == 2


def test_ctrl_c_while_receiving_ends_the_calls_and_breaks_nothing(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = connected
    channel: Any = line.channel

    def interrupted(connection: Connection, maxlength: int | None = None) -> bytes:
        monkeypatch.undo()
        raise KeyboardInterrupt

    tickets = [line.send(note, number) for number in range(3)]
    monkeypatch.setattr(Connection, "recv_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.answer(tickets[0])
    for ticket in tickets:
        with pytest.raises(ChannelError, match="receiving was interrupted"):
            line.answer(ticket)
    assert other.call(note, 1) == 1
    assert line.call(note, 2) == 2
    connect(line)
    assert channel.is_connected


def test_ctrl_c_while_sending_ends_the_calls_and_breaks_nothing(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = connected
    pending = line.send(note_slowly, 1, 0.3)

    def interrupted(connection: Connection, message: bytes) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "send_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.send(note, 2)
    with pytest.raises(ChannelError, match="sending was interrupted"):
        line.answer(pending)
    assert other.call(note, 1) == 1
    assert line.call(note, 2) == 2


def test_closed_transport_ends_serving_and_its_calls(
    transport: SocketTransport, lines: list[Line]
) -> None:
    connect(*lines)
    line = lines[0]
    channel: Any = line.channel
    pending = line.send(note_slowly, 1, 0.3)
    serving = channel._serving
    transport.close()
    assert pending.ended()
    assert "the connection was lost" in serving.result(LIMIT_S)
    again = Line("ray", RayTransport(), channel.through_ray)
    assert again.call(note, 2) == 2
    transport.close()


def test_fork_in_a_process_does_not_keep_its_connection(
    transport: SocketTransport, ray_session: None
) -> None:
    """A process that an environment forks may live a moment longer than the worker."""
    channel = transport.start(Notebook, (), NO_RESOURCES, "worker 1")
    line = Line("socket", transport, channel)
    line.note_started()
    connect(line)

    def fork(book: Notebook) -> int:
        if not (child := os.fork()):
            time.sleep(20.0)
            os._exit(0)
        return child

    child, pending = line.call(fork), line.send(note_slowly, 1, 1e4)
    began_s = time.monotonic()
    os.kill(channel.started.pid, 9)
    wait_for(transport, lambda: not channel.is_connected)
    assert time.monotonic() - began_s < 15.0
    os.kill(child, 9)
    with pytest.raises(ChannelError):
        line.answer(pending)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_connections_leave_no_descriptors_threads_and_files(actors: list[RayChannel]) -> None:
    def run() -> tuple[int, int]:
        transport = SocketTransport(RayTransport(), LIMIT_S)
        made = [Line("socket", transport, SocketChannel(actor, transport)) for actor in actors]
        connect(*made)
        for line in made:
            assert line.call(note, 1) == 1
        transport.close()
        assert not os.path.exists(transport._listener.address)
        del transport, made, line
        gc.collect()
        time.sleep(0.2)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    run()
    before = run()
    for _ in range(3):
        after = run()
    assert after <= before


# ---- peers that are slow, broken or hostile ----------------------------------------------------


def test_peer_that_reads_nothing_does_not_block(played: tuple[Line, Connection]) -> None:
    line, _ = played
    channel: Any = line.channel
    began_s = time.monotonic()
    for number in range(200):
        if len(channel._pending) < number:  # the buffer is full, so the last call went through Ray
            break
        line.send(note, bytes(5_000))
    assert number < 199
    assert time.monotonic() - began_s < LIMIT_S / 4.0
    channel.fail("of the test")


def test_half_a_message_delays_for_a_limited_time(
    connected: list[Line], played: tuple[Line, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it sent a message causes this."""
    line, peer = played
    channel: Any = line.channel
    socket_channel.limit(channel._connection, 0.5)
    monkeypatch.setattr(socket_channel, "REASON_TIMEOUT_S", 0.1)
    pending = line.send(note, 1)
    os.write(peer.fileno(), (100).to_bytes(4, "big") + b"half")
    began_s = time.monotonic()
    with pytest.raises(ChannelError, match="worker 3"):
        line.answer(pending)
    assert time.monotonic() - began_s < LIMIT_S / 4.0
    assert connected[0].call(note, 1) == 1
    assert socket_channel.MESSAGE_TIMEOUT_S <= 10.0


@pytest.mark.parametrize("sent", [b"", b"123", b"\xff" * 8 + b"no call has this number"])
def test_answer_to_no_call_is_ignored(
    connected: list[Line], played: tuple[Line, Connection], sent: bytes
) -> None:
    line, peer = played
    channel: Any = line.channel
    pending = line.send(note, 1)
    peer.send_bytes(sent)
    assert connected[0].call(note, 1) == 1
    assert channel.is_connected
    assert not pending.ended()


def peer_of(transport: SocketTransport) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(LIMIT_S)
    made.connect(transport._listener.address)
    return made


def test_wrong_tokens_reach_no_channel(connected: list[Line]) -> None:
    transport: Any = connected[0].transport
    for token in (b"", b"wrong", bytes(16), bytes(64), bytes(10_000)):
        peer = dial(transport._listener.address, transport._key, LIMIT_S)
        with contextlib.suppress(BrokenPipeError):
            peer.send_bytes(token)
        assert [line.call(note, 1) for line in connected] == [1, 1]
        transport.poll(0.2)
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.recv_bytes()
        peer.close()


def test_token_admits_only_one_connection(
    transport: SocketTransport, connected: list[Line]
) -> None:
    channel: Any = connected[0].channel
    endpoint = channel._endpoint
    peer = dial(endpoint.address, endpoint.key, LIMIT_S)
    peer.send_bytes(endpoint.token)
    assert connected[0].call(note, 1) == 1
    transport.poll(0.2)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.recv_bytes()
    assert connected[0].call(note, 1) == 1
    peer.close()


def test_secrets_are_not_printed(transport: SocketTransport, lines: list[Line]) -> None:
    channel: Any = lines[0].channel
    endpoint = transport.endpoint_for(channel)
    assert endpoint.key.hex() not in repr(endpoint)
    assert repr(endpoint.key) not in repr(endpoint)
    assert repr(endpoint.token) not in repr(endpoint)


class Trap:
    """An object that leaves a trace when it is unpickled."""

    sprung: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return (Trap.sprung.append, (1,))


@pytest.mark.parametrize("kind", ["silent", "garbage", "an object", "wrong key"])
def test_hostile_peers_delay_no_call_and_no_worker(
    transport: SocketTransport, lines: list[Line], kind: str
) -> None:
    """Some peers connect before the first worker, and some connect after it."""
    Trap.sprung.clear()
    first, second = lines
    began_s = time.monotonic()
    with contextlib.ExitStack() as peers:

        def attack() -> None:
            for _ in range(20):
                if kind == "wrong key":
                    with pytest.raises(AuthenticationError):
                        dial(transport._listener.address, b"wrong", LIMIT_S)
                    continue
                peer = peers.enter_context(peer_of(transport))
                if kind == "garbage":
                    peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                elif kind == "an object":
                    Connection(os.dup(peer.fileno())).send(Trap())

        attack()
        connect(first)
        attack()
        for number in range(50):
            assert first.call(note, number) == number
        connect(second)
        assert second.call(note, 1) == 1
    assert time.monotonic() - began_s < LIMIT_S / 2.0
    assert not Trap.sprung


def test_thousand_connections_break_nothing(transport: SocketTransport, lines: list[Line]) -> None:
    first, second = lines
    connect(first)
    threads, began_s = threading.active_count(), time.monotonic()
    with contextlib.ExitStack() as peers:
        for number in range(1000):
            peers.enter_context(peer_of(transport))
            if number % 50 == 0:
                assert first.call(note, number) == number
        assert threading.active_count() <= threads + MAX_HANDSHAKES + 10
        connect(second)
        assert second.call(note, 1) == 1
    assert time.monotonic() - began_s < LIMIT_S / 2.0


def test_processes_that_do_not_connect_leave_no_token(
    transport: SocketTransport, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport._listener, "address", "/nowhere/s")
    for line in lines:
        assert line.call(note, 1) == 1
    wait_for(transport, lambda: all(line.channel.refused for line in lines))  # type: ignore[attr-defined]
    assert not transport._expected


# ---- threads that get no processor time --------------------------------------------------------


def slow_size(book: Notebook) -> None:
    """The thread that sends answers waits for the interpreter lock after the size of a message."""
    write = Connection._send

    def send(self: Any, buf: Any, *args: Any) -> None:
        write(self, buf, *args)
        if len(buf) == 4 and threading.current_thread().name.startswith("polopt-send"):
            Connection._send = write
            time.sleep(1.0)

    Connection._send = send


def test_process_that_holds_the_interpreter_lock_is_not_dead(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, channel = connected[0], cast(Any, connected[0].channel)
    socket_channel.limit(channel._connection, 0.5)  # instead of MESSAGE_TIMEOUT_S
    monkeypatch.setattr(socket_channel, "REASON_TIMEOUT_S", 0.1)
    line.call(slow_size)
    assert len(line.call(lambda book: bytes(5_000_000))) == 5_000_000


def test_process_that_connects_while_the_driver_is_busy_is_not_refused(
    lines: list[Line],
) -> None:
    """A call in C that does not release the interpreter lock stops the threads of the listener."""
    line, channel = lines[0], cast(Any, lines[0].channel)
    channel.connect()
    ctypes.PyDLL(None).usleep(6_000_000)  # longer than HANDSHAKE_TIMEOUT_S
    until_s = time.monotonic() + 15.0
    while not channel.is_connected and time.monotonic() < until_s:
        assert line.call(note, 1) == 1
        time.sleep(0.05)
    assert channel.is_connected
    assert not channel.refused


def test_many_peers_do_not_end_a_connection_that_is_admitted(
    transport: SocketTransport,
    lines: list[Line],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, channel, listener = lines[0], cast(Any, lines[0].channel), transport._listener
    admit, admitted, go_on = cast(Any, listener)._admitted, threading.Event(), threading.Event()

    def admit_and_stop(connection: Connection, token: bytes) -> None:
        admit(connection, token)
        admitted.set()
        go_on.wait(LIMIT_S)

    monkeypatch.setattr(listener, "_admitted", admit_and_stop)
    channel.connect()
    assert admitted.wait(LIMIT_S)
    wait_for(transport, lambda: channel.is_connected)
    with contextlib.ExitStack() as peers:
        peers.callback(go_on.set)
        for _ in range(MAX_HANDSHAKES):
            peers.enter_context(peer_of(transport))
        time.sleep(1.0)
        assert [line.call(note, number) for number in range(5)] == list(range(5))


def test_connection_that_the_listener_drops_is_made_again(
    transport: SocketTransport,
    lines: list[Line],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process has sent its token, and other peers have then pushed its connection out."""
    line, channel = lines[0], cast(Any, lines[0].channel)
    monkeypatch.setattr(socket_channel, "ADMIT_TIMEOUT_S", 0.5)
    read, dropped = Connection.recv_bytes, []

    def recv_bytes(self: Connection, maxlength: int | None = None) -> bytes:
        message = read(self, maxlength)
        if maxlength == 64 and not dropped:
            dropped.append(shut_down(self))
            raise EOFError
        return message

    monkeypatch.setattr(Connection, "recv_bytes", recv_bytes)
    channel.connect()
    wait_for(transport, channel._connecting.done)
    until_s = time.monotonic() + 10.0
    while not channel.is_connected and time.monotonic() < until_s:
        assert line.call(note, 1) == 1
    assert channel.is_connected


# ---- processes that cannot connect -------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_process_that_cannot_connect_goes_through_ray(
    transport: SocketTransport,
    lines: list[Line],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    elsewhere: bool,
) -> None:
    """Calls to other processes still use sockets. The log has one message, which is a warning
    unless the process runs on another node."""
    caplog.set_level(logging.INFO, "polopt")
    behind, other = lines
    connect(other)
    if elsewhere:
        monkeypatch.setattr(transport, "_node", "another node")
    else:
        monkeypatch.setattr(transport._listener, "address", "/nowhere/s")
    assert [behind.call(note, number) for number in range(3)] == [0, 1, 2]
    channel: Any = behind.channel
    wait_for(transport, lambda: channel.refused)
    assert transport.paths([behind.channel]) == "ray"
    assert transport.paths([line.channel for line in lines]) == "socket, ray"
    before = transport.num_calls
    assert behind.call(note, 1) == 1
    assert transport.num_calls == before
    assert other.call(note, 1) == 1
    assert transport.num_calls == before + 1
    (record,) = [r for r in caplog.records if "worker 1 cannot connect" in r.message]
    assert record.levelno == (logging.INFO if elsewhere else logging.WARNING)
    assert ("another node" if elsewhere else "/nowhere/s") in record.message


@pytest.mark.parametrize("elsewhere", [False, True])
def test_required_transport_raises_where_a_process_cannot_connect(
    actors: list[RayChannel], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    transport = open_transport("socket", LIMIT_S)
    assert isinstance(transport, SocketTransport)
    if elsewhere:
        monkeypatch.setattr(transport, "_node", "another node")
    else:
        monkeypatch.setattr(transport._listener, "address", "/nowhere/s")
    line = Line("socket", transport, SocketChannel(actors[0], transport))
    with pytest.raises(TransportError, match=r"worker 1 cannot connect.*transport: auto or ray"):
        [line.call(note_slowly, 1, 0.05) for _ in range(100)]
    transport.close()


def test_config_chooses_the_transport(
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
) -> None:
    for name, expected in {"ray": "ray", "socket": "socket", "auto": "socket"}.items():
        transport = open_transport(name, LIMIT_S)
        assert transport.name == expected
        transport.close()
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    parent = tmp_path / ("x" * 120)  # too long for the path of a socket
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    for _ in range(3):
        assert open_transport("auto", LIMIT_S).name == "ray"
    assert "No socket can be bound" in caplog.text
    with pytest.raises(TransportError, match="no socket can be bound"):
        open_transport("socket", LIMIT_S)
    caplog.clear()
    gc.collect()
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_waits_may_be_as_long_as_configs_allow(actors: list[RayChannel]) -> None:
    transport = SocketTransport(RayTransport(), 1e7)
    line = Line("socket", transport, SocketChannel(actors[0], transport))
    connect(line)
    ticket = line.send(note, 1)
    while not (ended := transport.wait([ticket], 1e7)):
        pass
    assert ended == [ticket]
    transport.close()


def test_a_call_of_another_process_wakes_the_wait(lines: list[Line]) -> None:
    """The transport waits for calls through Ray and over the socket at the same time."""
    through_ray, over_socket = lines
    connect(over_socket)
    slow = over_socket.send(note_slowly, "slow", 3.0)
    reference = over_socket.transport.put("quick")
    quick = through_ray.send(note, reference)
    ended: list[Any] = []
    while not ended:
        ended = over_socket.transport.wait([slow, quick], 1.0)
    assert ended == [quick]
    assert not slow.ended()
    assert over_socket.answer(slow).value == "slow"
    assert over_socket.call(pid) != os.getpid()
