"""Connections within a node: authentication, hostile peers, and files that are left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polopt.rollouts.transport import sockets
from polopt.rollouts.transport.references import Values
from polopt.rollouts.transport.sockets import (
    CONNECTION_ERRORS,
    LEFT_BEHIND_S,
    MAX_HANDSHAKES,
    PrivateListener,
    Wakeup,
    dial,
    hang_up,
    limit,
)

LIMIT_S = 60.0
KEY = b"the key of this run"


class Listener(PrivateListener):
    """A listener that keeps the connections that it has admitted."""

    def __init__(self) -> None:
        self.admitted: queue.SimpleQueue[tuple[Connection, bytes]] = queue.SimpleQueue()
        super().__init__(KEY, lambda *peer: self.admitted.put(peer))

    def greet(self, hello: bytes = b"hello") -> tuple[Connection, Connection]:
        """Makes a new connection, and returns both of its ends."""
        dialed = dial(self.address, KEY, LIMIT_S)
        dialed.send_bytes(hello)
        accepted, received = self.admitted.get(timeout=LIMIT_S)
        assert received == hello
        return dialed, accepted

    def connect(self) -> socket.socket:
        """Returns the socket of a peer that has connected, but has not authenticated."""
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(LIMIT_S)
        peer.connect(self.address)
        return peer


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def wait_for(condition: object) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_both_ends_exchange_messages(listener: Listener) -> None:
    dialed, accepted = listener.greet()
    dialed.send_bytes(b"a call")
    assert accepted.recv_bytes() == b"a call"
    accepted.send_bytes(bytes(3))
    assert dialed.recv_bytes() == bytes(3)
    hang_up(dialed)
    with pytest.raises(EOFError):
        accepted.recv_bytes()
    accepted.close()


# ---- who can connect ---------------------------------------------------------------------------


def test_only_this_user_can_enter_the_directory() -> None:
    umask = os.umask(0)
    try:
        listener = Listener()
    finally:
        os.umask(umask)
    status = Path(listener.address).parent.stat()
    listener.close()
    assert status.st_mode & 0o777 == 0o700
    assert status.st_uid == os.geteuid()


def test_another_key_is_refused_on_both_sides(listener: Listener) -> None:
    with pytest.raises(AuthenticationError):
        dial(listener.address, b"another key", LIMIT_S)
    assert listener.admitted.empty()
    listener.greet()


def test_listener_without_the_key_gets_nothing(tmp_path: Path) -> None:
    """A process at the address of a listener cannot take its place."""
    false = PrivateListener(b"another key", lambda connection, hello: pytest.fail("admitted"))
    with pytest.raises(CONNECTION_ERRORS):
        dial(false.address, KEY, LIMIT_S)
    false.close()


class Trap:
    """An object that leaves a trace when it is unpickled."""

    sprung: list[int] = []  # noqa: RUF012

    def __reduce__(self) -> object:
        return (Trap.sprung.append, (1,))


@pytest.mark.parametrize("said", ["nothing", "garbage", "a length", "an object"])
def test_peer_without_the_key_reaches_no_deserialiser(listener: Listener, said: str) -> None:
    Trap.sprung.clear()
    with listener.connect() as peer:
        if said == "garbage":
            peer.sendall(b"GET / HTTP/1.1\r\nHost: polopt\r\n\r\n")
        elif said == "a length":  # the header of a message of 2 GiB
            peer.sendall(b"\x7f\xff\xff\xff" + bytes(100))
        elif said == "an object":
            Connection(os.dup(peer.fileno())).send(Trap())
        peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):  # receives the challenge, until the listener hangs up
                pass
    assert not Trap.sprung
    assert listener.admitted.empty()
    listener.greet()


def test_silent_peer_is_hung_up_on(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_TIMEOUT_S", 0.2)
    with listener.connect() as peer:
        while peer.recv(4096):
            pass


def test_thousand_silent_peers_delay_nobody() -> None:
    """Silent peers do not use up the threads and file descriptors, so the listener still accepts
    other peers."""
    listener = Listener()
    threads, began_s = threading.active_count(), time.monotonic()
    with contextlib.ExitStack() as peers:
        for number in range(1000):
            peers.enter_context(listener.connect())
            if number % 250 == 0:
                listener.greet()
        assert threading.active_count() <= threads + 2 * MAX_HANDSHAKES, (
            "some threads are still ending"
        )
        listener.greet()
        assert time.monotonic() - began_s < LIMIT_S / 2.0, "1000 handshakes in turn take 4000 s"
    listener.close()


def test_oldest_of_too_many_peers_is_hung_up_on(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_TIMEOUT_S", 100.0 * LIMIT_S)
    monkeypatch.setattr(sockets, "MAX_HANDSHAKES", 2)
    with contextlib.ExitStack() as peers:
        oldest, *_ = (peers.enter_context(listener.connect()) for _ in range(3))
        while oldest.recv(4096):
            pass
        listener.greet()


LACKING = """
import hmac, os, queue, resource, time  # a handshake imports hmac
from polopt.rollouts.transport import sockets
admitted = queue.SimpleQueue()
listener = sockets.PrivateListener(b"key", lambda *peer: admitted.put(peer))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
highest = max(map(int, os.listdir("/proc/self/fd")))
child = os.fork()
if child == 0:
    time.sleep(0.5)
    made = [sockets.dial(listener.address, b"key", 60.0) for _ in range(2)]
    for connection in made:
        connection.send_bytes(b"hello")
    time.sleep(60.0)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:  # none is free
    pass
time.sleep(1.0)
assert admitted.qsize() < 2
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print([admitted.get(timeout=60.0)[1] for _ in range(2)])
os.kill(child, 9)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_listener_continues_after_a_lack_of_descriptors() -> None:
    assert run_alone(LACKING) == "[b'hello', b'hello']\n"


# ---- resources ---------------------------------------------------------------------------------


def run_alone(program: str, directory: str = "", code: int = 0) -> str:
    """Runs a program with its own directory for temporary files. Returns its output."""
    with tempfile.TemporaryDirectory() as own:  # `tmp_path` can be too long for a Unix socket
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": directory or own},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == code, done.stderr
        assert code or not os.listdir(own)
    return done.stdout


def test_directory_is_removed_at_close() -> None:
    listener = Listener()
    directory = Path(listener.address).parent
    assert directory.is_dir()
    listener.close()
    assert not directory.exists()


EXIT = """
import os, sys, tempfile
from polopt.rollouts.transport.sockets import PrivateListener
listener = PrivateListener(b"key", print)
assert len(os.listdir(tempfile.gettempdir())) == 1
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(tempfile.gettempdir())) == 1, "removed by a forked process"
sys.exit()
"""


def test_process_that_ends_without_close_leaves_no_directory() -> None:
    run_alone(EXIT)


KILLED = """
import os
from polopt.rollouts.transport.sockets import PrivateListener
listener = PrivateListener(b"key", print)
os.kill(os.getpid(), 9)
"""


def test_files_of_a_killed_process_are_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        run_alone(KILLED, parent, code=-signal.SIGKILL)
        (left,) = Path(parent).iterdir()
        living = Listener()
        assert left.is_dir(), "its process could still be starting"
        (Path(parent) / "polopt-other").write_text("not ours to remove")
        for socket_path in Path(parent).glob("*/s"):
            then_s = time.time() - LEFT_BEHIND_S - 1.0
            os.utime(socket_path, (then_s, then_s))
        Listener().close()
        assert not left.exists()
        living.greet()
        living.close()
        assert [path.name for path in Path(parent).iterdir()] == ["polopt-other"]


def test_path_that_is_too_long_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / ("x" * 120)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with pytest.raises(OSError, match="path too long"):
        Listener()
    assert not list(parent.iterdir())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_connections_leave_no_descriptors_and_threads(quick_collections: None) -> None:
    def run() -> tuple[int, int]:
        listener = Listener()
        ends = [end for _ in range(5) for end in listener.greet()]
        with listener.connect():
            listener.close()
        for end in ends:
            hang_up(end)
        del listener, ends
        gc.collect()
        time.sleep(0.1)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = run()
    wait_for(lambda: run() <= before)


def test_forked_process_closes_connections_and_listeners(listener: Listener) -> None:
    """A forked process, such as the process of an environment, must not keep connections open after
    the death of its worker."""
    dialed, accepted = listener.greet()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # waits until the parent closes the pipe
        gc.collect()
        os._exit(0)
    os.close(reader)
    fds = {dialed.fileno(), accepted.fileno()}
    wait_for(lambda: not fds & {int(fd) for fd in os.listdir(f"/proc/{child}/fd")})
    accepted.close()  # `hang_up` would end the connection in all processes that share the socket
    with pytest.raises(EOFError):
        dialed.recv_bytes()
    listener.close()
    with pytest.raises(OSError, match=r"No such file|refused"):
        dial(listener.address, KEY, 1.0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    dialed.close()


# ---- limits ------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_values_of_replaced_processes_leave_no_descriptors(quick_collections: None) -> None:
    """Each value is in another process, which then ends."""
    started, here, counts = threading.active_count(), Values(), []
    for number in range(6):
        maker = Values()
        assert here.get(pickle.loads(pickle.dumps(maker.put(number)))) == number
        maker.close()
        wait_for(lambda: threading.active_count() <= started)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]
    here.close()


@pytest.mark.parametrize("timeout_s", [0.05, 1e7])
def test_reads_and_writes_are_limited(listener: Listener, timeout_s: float) -> None:
    dialed, accepted = listener.greet()
    limit(dialed, timeout_s)
    if timeout_s < 1.0:
        with pytest.raises(BlockingIOError):
            dialed.recv_bytes()
        with pytest.raises(BlockingIOError):
            dialed.send_bytes(bytes(10_000_000))
    else:
        accepted.send_bytes(b"x")
        assert dialed.recv_bytes() == b"x"
    hang_up(dialed)
    hang_up(accepted)


def test_write_without_a_limit_ends_with_the_other_side(listener: Listener) -> None:
    dialed, accepted = listener.greet()
    limit(dialed, 0.05, sending=False)
    threading.Timer(0.3, hang_up, (accepted,)).start()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        dialed.send_bytes(bytes(10_000_000))
    hang_up(dialed)


def test_both_sides_have_a_larger_buffer_than_usual(listener: Listener) -> None:
    usual = socket.socket(socket.AF_UNIX)
    size = usual.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    usual.close()
    for connection in listener.greet():
        assert sockets.buffer_bytes(connection) >= size
        hang_up(connection)


def test_message_that_fits_into_the_buffer_never_waits(listener: Listener) -> None:
    """This is true for many small messages, and for one message of the same total size."""
    for size in (1, 1000, sockets.buffer_bytes(listener.greet()[0]) - 2048):
        dialed, accepted = listener.greet()
        limit(dialed, 0.05)
        for _ in range(sockets.buffer_bytes(dialed) // (size + 2048)):
            dialed.send_bytes(bytes(size))
            dialed.send_bytes(b"")
        hang_up(dialed)
        hang_up(accepted)


def test_messages_that_the_other_side_has_not_read_take_room(listener: Listener) -> None:
    """Each message fits into the empty buffer, but both do not. The sender can still continue."""
    dialed, accepted = listener.greet()
    outbox = sockets.Outbox(accepted)
    message = bytes(sockets.buffer_bytes(accepted) - 1000)
    sending = threading.Thread(target=lambda: [outbox.send(message) for _ in range(2)], daemon=True)
    sending.start()
    sending.join(10.0)
    assert not sending.is_alive(), "another thread must send the message that does not fit"
    for _ in range(2):
        assert dialed.recv_bytes() == message
    outbox.close()
    hang_up(dialed)


def test_outbox_keeps_the_order_and_its_limit(listener: Listener) -> None:
    dialed, accepted = listener.greet()
    outbox = sockets.Outbox(accepted, most_bytes=12_000_000)
    messages = [bytes([number]) * (5_000_000 if number % 2 else 10) for number in range(5)]
    for message in messages:
        outbox.send(message, LIMIT_S)
    with pytest.raises(TimeoutError, match="did not read"):
        outbox.send(messages[1], 0.1)
    assert [dialed.recv_bytes() for _ in messages] == messages
    outbox.send(b"later", LIMIT_S)
    assert dialed.recv_bytes() == b"later"
    hang_up(dialed)
    with pytest.raises(OSError, match=r"."):
        [outbox.send(messages[1], LIMIT_S) for _ in range(100)]
    outbox.close()


def test_interrupted_handler_of_a_wakeup_loses_no_call() -> None:
    wakeup, handled = Wakeup(), []
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    for number, future in enumerate(futures):
        wakeup.watch(SimpleNamespace(future=lambda own=future: own), number)  # type: ignore[arg-type]
        future.set_result(None)

    def handle(number: int, future: Future[Any]) -> None:
        if number == 1 and len(handled) == 1:
            handled.append("interrupted")
            raise KeyboardInterrupt
        handled.append(number)

    with pytest.raises(KeyboardInterrupt):
        wakeup.handle(handle)
    assert select.select([wakeup], [], [], 0.0)[0], "the selector returns at once"
    wakeup.handle(handle)
    assert handled == [0, "interrupted", 1, 2]
    assert not select.select([wakeup], [], [], 0.0)[0]
    wakeup.close()
