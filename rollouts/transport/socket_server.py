"""`SocketServer`: answers calls of the driver over a socket, in the process of a worker."""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from polopt.rollouts.transport.sockets import (
    CONNECTION_ERRORS,
    buffer_bytes,
    dial,
    limit,
    send_whole,
    shut_down,
    unread_bytes,
)

#: Each call and each answer begin with the number of the call, in this many bytes.
NUMBER_BYTES = 8
#: The longest wait for each message of a driver that is busy while the process connects.
DIAL_TIMEOUT_S = 30.0


class Endpoint(NamedTuple):
    """The data that a process needs to connect to its driver. The driver sends them through Ray.

    Attributes:
        address: address of the driver's `PrivateListener`.
        node: id of the driver's node.
        key: the key with which both sides authenticate.
        token: identifies the process that connects.
        timeout_s: the longest time that the process waits for the rest of a message, in seconds.
    """

    address: str
    node: str
    key: bytes
    token: bytes
    timeout_s: float

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"  # omits the secrets


class SocketServer:
    """The connection of a process to its driver.

    `serve` runs inside one long actor call. This call ends when the driver ends it, when the
    connection is lost, or when the process dies. In each case, Ray reports the end to the driver.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._endpoint: Endpoint | None = None
        self._room = 0
        self._sender = ThreadPoolExecutor(1, "polopt-send")
        self._sending: Future[None] | None = None

    def connect(self, endpoint: Endpoint) -> str:
        """Closes the previous connection, if any, and connects to the driver.

        Returns:
            the reason why the process cannot connect. Empty if it has connected.
        """
        self.close()
        if endpoint.node != ray.get_runtime_context().get_node_id():
            return "it runs on another node"
        try:
            limit_s = min(DIAL_TIMEOUT_S, endpoint.timeout_s / 2.0)
            connection = dial(endpoint.address, endpoint.key, limit_s)
            limit(connection, endpoint.timeout_s, sending=False)
            connection.send_bytes(endpoint.token)
        except CONNECTION_ERRORS as error:
            return f"{endpoint.address}: {type(error).__name__}: {error}"
        self._connection, self._endpoint = connection, endpoint
        self._room = buffer_bytes(connection)
        return ""

    def serve(self, target: Any, endpoint: Endpoint) -> str:
        """Answers calls in order, until the driver sends an empty message.

        Args:
            target: the object that runs calls by `target.run(number, function, *args)`. If a call
                cannot be unpickled or an answer cannot be pickled, `target.refuse(why)` makes the
                answer.
            endpoint: the endpoint of the connection. `serve` refuses the endpoint of an earlier
                connection.

        Returns:
            the reason why `serve` cannot answer calls any more. Empty if the driver has sent an
            empty message.
        """
        connection = self._connection
        if connection is None or self._endpoint != endpoint:
            return "the process has closed this connection"
        try:
            while True:
                connection.poll(None)  # waits without a limit until the driver sends a call
                call = connection.recv_bytes()
                if not call:
                    return ""
                number, answer = self._run(target, call)
                encoded = _pickled(target, answer)
                self._send(connection, number.to_bytes(NUMBER_BYTES, "big") + encoded)
        except CONNECTION_ERRORS as error:
            self.close()
            return f"the connection was lost: {type(error).__name__}: {error}"
        except BaseException:
            self.close()
            raise

    def _send(self, connection: Connection, message: bytes) -> None:
        """Sends an answer. If the answer does not fit into the kernel's buffer, beside the answers
        that the driver has not read yet, another thread sends it. The driver may be busy with an
        update before it reads the answer, and this process can continue in the meantime."""
        if self._sending is not None:
            self._sending.result()  # waits, because answers must be sent in order
            self._sending = None
        if len(message) + unread_bytes(connection) <= self._room:
            send_whole(connection, message)
        else:
            self._sending = self._sender.submit(send_whole, connection, message)

    def _run(self, target: Any, call: bytes) -> tuple[int, Any]:
        """Runs a call. Returns the number and the answer of the call."""
        number = int.from_bytes(call[:NUMBER_BYTES], "big")
        try:
            _, function, args, _ = cloudpickle.loads(call[NUMBER_BYTES:])
        except Exception as error:  # an import of the user's module may raise anything
            return number, target.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        return number, target.run(number, function, *args)

    def close(self) -> None:
        """Closes the connection, if the process is connected."""
        if self._connection is not None:
            shut_down(self._connection)
            if self._sending is not None:
                wait([self._sending])  # ends soon: the answer was sent, or sending has failed
            self._connection.close()
            self._connection = self._sending = None


def _pickled(target: Any, answer: Any) -> bytes:
    try:
        try:
            return pickle.dumps(answer, protocol=5)
        except Exception:  # for example for a lambda, which cloudpickle can encode by value
            return cloudpickle.dumps(answer)
    except Exception as error:  # pickling can raise anything
        refusal = target.refuse(f"its value cannot be pickled: {error!r}")
        return pickle.dumps(refusal, protocol=5)
