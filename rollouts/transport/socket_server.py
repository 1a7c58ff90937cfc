"""`SocketServer`: answers calls of the driver over a socket, in the process of a worker."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from polopt.rollouts.transport.channel import ChannelError, LostProcessError
from polopt.rollouts.transport.references import Reference, Values, pickled
from polopt.rollouts.transport.sockets import CONNECTION_ERRORS, Outbox, dial, limit

#: Each call and each answer begin with the number of the call, in this many bytes.
NUMBER_BYTES = 8
#: The longest wait for each message of a driver that is busy while the process connects.
DIAL_TIMEOUT_S = 30.0
#: The number of times that a process tries to connect. A listener may drop a connection because too
#: many other peers connect at the same time.
DIAL_ATTEMPTS = 3
#: In place of a function, makes the process replace its object.
REMAKE = "remake"


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
    """The connection of a process to its driver. The process answers all calls over it.

    `serve` runs inside one actor call, which ends when the connection ends or the process dies. In
    each case, Ray reports the end to the driver.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._outbox: Outbox | None = None
        self._values = Values()

    def connect(self, endpoint: Endpoint) -> str:
        """Connects to the driver. Returns once the driver's listener has admitted the process.

        Returns:
            the reason why the process cannot connect. Empty if it has connected.
        """
        if endpoint.node != ray.get_runtime_context().get_node_id():
            return "it runs on another node"
        limit_s = min(DIAL_TIMEOUT_S, endpoint.timeout_s / 2.0)
        problem = ""
        for _ in range(DIAL_ATTEMPTS):
            connection = None
            try:
                connection = dial(endpoint.address, endpoint.key, limit_s)
                connection.send_bytes(endpoint.token)
                connection.recv_bytes(0)  # the listener has admitted this process
                limit(connection, endpoint.timeout_s, sending=False)
            except CONNECTION_ERRORS as error:
                if connection is not None:
                    connection.close()
                problem = f"{endpoint.address}: {type(error).__name__}: {error}"
            else:
                self._connection, self._outbox = connection, Outbox(connection)
                return ""
        return problem

    def serve(self, process: Any) -> str:
        """Answers calls in order until the connection ends.

        Args:
            process: the process. Its `target` runs calls by `target.run(number, function, *args)`.
                If a call cannot be unpickled or an answer cannot be pickled, `target.refuse(why)`
                makes the answer. `process.remake(*args)` replaces the target.

        Returns:
            the reason why the connection has ended. Empty if the process has not connected.
        """
        connection, outbox = self._connection, self._outbox
        if connection is None or outbox is None:
            return ""
        try:
            while True:
                connection.poll(None)  # waits without a limit until the driver sends a call
                call = connection.recv_bytes()
                answer = self._run(process, memoryview(call)[NUMBER_BYTES:])
                outbox.send(call[:NUMBER_BYTES] + _encoded(process.target, answer))
        except CONNECTION_ERRORS as error:
            self.close()
            return f"the connection was lost: {type(error).__name__}: {error}"
        except BaseException:
            self.close()
            raise

    def _run(self, process: Any, call: memoryview) -> Any:
        """Runs a call. Returns its answer, or the `ChannelError` that the driver raises."""
        try:
            number, function, args, by_reference, dropped = cloudpickle.loads(call)
        except Exception as error:  # an import of the user's module may raise anything
            why = f"the call cannot be unpickled in the worker: {error!r}"
            return process.target.refuse(why)
        for token in dropped:
            self._values.drop(token)
        if function == REMAKE:
            try:
                return process.remake(*args)
            except Exception as error:  # the user's environment may raise anything
                return LostProcessError(traceback.format_exc() or str(error), at_start=True)
        try:
            args = [self._values.get(a) if isinstance(a, Reference) else a for a in args]
        except ChannelError as error:
            return error
        except Exception as error:  # unpickling can raise anything
            return process.target.refuse(f"an argument cannot be unpickled: {error!r}")
        answer = process.target.run(number, function, *args)
        if by_reference and answer.error is None:
            try:
                return answer._replace(value=self._values.put(answer.value))
            except Exception as error:  # pickling can raise anything
                return process.target.refuse(f"its value cannot be pickled: {error!r}")
        return answer

    def close(self) -> None:
        """Closes the connection, if the process is connected, and drops the values that stay in
        this process."""
        if self._outbox is not None:
            self._outbox.close()
        self._values.close()
        self._connection = self._outbox = None


def _encoded(target: Any, answer: Any) -> bytes:
    try:
        return pickled(answer)
    except Exception as error:  # pickling can raise anything
        return pickled(target.refuse(f"its value cannot be pickled: {error!r}"))
