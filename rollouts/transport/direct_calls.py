"""Direct calls: a method of a worker, called over a connection of its own.

A call through Ray costs both sides about a millisecond of processor time, which for a small network
is as much as its gradient. So calls that are many and small go over a connection that the worker
makes to the driver. Ray still starts, places, ends and watches the worker, and tells why it
failed: the worker answers direct calls within one long call of Ray's (`serve`), and whatever ends
that ends the connection.

The connection lets in only who has the token, which travels through Ray: messages are pickles. A
worker takes the driver's address from Ray, too, and trusts whoever answers there.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from polopt.rollouts.transport.sockets import MAX_TIMEOUT_S, TOKEN_BYTES, fill, greeting, hang_up

#: So many calls to a worker may be under way at once, with requests of up to about 100 KB. The
#: kernel's buffers hold them, so that the driver never waits for a worker to read; one with a
#: larger answer waits for the driver.
MOST_DIRECT_CALLS = 2
BUFFER_BYTES = MOST_DIRECT_CALLS * 105_000
#: Until a connection to the driver stands.
CONNECT_TIMEOUT_S = 5.0
#: Firewalls forget connections that are silent for some minutes, as those of long fragments are.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_HEADER = struct.Struct("<III")  # bytes of all, bytes of the pickle, number of buffers
_ALIGNMENT = 64


class Request(NamedTuple):
    """What a worker is asked for.

    Attributes:
        number: comes back with the answer.
        method: of the worker; None: the driver hangs up, and calls through Ray again.
        args: of the method.
    """

    number: int
    method: str | None = None
    args: tuple[Any, ...] = ()


class Connection:
    """Sends and receives picklable objects; arrays in them are not copied by pickle.

    Args:
        connected: a socket.
        timeout_s: of each wait for the other side within a message; None: without end.

    Raises:
        OSError: the system gives the socket no room for two messages.
    """

    def __init__(self, connected: socket.socket, timeout_s: float | None = None) -> None:
        self.socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # not every system has them all
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, side, BUFFER_BYTES)
            if connected.getsockopt(socket.SOL_SOCKET, side) < BUFFER_BYTES:
                raise OSError(f"the system allows sockets less than {BUFFER_BYTES} bytes")
        connected.settimeout(None if timeout_s is None else min(timeout_s, MAX_TIMEOUT_S))

    def send(self, message: Any) -> None:
        """Raises:
        OSError: the other side is gone, or has read nothing within the timeout.
        """
        self.socket.sendall(encode(message))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side is gone.
            OSError: likewise; or it stopped in the middle of a message.
        """
        total, pickled, count = _HEADER.unpack(self._read(_HEADER.size))
        content = memoryview(self._read(total))
        sizes = struct.unpack(f"<{count}I", content[total - 4 * count :])
        buffers, offset = [], 0
        for size in sizes:
            buffers.append(content[offset : offset + size])
            offset += _padded(size)
        return pickle.loads(content[offset : offset + pickled], buffers=buffers)

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        if not fill(memoryview(content), self.socket):
            raise EOFError("the other side is gone")
        return content

    def close(self) -> None:
        """The other side notices at once."""
        hang_up(self.socket)


def encode(message: Any) -> bytes:
    """Header, arrays (each where memory is aligned), the pickle, and how long each array is."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts: list[bytes | memoryview] = []
    sizes = []
    for buffer in buffers:
        raw = buffer.raw()
        parts += [raw, bytes(_padded(raw.nbytes) - raw.nbytes)]
        sizes.append(raw.nbytes)
    parts += [pickled, struct.pack(f"<{len(sizes)}I", *sizes)]
    total = sum(len(part) for part in parts)
    return b"".join([_HEADER.pack(total, len(pickled), len(sizes)), *parts])


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def connect(address: tuple[str, int], token: bytes) -> Connection:
    """A worker's connection to the driver.

    Args:
        address: of the driver.
        token: that it gave to this worker.

    Raises:
        OSError: it can not be reached, or hangs up.
    """
    connected = socket.create_connection(address, CONNECT_TIMEOUT_S)
    try:
        connection = Connection(connected)  # first, for it may turn out to be of no use
        connected.sendall(token)
        return connection
    except BaseException:
        connected.close()
        raise


def greet(connected: socket.socket, tokens: Sequence[bytes], timeout_s: float) -> bytes | None:
    """Which of the tokens a caller has.

    Args:
        connected: to the caller.
        tokens: of those who are expected.
        timeout_s: for all that the caller has to say.

    Returns:
        None, if it has none, and is a stranger.
    """
    said = greeting(connected, TOKEN_BYTES, timeout_s)
    if said is None:
        return None
    return next((token for token in tokens if hmac.compare_digest(token, said)), None)


class Answering:
    """A worker's connection to its driver, and direct calls answered on it."""

    def __init__(self) -> None:
        self._held: tuple[bytes, Connection] | None = None

    def serve(self, worker: Any, address: tuple[str, int], token: bytes) -> str:
        """Answers direct calls until the driver hangs up.

        Args:
            worker: whose methods are called.
            address: of the driver.
            token: of the connection; another than before means a new one.

        Returns:
            why the driver could not be reached; empty: it could.

        Raises:
            Exception: whatever a method raised.
        """
        if self._held is None or self._held[0] != token:
            try:
                self._held = token, connect(address, token)
            except OSError as error:
                return str(error)
        answer(worker, self._held[1])
        return ""

    def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._held is not None:
            self._held[1].close()


def answer(worker: Any, connection: Connection) -> None:
    """Answers requests, one after the other, until the driver hangs up or is gone.

    Whatever a method raises goes through, after the connection is closed.
    """
    while True:
        try:
            request = connection.receive()
        except (EOFError, OSError):
            connection.close()
            return
        if request.method is None:
            return
        try:
            said = encode((request.number, getattr(worker, request.method)(*request.args)))
        except BaseException:
            connection.close()
            raise
        try:
            connection.socket.sendall(said)
        except OSError:
            connection.close()
            return
