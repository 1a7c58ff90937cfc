"""`SocketServer`: answers the driver's calls over a socket, in the process of a worker."""

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
    shut_down,
)

#: Length of the number of the call, which begins an answer.
NUMBER_BYTES = 8


class Endpoint(NamedTuple):
    """What a process needs for one connection to its driver. Sent through Ray.

    Attributes:
        address: of the driver's `PrivateListener`.
        node: id of its node.
        key: by which both sides authenticate.
        token: tells the driver which process has connected.
        timeout_s: limit for the other side to complete a message.
    """

    address: str
    node: str
    key: bytes
    token: bytes
    timeout_s: float

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"  # without the secrets


class SocketServer:
    """A process's connection to its driver.

    `serve` runs inside one long actor call. Whatever ends that call (the driver, a lost connection,
    the death of the process) is reported to the driver by Ray.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._endpoint: Endpoint | None = None
        self._room = 0
        self._sender = ThreadPoolExecutor(1, "polopt-send")
        self._sending: Future[None] | None = None

    def connect(self, endpoint: Endpoint) -> str:
        """Connects, in place of an earlier connection.

        Returns:
            why that failed. Empty if it did not.
        """
        self.close()
        if endpoint.node != ray.get_runtime_context().get_node_id():
            return "it runs on another node"
        try:
            connection = dial(endpoint.address, endpoint.key)
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
            target: its `run(number, function, *args)` is called. Where a call cannot be unpickled
                or an answer cannot be pickled, its `refuse(why)` makes the answer.
            endpoint: of the connection.

        Returns:
            why the connection has ended. Empty after the driver has ended serving.
        """
        connection = self._connection
        if connection is None or self._endpoint != endpoint:
            return "there is another connection"
        try:
            while True:
                connection.poll(None)  # until the driver sends, or ends
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
        """Sends an answer. If the answer does not fit into the kernel's buffer, another thread
        sends it, because the driver may learn for a while before it reads. This process can then
        continue."""
        if self._sending is not None:
            self._sending.result()  # one at a time, in order
            self._sending = None
        if len(message) <= self._room:
            connection.send_bytes(message)
        else:
            self._sending = self._sender.submit(connection.send_bytes, message)

    def _run(self, target: Any, call: bytes) -> tuple[int, Any]:
        """Runs a call. Returns its number and its answer."""
        number = int.from_bytes(call[:NUMBER_BYTES], "big")
        try:
            _, function, args, _ = cloudpickle.loads(call[NUMBER_BYTES:])
        except Exception as error:  # an import of the user's module may raise anything
            return number, target.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        return number, target.run(number, function, *args)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            shut_down(self._connection)
            if self._sending is not None:
                wait([self._sending])  # it has failed, unless the answer was sent
            self._connection.close()
            self._connection = self._sending = None


def _pickled(target: Any, answer: Any) -> bytes:
    try:
        try:
            return pickle.dumps(answer, protocol=5)
        except Exception:  # such as a lambda: by value, as Ray does. Takes longer
            return cloudpickle.dumps(answer)
    except Exception as error:  # pickling can raise anything
        refusal = target.refuse(f"its value cannot be pickled: {error!r}")
        return pickle.dumps(refusal, protocol=5)
