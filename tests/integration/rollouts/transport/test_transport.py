"""`SocketTransport`: connections, references, and broken and hostile peers."""

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
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import ray
from channel_helpers import LIMIT_S, NO_RESOURCES, Line, Notebook, note, note_slowly, pid, wait_for

from polopt.rollouts.transport import socket_channel
from polopt.rollouts.transport.channel import ChannelError, Started, TransportError
from polopt.rollouts.transport.ray_channel import RayChannel, RayTransport
from polopt.rollouts.transport.socket_channel import (
    SocketChannel,
    SocketTransport,
    open_transport,
)
from polopt.rollouts.transport.sockets import MAX_HANDSHAKES, Outbox, dial, shut_down


@pytest.fixture
def transport(ray_session: None) -> Iterator[SocketTransport]:
    made = SocketTransport(RayTransport(), LIMIT_S)
    yield made
    made.close()


def start(transport: SocketTransport, name: str) -> Line:
    return Line("socket", transport, transport.start(Notebook, (), NO_RESOURCES, name))


@pytest.fixture
def lines(transport: SocketTransport) -> Iterator[list[Line]]:
    """Returns the lines to two processes that start."""
    made = [start(transport, f"worker {number}") for number in (1, 2)]
    yield made
    for line in made:
        transport.kill(line.channel)


def connect(*lines: Line) -> None:
    for line in lines:
        line.note_started()
        assert cast(Any, line.channel).state == "connected"


@pytest.fixture(scope="module")
def _shared(ray_session: None) -> Iterator[tuple[SocketTransport, list[Line]]]:
    transport = SocketTransport(RayTransport(), LIMIT_S)
    made: list[Line] = []
    yield transport, made
    for line in made:
        transport.kill(line.channel)
    transport.close()


@pytest.fixture
def connected(_shared: tuple[SocketTransport, list[Line]]) -> list[Line]:
    """Returns the lines to two connected processes, which tests share while they are connected."""
    transport, made = _shared
    for i in range(2):
        if i < len(made) and cast(Any, made[i].channel).state == "connected":
            continue
        if i < len(made):
            transport.kill(made[i].channel)
        made[i : i + 1] = [start(transport, f"worker {i + 1}")]
        connect(made[i])
    return list(made)


@pytest.fixture
def transport_of_connected(connected: list[Line]) -> SocketTransport:
    return cast(SocketTransport, connected[0].transport)


@ray.remote
class Silent:
    """An actor that does not connect and does not answer. A test can act as this process on the
    socket."""

    def booted(self) -> None:
        pass

    def make(self, *_: Any) -> None:
        pass

    def serve(self) -> str:
        time.sleep(3600.0)
        return ""


@pytest.fixture(scope="module")
def silent_actor(ray_session: None) -> Iterator[Any]:
    actor: Any = Silent.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    yield actor
    ray.kill(actor)


@pytest.fixture
def played(
    transport_of_connected: SocketTransport, silent_actor: Any
) -> Iterator[tuple[Line, Connection]]:
    """Returns a `Line` to a process, and the end of the connection that belongs to the process. The
    test acts as the process."""
    transport = transport_of_connected
    endpoint = transport._endpoint()
    through_ray = RayChannel(silent_actor, "worker 3", None, transport.through_ray, ())
    channel: Any = SocketChannel(through_ray, transport, endpoint)
    transport._expected[endpoint.token] = channel
    peer = dial(endpoint.address, endpoint.key, LIMIT_S)
    peer.send_bytes(endpoint.token)
    assert peer.recv_bytes() == b""
    channel.note_started(Started())
    assert channel.state == "connected"
    yield Line("socket", transport, channel), peer
    channel.fail("of the test")
    peer.close()


# ---- what goes over the socket -----------------------------------------------------------------


def test_every_call_goes_over_the_socket(connected: list[Line]) -> None:
    """Large calls, values that stay in the process, and references do, too."""
    line = connected[0]
    transport: Any = line.transport
    reference, before = transport.put(1), transport.num_calls
    for argument, by_reference in [(1, False), (reference, False), (bytes(9_000_000), True)]:
        line.call(note, argument, by_reference=by_reference)
    assert transport.num_calls == before + 3


def num_kept(runner: Notebook) -> int:
    """Returns the number of values that other processes can fetch from this process."""
    return sum(len(o._encoded) for o in gc.get_objects() if type(o).__name__ == "Values")


def test_process_drops_values_to_which_no_reference_is_left(connected: list[Line]) -> None:
    maker, user = connected
    transport: Any = maker.transport
    for number in range(5):
        reference = maker.call(note, number, by_reference=True)
        assert user.call(note, reference) == number
        assert transport.get(reference) == number
        assert maker.call(num_kept) == 1
    before = len(transport._values._encoded)
    del reference
    own = transport.put("of the driver")
    assert user.call(note, own) == transport.get(own) == "of the driver"
    assert maker.call(num_kept) == 0
    del own
    assert len(transport._values._encoded) == before


def test_value_can_be_fetched_while_its_maker_runs_a_call(connected: list[Line]) -> None:
    maker, user = connected
    reference = maker.call(note, 1, by_reference=True)
    slow = maker.send(note_slowly, "slow", 2.0)
    assert user.call(note, reference) == 1
    assert not slow.ended()
    assert maker.answer(slow).value == "slow"


def test_peer_without_the_key_fetches_no_value(connected: list[Line]) -> None:
    reference = connected[0].call(note, 1, by_reference=True)
    assert repr(reference.key) not in repr(reference)
    with pytest.raises(AuthenticationError):
        dial(reference.address, b"wrong", LIMIT_S)
    peer = dial(reference.address, reference.key, LIMIT_S)
    peer.send_bytes(b"wrong")
    assert peer.recv_bytes() == b""
    peer.close()
    assert connected[1].call(note, reference) == 1


def test_calls_larger_than_the_buffer_do_not_block_the_driver(connected: list[Line]) -> None:
    line = connected[0]
    began_s = time.monotonic()
    tickets = [line.send(note_slowly, 0, 2.0)]
    tickets += [line.send(note, (number, bytes(3_000_000))) for number in range(1, 5)]
    assert time.monotonic() - began_s < 1.5
    values = [line.answer(ticket).value for ticket in tickets]
    assert [value[0] for value in values[1:]] == list(range(1, 5))


def test_calls_that_a_process_does_not_read_are_limited(
    played: tuple[Line, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _ = played
    channel: Any = line.channel
    channel._outbox._most_bytes = 10_000_000
    monkeypatch.setattr(socket_channel, "MESSAGE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(socket_channel, "REASON_TIMEOUT_S", 0.1)
    began_s = time.monotonic()
    tickets = [line.send(note, bytes(4_000_000)) for _ in range(5)]
    assert time.monotonic() - began_s < LIMIT_S / 4.0
    assert channel.state == "ended"
    with pytest.raises(ChannelError, match="did not read"):
        line.answer(tickets[0])


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


def test_lost_connection_ends_the_channel(connected: list[Line]) -> None:
    line = connected[0]
    channel: Any = line.channel
    pending = line.send(note_slowly, 1, 0.3)
    channel.fail("of the test")
    assert channel.state == "ended"
    with pytest.raises(ChannelError, match="of the test"):
        line.answer(pending)
    with pytest.raises(ChannelError, match="has ended"):
        line.answer(line.send(note, 2))
    assert "the connection was lost" in channel.serving.result(LIMIT_S)


def test_ctrl_c_while_receiving_ends_the_calls_and_breaks_nothing(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = connected

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


def test_ctrl_c_while_sending_ends_the_calls_and_breaks_nothing(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, other = connected
    pending = line.send(note_slowly, 1, 0.3)

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Outbox, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        line.send(note, 2)
    with pytest.raises(ChannelError, match="sending was interrupted"):
        line.answer(pending)
    assert other.call(note, 1) == 1


def test_closed_transport_ends_serving_and_its_calls(
    transport: SocketTransport, lines: list[Line]
) -> None:
    connect(*lines)
    line = lines[0]
    channel: Any = line.channel
    pending = line.send(note_slowly, 1, 0.3)
    transport.close()
    assert pending.ended()
    assert "the connection was lost" in channel.serving.result(LIMIT_S)
    transport.close()


def test_fork_in_a_process_does_not_keep_its_connection(
    transport: SocketTransport, ray_session: None
) -> None:
    """A process that an environment forks may live a moment longer than the worker."""
    channel = transport.start(Notebook, (), NO_RESOURCES, "worker 1")
    line = Line("socket", transport, channel)
    connect(line)

    def fork(book: Notebook) -> int:
        if not (child := os.fork()):
            time.sleep(20.0)
            os._exit(0)
        return child

    child, pending = line.call(fork), line.send(note_slowly, 1, 1e4)
    began_s = time.monotonic()
    os.kill(channel.started.pid, 9)
    wait_for(transport, lambda: channel.state == "ended")
    assert time.monotonic() - began_s < 15.0
    os.kill(child, 9)
    with pytest.raises(ChannelError):
        line.answer(pending)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_connections_leave_no_descriptors_threads_and_files(ray_session: None) -> None:
    def run() -> tuple[int, int]:
        transport = SocketTransport(RayTransport(), LIMIT_S)
        made = [start(transport, "worker 1"), start(transport, "worker 2")]
        connect(*made)
        for line in made:
            own = transport.put(1)
            assert line.call(note, own) == 1
            theirs = line.call(note, bytes(2_000_000), by_reference=True)
            assert len(transport.get(theirs)) == 2_000_000
        transport.stop([line.channel for line in made], LIMIT_S)
        transport.close()
        assert not os.path.exists(transport._listener.address)
        assert not os.path.exists(theirs.address)
        assert not os.path.exists(own.address)
        del transport, made, line, own, theirs
        gc.collect()
        time.sleep(0.5)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    run()
    before = run()
    after = run()
    assert after <= before


# ---- peers that are slow, broken or hostile ----------------------------------------------------


def test_peer_that_reads_nothing_does_not_block(played: tuple[Line, Connection]) -> None:
    line, _ = played
    began_s = time.monotonic()
    for _ in range(2000):
        line.send(note, bytes(5_000))
    assert time.monotonic() - began_s < LIMIT_S / 4.0


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
    assert channel.state == "connected"
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


def test_token_admits_only_one_connection(connected: list[Line]) -> None:
    transport, channel = cast(Any, connected[0].transport), cast(Any, connected[0].channel)
    endpoint = channel._endpoint
    peer = dial(endpoint.address, endpoint.key, LIMIT_S)
    peer.send_bytes(endpoint.token)
    assert connected[0].call(note, 1) == 1
    transport.poll(0.2)
    with pytest.raises((EOFError, ConnectionResetError)):
        peer.recv_bytes()
    assert connected[0].call(note, 1) == 1
    peer.close()


def test_secrets_are_not_printed(transport: SocketTransport) -> None:
    endpoint = transport._endpoint()
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


def test_processes_that_do_not_start_leave_no_token(transport: SocketTransport) -> None:
    line = start(transport, "worker 1")
    transport.kill(line.channel)
    wait_for(transport, lambda: not transport._expected)


# ---- threads that get no processor time --------------------------------------------------------


def test_process_that_holds_the_interpreter_lock_is_not_dead(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the driver has a part of an answer, the rest arrives without the interpreter lock."""
    line, channel = connected[0], cast(Any, connected[0].channel)
    socket_channel.limit(channel._connection, 0.5, sending=False)  # instead of MESSAGE_TIMEOUT_S
    monkeypatch.setattr(socket_channel, "REASON_TIMEOUT_S", 0.1)
    large = line.send(lambda book: bytes(5_000_000))
    hold = line.send(lambda book: ctypes.PyDLL(None).usleep(2_000_000))
    assert len(line.answer(large).value) == 5_000_000
    line.answer(hold)


def test_process_that_connects_while_the_driver_is_busy_is_not_refused(
    lines: list[Line],
) -> None:
    """A call in C that does not release the interpreter lock stops the threads of the listener."""
    ctypes.PyDLL(None).usleep(6_000_000)  # longer than HANDSHAKE_TIMEOUT_S
    connect(*lines)
    assert [line.call(note, 1) for line in lines] == [1, 1]


def test_many_peers_do_not_end_a_connection_that_is_admitted(
    transport: SocketTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = cast(Any, transport._listener)
    admit, go_on = listener._admitted, threading.Event()

    def admit_and_stop(connection: Connection, token: bytes) -> None:
        admit(connection, token)
        go_on.wait(LIMIT_S)

    monkeypatch.setattr(listener, "_admitted", admit_and_stop)
    line = start(transport, "worker 1")
    connect(line)
    with contextlib.ExitStack() as peers:
        peers.callback(go_on.set)
        for _ in range(MAX_HANDSHAKES):
            peers.enter_context(peer_of(transport))
        time.sleep(1.0)
        assert [line.call(note, number) for number in range(5)] == list(range(5))
    transport.kill(line.channel)


def test_connection_that_the_listener_drops_is_made_again(
    transport: SocketTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has sent its token, and other peers have then pushed its connection out."""
    read, dropped = Connection.recv_bytes, []

    def recv_bytes(self: Connection, maxlength: int | None = None) -> bytes:
        message = read(self, maxlength)
        if maxlength == 64 and not dropped:
            dropped.append(shut_down(self))
            raise EOFError
        return message

    monkeypatch.setattr(Connection, "recv_bytes", recv_bytes)
    line = start(transport, "worker 1")
    connect(line)
    assert dropped
    assert line.call(note, 1) == 1
    transport.kill(line.channel)


# ---- processes that cannot connect -------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_process_that_cannot_connect_goes_through_ray(
    transport: SocketTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    elsewhere: bool,
) -> None:
    """Calls to other processes still use sockets. The log has one message, which is a warning
    unless the process runs on another node. References work in both directions."""
    caplog.set_level(logging.INFO, "polopt")
    other = start(transport, "worker 2")
    connect(other)
    if elsewhere:
        monkeypatch.setattr(transport, "_node", "another node")
    else:
        monkeypatch.setattr(transport._listener, "address", "/nowhere/s")
    behind = start(transport, "worker 1")
    behind.note_started()
    assert cast(Any, behind.channel).state == "through ray"
    assert [behind.call(note, number) for number in range(3)] == [0, 1, 2]
    assert transport.paths([behind.channel]) == "ray"
    assert transport.paths([behind.channel, other.channel]) == "socket, ray"
    before = transport.num_calls
    assert behind.call(note, 1) == 1
    assert transport.num_calls == before
    for maker, user in ((other, behind), (behind, other)):
        assert user.call(note, maker.call(note, "value", by_reference=True)) == "value"
    (record,) = [r for r in caplog.records if "worker 1 cannot connect" in r.message]
    assert record.levelno == (logging.INFO if elsewhere else logging.WARNING)
    assert ("another node" if elsewhere else "/nowhere/s") in record.message
    for line in (behind, other):
        transport.kill(line.channel)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_required_transport_raises_where_a_process_cannot_connect(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    transport = open_transport("socket", LIMIT_S)
    assert isinstance(transport, SocketTransport)
    if elsewhere:
        monkeypatch.setattr(transport, "_node", "another node")
    else:
        monkeypatch.setattr(transport._listener, "address", "/nowhere/s")
    line = start(transport, "worker 1")
    with pytest.raises(TransportError, match=r"worker 1 cannot connect.*transport: auto or ray"):
        line.note_started()
    transport.kill(line.channel)
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


def test_waits_may_be_as_long_as_configs_allow(ray_session: None) -> None:
    transport = SocketTransport(RayTransport(), 1e7)
    line = start(transport, "worker 1")
    connect(line)
    ticket = line.send(note, 1)
    while not (ended := transport.wait([ticket], 1e7)):
        pass
    assert ended == [ticket]
    transport.kill(line.channel)
    transport.close()


def test_answer_through_ray_wakes_the_wait(
    connected: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport waits for calls through Ray and over the socket at the same time."""
    over_socket = connected[0]
    transport: Any = over_socket.transport
    monkeypatch.setattr(transport, "_node", "another node")
    through_ray = start(transport, "worker 4")
    through_ray.note_started()
    slow = over_socket.send(note_slowly, "slow", 3.0)
    quick = through_ray.send(note, 1)
    ended: list[Any] = []
    while not ended:
        ended = transport.wait([slow, quick], 1.0)
    assert ended == [quick]
    assert not slow.ended()
    assert over_socket.answer(slow).value == "slow"
    assert over_socket.call(pid) != os.getpid()
    transport.kill(through_ray.channel)
