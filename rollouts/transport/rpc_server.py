"""`RpcServer`: answers a client's calls, in the process of a worker."""

from __future__ import annotations

import contextlib
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.messages import (
    ANSWER,
    CALL,
    END,
    HELLO,
    LARGE,
    configure,
    decode,
    encode,
    fits,
    header_of,
)

#: Limit for connecting and authenticating; afterwards the calls go through Ray.
CONNECT_TIMEOUT_S = 4.0
_OPEN = zmq.Event.HANDSHAKE_SUCCEEDED
_CLOSED = zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class RpcServer:
    """A worker's connection to its driver, on which it answers calls.

    `serve` runs inside one long actor call. Whatever ends that call (the client, an exception of a
    method, a lost connection, the death of the process) is reported to the driver by Ray.
    """

    def __init__(self) -> None:
        self._connection: _Connection | None = None

    def connect(self, endpoint: Endpoint) -> str:
        """Connects and authenticates, in place of an earlier connection.

        Args:
            endpoint: address and keys.

        Returns:
            why that failed within `CONNECT_TIMEOUT_S`; empty: it did not.
        """
        self.close()
        self._connection = _Connection(endpoint)
        problem = self._connection.open(CONNECT_TIMEOUT_S)
        if problem:
            self._connection.close(lost=True)
        return problem

    def serve(self, target: Any, endpoint: Endpoint) -> str:
        """Answers calls in order, until the client ends serving.

        Args:
            target: its `run(number, function, *args)` is called. Where a call cannot be
                unpickled or an answer cannot be pickled, its `refuse(why)` makes the answer.
            endpoint: of the connection.

        Returns:
            why the connection has ended; empty after the client has ended serving.
        """
        if self._connection is None or self._connection.endpoint != endpoint:
            return "there is another connection"
        return self._connection.answer(target)

    def take_large_answer(self, endpoint: Endpoint, number: int) -> list[bytes]:
        """The frames of an answer that did not fit into a message. Any thread may call this, also
        while another serves, and after the connection has ended.

        Args:
            endpoint: of the connection.
            number: of the call.

        Raises:
            KeyError: there is no such answer.
        """
        connection = self._connection
        if connection is None or connection.endpoint != endpoint:
            raise KeyError(f"answer {number}: there is another connection")
        return connection.large_answers.pop(number)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()


class _Connection:
    """One authenticated connection. It is never reestablished: ZeroMQ would lose messages in
    between without notice."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.large_answers: dict[int, list[bytes]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        configure(socket, endpoint.heartbeat_timeout_s, endpoint.max_frame_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._address = endpoint.authenticate(socket)
        self._monitor = socket.get_monitor_socket(_OPEN | _CLOSED | _FAILED)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def open(self, timeout_s: float) -> str:
        """Connects and authenticates; why that failed, else empty."""
        address = self._address
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            return f"{address}: {error}"
        if not self._monitor.poll(int(1e3 * timeout_s)):
            return f"{address}: no connection within {timeout_s:g} s"
        event = zmq.Event(recv_monitor_message(self._monitor)["event"])
        if event != _OPEN:
            return f"{address}: {str(event.name).lower().replace('_', ' ')}"
        return "" if self._send(encode(HELLO)) else f"{address}: disconnected"

    def _send(self, message: list[bytes | memoryview]) -> bool:
        """Sends; False if the client is disconnected. A send that may wait would wait for ever."""
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answer(self, target: Any) -> str:
        """See `RpcServer.serve`."""
        if self._socket.closed:
            return "the connection has ended"
        try:
            while True:
                # Limited by heartbeats: the monitor reports a client that answers none.
                ready = dict(self._poller.poll())
                if self._socket not in ready:
                    break
                frames = self._socket.recv_multipart(copy=False)
                kind, number = header_of(frames)
                if kind == END:
                    self._drop_large_answers(number)
                    return ""
                if kind != CALL:
                    raise ValueError(f"message of unknown kind: {kind!r}")
                answer = self._answer(target, number, frames)
                if not fits(answer, self.endpoint.max_frame_bytes):
                    # Copies, because the next call may change the arrays.
                    self.large_answers[number] = [bytes(frame) for frame in answer]
                    answer = encode(LARGE, number)
                if not self._send(answer):
                    break
        except BaseException:
            self.close()
            raise
        self.close(lost=True)
        return "the connection was lost"

    def _answer(
        self, target: Any, number: int, frames: list[zmq.Frame]
    ) -> list[bytes | memoryview]:
        """Runs a call; returns the message with its answer."""
        try:
            function, args, oldest_wanted = decode(frames)
        except Exception as error:  # unpickling can raise anything
            why = f"the call cannot be unpickled in the worker: {error!r}"
            return encode(ANSWER, number, target.refuse(why))
        self._drop_large_answers(oldest_wanted)
        answer = target.run(number, function, *args)
        try:
            with contextlib.suppress(Exception):  # pickling can raise anything
                return encode(ANSWER, number, answer)
            return encode(ANSWER, number, answer, by_value=True)
        except Exception as error:
            return encode(ANSWER, number, target.refuse(f"its value cannot be pickled: {error!r}"))

    def _drop_large_answers(self, oldest_wanted: int) -> None:
        """Drops those that the client does not wait for: it could not fetch them, or has dropped
        their calls."""
        for number in [number for number in self.large_answers if number < oldest_wanted]:
            self.large_answers.pop(number, None)  # another thread may have taken it

    def close(self, lost: bool = False) -> None:
        """Sends the answers that are queued, and END behind them.

        Args:
            lost: there is no client to send them to.
        """
        if self._socket.closed:
            return
        lost = lost or bool(self._monitor.poll(0))
        if not lost:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(encode(END), zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0 if lost else None)
        self._context.term()
