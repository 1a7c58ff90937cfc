"""Connections between processes of one node, over Unix sockets in a private directory.

`multiprocessing.connection` frames the messages. It authenticates both sides with a key (HMAC)
before either side reads anything else. The processes receive the key from the driver. `Wakeup` is
the socket with which a thread wakes a wait for these connections.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import os
import socket
import struct
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray

#: The longest wait for each message with which the other side proves that it has the key.
HANDSHAKE_TIMEOUT_S = 4.0
#: The largest number of peers that can authenticate at the same time. If a further peer connects,
#: the listener drops the oldest of these peers.
MAX_HANDSHAKES = 256
#: The largest size of the first message that a peer sends after it has authenticated.
MAX_HELLO_BYTES = 64
#: The size that is asked for the send buffer of each connection. With the usual size of about 200
#: KB, ten messages of 10 KB to a busy process fill the buffer, and a thread has to send the next
#: calls, which takes longer. The system can have a lower limit.
SEND_BUFFER_BYTES = 1 << 20
#: The pause of a listener after an error, for example if no file descriptor is free.
RETRY_S = 0.1
#: The age in seconds at which a process removes an unused file of another process of this user: a
#: socket on which no process listens, or a control page that the driver has not opened.
LEFT_BEHIND_S = 3600.0
#: The errors that a peer can cause if it is broken, slow, or has no key.
CONNECTION_ERRORS = (OSError, EOFError, AuthenticationError)

#: The open connections and listening sockets of this process.
_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


class PrivateListener:
    """Listens on a socket in a directory that only this user can enter.

    Each peer authenticates in its own thread, so a silent peer does not delay other peers.

    Args:
        key: the key with which both sides authenticate.
        admitted: a function that is called with each connection that has authenticated, and with
            the first message of the peer. It runs in the thread of this peer.

    Attributes:
        address: path of the socket, for `dial`.

    Raises:
        OSError: the socket cannot be bound, for example because the path of the directory for
            temporary files is too long.
    """

    def __init__(self, key: bytes, admitted: Callable[[Connection, bytes], None]) -> None:
        _remove_left_behind()
        directory = tempfile.mkdtemp(prefix=f"polopt-{os.getpid()}-")
        # The finalizer also runs when the interpreter exits.
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
                    shut_down(oldest)  # the thread of this peer closes the connection
            try:
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except RuntimeError:  # the process has too many threads
                self._end_handshake(connection)
                connection.close()

    def _admit(self, connection: Connection) -> None:
        try:
            admit(connection, self._key)
            hello = connection.recv_bytes(MAX_HELLO_BYTES)
        except CONNECTION_ERRORS:
            self._end_handshake(connection)
            connection.close()
        else:
            # Before `admitted`. Otherwise `_accept` could drop a connection that is in use.
            if self._end_handshake(connection):
                self._admitted(connection, hello)
            else:
                connection.close()

    def _end_handshake(self, connection: Connection) -> bool:
        """Returns False if `_accept` has dropped the connection."""
        with self._lock:
            return self._handshakes.pop(connection, connection) is None

    def close(self) -> None:
        """Stops listening. Connections stay open."""
        self._closed = True
        with contextlib.suppress(OSError):  # some systems raise, because the socket is unconnected
            self._socket.shutdown(socket.SHUT_RDWR)  # makes `accept` return in its thread
        self._socket.close()
        self._remove()


def admit(connection: Connection, key: bytes) -> None:
    """Authenticates a connection that a listener has accepted.

    Raises:
        OSError, EOFError, AuthenticationError: the other side did not prove in time that it has the
            key.
    """
    limit(connection, HANDSHAKE_TIMEOUT_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


def dial(address: str, key: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Connection:
    """Connects to a `PrivateListener`, authenticates, and returns the connection.

    Raises:
        OSError, EOFError, AuthenticationError: no process listens at the address, or the listener
            did not prove in time that it has the key.
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
    """Sets the longest time that a read or write waits for the other side. After this time, the
    read or write raises OSError.

    Args:
        connection: the connection.
        timeout_s: the time limit in seconds.
        sending: if True, the limit also applies to writes. If False, a write waits until the other
            side reads, ends the connection, or dies.
    """
    seconds = min(timeout_s, 1e7)
    value = struct.pack("@ll", int(seconds), int(seconds % 1.0 * 1e6) or int(seconds < 1.0))
    with _as_socket(connection) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        if not sending:
            value = bytes(len(value))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Outbox:
    """Sends messages over a connection in order, without waiting for the other side to read.

    A message that fits into the kernel's buffer is sent at once. A thread sends any other message,
    and ends when no message is left.

    Args:
        connection: the connection. Only the outbox may write to it, and only `close` of the outbox
            may close it.
        most_bytes: the largest number of bytes that may wait for the thread. `send` waits before
            it exceeds this number. A single message may be larger.
    """

    def __init__(self, connection: Connection, most_bytes: int = 0) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._room = buffer_bytes(connection)
        self._unsent: deque[bytes] = deque()  # the thread sends the first one
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Sends a message.

        Args:
            message: the message.
            timeout_s: the longest time to wait while too many bytes wait for the thread. None means
                no limit.

        Raises:
            OSError: the connection has ended, or `timeout_s` has passed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_space(len(message)), timeout_s):
                raise TimeoutError(f"the other side did not read for {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            if not self._unsent and len(message) + unread_bytes(self._connection) <= self._room:
                send_whole(self._connection, message)
                return
            self._unsent.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_unsent, name="polopt-send", daemon=True
                )
                self._thread.start()

    def _has_space(self, size: int) -> bool:
        waiting = sum(map(len, self._unsent))
        return not waiting or waiting + size <= self._most_bytes or self._error is not None

    def _send_unsent(self) -> None:
        while True:
            with self._changed:
                if not self._unsent or self._error is not None:
                    self._thread = None
                    return
                message = self._unsent[0]
            try:
                send_whole(self._connection, message)
            except OSError as error:
                # The next `send` raises this error. The reader of the connection also notices.
                self._end(error)
                continue
            with self._changed:
                self._unsent.popleft()
                self._changed.notify_all()

    def _end(self, error: OSError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends and closes the connection. Messages that were not sent are lost."""
        self._end(OSError("the connection was closed"))
        thread = self._thread
        shut_down(self._connection)
        if thread is not None:
            thread.join()  # ends soon, because sending fails
        self._connection.close()


def send_whole(connection: Connection, message: bytes) -> None:
    """Sends a message like `connection.send_bytes`, but with a single system call. `send_bytes`
    first writes the size of a large message. The thread could then wait for the interpreter lock,
    while the other side waits for the rest of the message."""
    size = len(message)
    header = struct.pack("!i", size) if size < 1 << 31 else struct.pack("!iQ", -1, size)
    file, left = connection.fileno(), len(header) + size
    left -= os.writev(file, [header, message])
    while left:  # a signal has interrupted the call, or the message is larger than 2 GB
        left -= os.write(file, memoryview(message)[-left:])


def buffer_bytes(connection: Connection) -> int:
    """Returns a number of bytes that this side can send without waiting for the other side to read,
    if the other side has read all earlier bytes."""
    with _as_socket(connection) as same:
        # The kernel also counts its overhead. For messages of 1 KB, the overhead is at most about
        # as large as the message.
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def unread_bytes(connection: Connection) -> float:
    """Returns the number of bytes of the kernel's buffer that hold earlier messages, because the
    other side has not read them. Infinity if the system does not say."""
    try:
        size = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
            return math.inf
        raise
    return int.from_bytes(size, sys.byteorder)


def hang_up(connection: Connection) -> None:
    """Ends and closes a connection. The other side notices this at once."""
    shut_down(connection)
    connection.close()


def shut_down(connection: Connection) -> None:
    """Ends a connection, but keeps its file descriptor, because another thread may be using it."""
    # The connection may already have ended.
    with contextlib.suppress(OSError), _as_socket(connection) as same:
        same.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _as_socket(connection: Connection) -> Iterator[socket.socket]:
    """Provides a socket object with the file descriptor of a connection."""
    # With the family and type, this makes no system call.
    same = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, connection.fileno())
    try:
        yield same
    finally:
        same.detach()


def _register(connected: socket.socket) -> Connection:
    with contextlib.suppress(OSError):  # some systems raise instead of using their limit
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    connection = Connection(connected.detach())
    _OPEN.add(connection)
    return connection


def _close_in_fork() -> None:
    """Closes all connections and listening sockets in a forked process, such as the process of an
    environment. Otherwise the connections would stay open after the death of the parent process,
    and the other side would not notice this death."""
    for either in list(_OPEN):
        either.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _remove(directory: str, pid: int) -> None:
    """Removes the directory of a listener, if this process is process `pid`. Does nothing in
    processes that were forked from process `pid`, because the listener is not theirs."""
    if os.getpid() == pid:
        _remove_directory(directory)


def _remove_directory(directory: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(f"{directory}/s")
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def remove_files_of(processes: Iterable[int]) -> None:
    """Removes the temporary files of polopt in processes that have been killed: the directories of
    listeners, and control pages.

    Args:
        processes: the ids of the processes. The id of this process is allowed if this process is
            about to exit without its exit handlers.
    """
    parent = glob.escape(tempfile.gettempdir())
    for process in processes:
        for path in glob.glob(f"{parent}/polopt-{process}-*"):
            _remove_directory(path)
        for path in glob.glob(f"{parent}/polopt-control-{process}-*"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove_left_behind() -> None:
    """Removes the directories of listeners whose processes were killed, once the directories are
    old enough (`LEFT_BEHIND_S`)."""
    for directory in left_behind("polopt-*/s"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.setblocking(False)
            try:
                probe.connect(directory)
            except ConnectionRefusedError:
                _remove_directory(os.path.dirname(directory))
            except OSError:  # the listener is busy, or another process has removed the socket
                continue


def left_behind(pattern: str) -> list[str]:
    """Returns the paths of temporary files that belong to this user and are older than
    `LEFT_BEHIND_S`.

    Args:
        pattern: a pattern for the names of the files, as for `glob`.
    """
    found = []
    for path in glob.glob(f"{glob.escape(tempfile.gettempdir())}/{pattern}"):
        with contextlib.suppress(OSError):  # another process has removed the file
            status = os.lstat(path)
            old = time.time() - status.st_mtime > LEFT_BEHIND_S
            if old and status.st_uid == os.geteuid():
                found.append(path)
    return found


class Wakeup:
    """A socket that becomes readable when a watched Ray call ends.

    Ray completes the future of a call in a thread of its own. A callback in this thread writes to
    the socket.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._ended: deque[tuple[Any, Future[Any]]] = deque()

    def fileno(self) -> int:
        """Returns the file descriptor that a selector watches for reading."""
        return self._reader.fileno()

    def watch(self, ref: ray.ObjectRef[Any], tag: Any = None) -> Future[Any]:
        """Watches a call: the socket becomes readable when the call ends.

        Args:
            ref: the reference that the call returned.
            tag: any value. `handle` passes it on with the future. None means that `handle` does not
                handle this call.

        Returns:
            the future of the call.
        """
        future: Future[Any] = ref.future()

        def wake(ended: Future[Any]) -> None:
            if tag is not None:
                self._ended.append((tag, ended))
            self.wake()

        future.add_done_callback(wake)
        return future

    def wake(self) -> None:
        """Makes the socket readable. Any thread may call this method."""
        # A BlockingIOError means that the socket is already readable. Other OSErrors mean that the
        # socket is closed.
        with contextlib.suppress(OSError):
            self._writer.send(b".")

    def handle(self, handler: Callable[[Any, Future[Any]], None]) -> None:
        """Empties the socket, and calls `handler(tag, future)` for each call with a tag that has
        ended. If the handler raises, for example because of Ctrl-C, the next `handle` goes on with
        the same call, and the socket is readable again."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        try:
            while self._ended:
                handler(*self._ended[0])
                self._ended.popleft()
        except BaseException:
            self.wake()
            raise

    def close(self) -> None:
        """Closes the socket. Calls that end later have no effect."""
        self._reader.close()
        self._writer.close()
