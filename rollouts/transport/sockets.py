"""Connections between processes of one node: Unix sockets in a private directory.

`multiprocessing.connection` frames the messages, and authenticates both sides by a key (HMAC)
before either of them reads anything else. The key travels through Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile
import weakref
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

#: Limit for the other side to prove that it has the key.
HANDSHAKE_TIMEOUT_S = 4.0
#: What a broken, slow or foreign peer may cause.
CONNECTION_ERRORS = (OSError, EOFError, AuthenticationError)

_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


class PrivateListener:
    """Listens in a directory that only this user can enter.

    Attributes:
        address: path of the socket, for `dial`.

    Raises:
        OSError: no socket can be bound, for example because the path of the directory for temporary
            files is too long for one.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="polopt-")
        # Also runs when the interpreter exits.
        self._remove = weakref.finalize(self, _remove, directory, os.getpid())
        self.address = f"{directory}/s"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(self.address)
            self._socket.listen(1024)
        except OSError:
            self.close()
            raise

    def accept(self, timeout_s: float | None) -> Connection:
        """The next connection, which has not authenticated yet; see `admit`.

        Args:
            timeout_s: limit; None: until `close`.

        Raises:
            OSError: none came in time, or the listener is closed.
        """
        self._socket.settimeout(timeout_s)
        accepted, _ = self._socket.accept()
        accepted.setblocking(True)
        return _register(accepted)

    def close(self) -> None:
        """Ends listening; `accept` raises in the thread that waits in it."""
        with contextlib.suppress(OSError):  # not connected, on some systems
            self._socket.shutdown(socket.SHUT_RDWR)
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


def limit(connection: Connection, timeout_s: float) -> None:
    """Sets how long one read or write may wait for the other side; later it raises OSError."""
    seconds = min(timeout_s, 1e7)
    value = struct.pack("@ll", int(seconds), int(seconds % 1.0 * 1e6) or int(seconds < 1.0))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def buffer_bytes(connection: Connection) -> int:
    """Bytes that can be sent before the other side reads, at least."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        # The kernel counts its own overhead, at most about as much again for messages of 1 KB.
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def hang_up(connection: Connection) -> None:
    """Ends a connection, for the other side at once."""
    with contextlib.suppress(OSError):
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
        connection.close()


def _register(connected: socket.socket) -> Connection:
    connection = Connection(connected.detach())
    _OPEN.add(connection)
    return connection


def _close_in_fork() -> None:
    """A forked process, such as that of an environment, would keep the connection open after the
    death of this one, and the other side would not notice."""
    for connection in list(_OPEN):
        if not connection.closed:
            connection.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _remove(directory: str, pid: int) -> None:
    """Removes a directory of process `pid`; does nothing in processes forked from it."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
