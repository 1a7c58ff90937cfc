"""Connections between processes of one node: Unix sockets in a private directory.

`multiprocessing.connection` frames the messages, and authenticates both sides by a key (HMAC)
before either of them reads anything else. The key travels through Ray.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

#: Limit for the other side to prove that it has the key.
HANDSHAKE_TIMEOUT_S = 4.0
#: Peers that may be proving that they have the key at once. One more ends the wait for the oldest.
MAX_HANDSHAKES = 256
#: Longest first message of a peer.
MAX_HELLO_BYTES = 64
#: Pause of a listener after an error such as that no file descriptor is free.
RETRY_S = 0.1
#: Age of a file at which nobody listens, or that nobody has opened, before another process removes
#: it.
LEFT_BEHIND_S = 3600.0
#: What a broken, slow or foreign peer may cause.
CONNECTION_ERRORS = (OSError, EOFError, AuthenticationError)

#: Connections and listening sockets of this process.
_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


class PrivateListener:
    """Listens in a directory that only this user can enter.

    Each peer authenticates in a thread of its own, so one that is silent delays no other.

    Args:
        key: by which both sides authenticate.
        admitted: called in that thread with a connection that has authenticated, and its first
            message.

    Attributes:
        address: path of the socket, for `dial`.

    Raises:
        OSError: no socket can be bound, for example because the path of the directory for temporary
            files is too long for one.
    """

    def __init__(self, key: bytes, admitted: Callable[[Connection, bytes], None]) -> None:
        _remove_left_behind()
        directory = tempfile.mkdtemp(prefix="polopt-")
        # Also runs when the interpreter exits.
        self._remove = weakref.finalize(self, _remove, directory, os.getpid())
        self.address = f"{directory}/s"
        self._key = key
        self._admitted = admitted
        self._handshakes: dict[Connection, None] = {}  # oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX)
        _OPEN.add(self._socket)
        try:
            self._socket.bind(self.address)
            self._socket.listen(1024)
            threading.Thread(target=self._accept, name="polopt-accept", daemon=True).start()
        except OSError:
            self.close()
            raise

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(RETRY_S)
                continue
            connection = _register(accepted)
            with self._lock:
                self._handshakes[connection] = None
                if len(self._handshakes) > MAX_HANDSHAKES:
                    oldest = next(iter(self._handshakes))
                    del self._handshakes[oldest]
                    shut_down(oldest)  # its thread closes it
            try:
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except RuntimeError:  # there are too many threads
                self._end_handshake(connection)
                connection.close()

    def _admit(self, connection: Connection) -> None:
        try:
            admit(connection, self._key)
            hello = connection.recv_bytes(MAX_HELLO_BYTES)
        except CONNECTION_ERRORS:
            connection.close()
        else:
            self._admitted(connection, hello)
        finally:
            self._end_handshake(connection)

    def _end_handshake(self, connection: Connection) -> None:
        with self._lock:
            self._handshakes.pop(connection, None)

    def close(self) -> None:
        """Ends listening. Connections stay open."""
        self._closed = True
        with contextlib.suppress(OSError):  # not connected, on some systems
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._remove()


def admit(connection: Connection, key: bytes) -> None:
    """Authenticates a connection that was accepted.

    Raises:
        OSError, EOFError, AuthenticationError: the other side does not have the key, or did not
            prove it in time.
    """
    limit(connection, HANDSHAKE_TIMEOUT_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


def dial(address: str, key: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Connection:
    """Connects to a `PrivateListener`, and authenticates.

    Raises:
        OSError, EOFError, AuthenticationError: nobody listens there, the listener does not have the
            key, or did not prove it in time.
    """
    dialed = socket.socket(socket.AF_UNIX)
    dialed.settimeout(timeout_s)
    try:
        dialed.connect(address)
    except OSError:
        dialed.close()
        raise
    dialed.setblocking(True)
    connection = _register(dialed)
    try:
        limit(connection, timeout_s)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except CONNECTION_ERRORS:
        connection.close()
        raise
    return connection


def limit(connection: Connection, timeout_s: float, sending: bool = True) -> None:
    """Sets how long one read or write may wait for the other side. Later it raises OSError.

    Args:
        connection: of which.
        timeout_s: the limit.
        sending: also of writes. False: they wait until the other side reads, ends the connection,
            or dies.
    """
    seconds = min(timeout_s, 1e7)
    value = struct.pack("@ll", int(seconds), int(seconds % 1.0 * 1e6) or int(seconds < 1.0))
    with _as_socket(connection) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        if not sending:
            value = bytes(len(value))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def buffer_bytes(connection: Connection) -> int:
    """Bytes that can be sent before the other side reads, at least."""
    with _as_socket(connection) as same:
        # The kernel counts its own overhead, at most about as much again for messages of 1 KB.
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def hang_up(connection: Connection) -> None:
    """Ends a connection, for the other side at once."""
    shut_down(connection)
    connection.close()


def shut_down(connection: Connection) -> None:
    """Ends a connection, but keeps its file descriptor, which another thread may be using."""
    with contextlib.suppress(OSError), _as_socket(connection) as same:  # it may have ended already
        same.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _as_socket(connection: Connection) -> Iterator[socket.socket]:
    """A connection as a socket, with the same file descriptor."""
    same = socket.socket(fileno=connection.fileno())
    try:
        yield same
    finally:
        same.detach()


def _register(connected: socket.socket) -> Connection:
    connection = Connection(connected.detach())
    _OPEN.add(connection)
    return connection


def _close_in_fork() -> None:
    """A forked process, such as the process of an environment, would keep a connection open after
    the death of this process, and the other side would not notice."""
    for either in list(_OPEN):
        either.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _remove(directory: str, pid: int) -> None:
    """Removes a directory of process `pid`. Does nothing in processes forked from it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(f"{directory}/s")
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _remove_left_behind() -> None:
    """Removes the directories of listeners that were killed."""
    for directory in left_behind("polopt-*/s"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.setblocking(False)
            try:
                probe.connect(directory)
            except ConnectionRefusedError:
                _remove(os.path.dirname(directory), os.getpid())
            except OSError:  # it listens, and is busy. Or another process has removed it
                continue


def left_behind(pattern: str) -> list[str]:
    """Files of this user in the directory for temporary files that are older than
    `LEFT_BEHIND_S`.

    Args:
        pattern: of their names, as for `glob`.
    """
    found = []
    for path in glob.glob(f"{glob.escape(tempfile.gettempdir())}/{pattern}"):
        with contextlib.suppress(OSError):  # another process has removed it
            status = os.lstat(path)
            old = time.time() - status.st_mtime > LEFT_BEHIND_S
            if old and status.st_uid == os.geteuid():
                found.append(path)
    return found
