"""`Values`: the values that stay in the process that made them, and `Reference`, which finds them.

A process that needs the value of a reference fetches it from its maker over a Unix socket. So the
value does not pass through the driver.
"""

from __future__ import annotations

import pickle
import secrets
import threading
from multiprocessing.connection import Connection
from typing import Any

from ray import cloudpickle

from polopt.rollouts.transport.channel import AnswerTimeoutError, LostReferenceError
from polopt.rollouts.transport.sockets import (
    CONNECTION_ERRORS,
    MAX_HELLO_BYTES,
    Outbox,
    PrivateListener,
    dial,
    hang_up,
    limit,
    shut_down,
)

#: The longest wait for the value of a reference.
FETCH_TIMEOUT_S = 60.0
_TOKEN_BYTES = 16


class Reference:
    """A reference to a value in a process of this node.

    Args:
        address: address at which the process listens.
        key: the key with which both sides authenticate.
        token: identifies the value.
    """

    __slots__ = ("__weakref__", "address", "key", "token")

    def __init__(self, address: str, key: bytes, token: bytes) -> None:
        self.address, self.key, self.token = address, key, token

    def __reduce__(self) -> Any:
        return Reference, (self.address, self.key, self.token)

    def __repr__(self) -> str:
        return f"Reference({self.address!r})"  # omits the secrets


class Values:
    """The values of this process that other processes may fetch, and the connections over which
    this process fetches values of others.

    The first `put` makes a listener. Each peer that fetches values has a thread, so a process
    serves its values while it runs a call.
    """

    def __init__(self) -> None:
        self._encoded: dict[bytes, bytes] = {}  # by token
        self._key = secrets.token_bytes(32)
        self._listener: PrivateListener | None = None
        self._served: set[Connection] = set()
        self._fetching: dict[str, Connection] = {}  # by address of the other process
        self._lock = threading.Lock()

    def put(self, value: Any) -> Reference:
        """Keeps a value, and returns a reference to it.

        Raises:
            OSError: the listener cannot bind a socket.
            Exception: the value cannot be pickled.
        """
        encoded = pickled(value)
        with self._lock:
            if self._listener is None:
                self._listener = PrivateListener(self._key, self._serve)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._encoded[token] = encoded
        return Reference(self._listener.address, self._key, token)

    def drop(self, token: bytes) -> None:
        """Drops a value. Any thread may call this method."""
        self._encoded.pop(token, None)

    def get(self, reference: Reference) -> Any:
        """Returns the value of a reference.

        Raises:
            LostReferenceError: the process that made the value has ended, or has dropped it.
            AnswerTimeoutError: the process did not send the value in time.
        """
        encoded = self._encoded.get(reference.token) or self._fetch(reference)
        if not encoded:
            raise LostReferenceError("an argument is lost: its process has dropped the value")
        return pickle.loads(encoded)

    def _fetch(self, reference: Reference) -> bytes:
        address = reference.address
        connection = self._fetching.pop(address, None)
        if connection is None:
            self._close_ended()
        try:
            connection = connection or dial(address, reference.key, FETCH_TIMEOUT_S)
            limit(connection, FETCH_TIMEOUT_S)
            connection.send_bytes(reference.token)
            encoded = connection.recv_bytes()
        except BaseException as error:
            if connection is not None:
                hang_up(connection)  # after Ctrl-C, the rest of the message is lost
            if isinstance(error, BlockingIOError):
                raise AnswerTimeoutError("an argument could not be fetched in time") from error
            if isinstance(error, CONNECTION_ERRORS):
                why = f"an argument is lost: its process has ended ({type(error).__name__})"
                raise LostReferenceError(why) from error
            raise
        self._fetching[address] = connection
        return encoded

    def _close_ended(self) -> None:
        """Closes the connections to processes that have ended. Nothing is fetched over these
        connections any more, so each replaced process would keep one of them open."""
        for address, connection in list(self._fetching.items()):
            if connection.poll(0):  # a peer sends only what was asked for, so this is the end
                hang_up(self._fetching.pop(address))

    def _serve(self, connection: Connection, token: bytes) -> None:
        """Sends values to a peer that has authenticated, until the peer hangs up. Runs in the
        thread of this peer."""
        with self._lock:
            self._served.add(connection)
        outbox = Outbox(connection)
        try:
            limit(connection, FETCH_TIMEOUT_S)
            while True:
                outbox.send(self._encoded.get(token, b""), FETCH_TIMEOUT_S)
                connection.poll(None)  # waits without a limit until the peer needs a value
                token = connection.recv_bytes(MAX_HELLO_BYTES)
        except CONNECTION_ERRORS:
            pass  # the peer fetches no more values
        finally:
            with self._lock:
                self._served.discard(connection)
            outbox.close()

    def close(self) -> None:
        """Drops all values, and closes the listener and all connections."""
        self._encoded.clear()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            for connection in self._served:
                shut_down(connection)  # its thread closes it
        for connection in self._fetching.values():
            hang_up(connection)
        self._fetching.clear()


def pickled(value: Any) -> bytes:
    """Encodes a value.

    Raises:
        Exception: the value cannot be pickled. Pickling can raise anything.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # for example for a lambda, which cloudpickle can encode by value
        encoded: bytes = cloudpickle.dumps(value)
        return encoded
