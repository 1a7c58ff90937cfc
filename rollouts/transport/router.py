"""`Router`: the driver's socket, to which all workers connect."""

from __future__ import annotations

import contextlib
import math
import secrets
from typing import Any

import zmq

from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.listener import Listener

#: Longest wait that one poll can take (milliseconds in 31 bits).
MAX_POLL_S = 2e6


class Router:
    """ROUTER socket that admits only known workers; see `Listener`.

    ZeroMQ assigns routing ids, and each message carries the user id that was authenticated, so no
    peer can send or receive in the name of another.

    Args:
        host: address of this node at which workers reach it. The system chooses the port.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.

    Attributes:
        address: at which it listens.
        num_calls: calls sent so far.

    Raises:
        zmq.ZMQError: no socket can be bound at that address; see `Listener`.
    """

    def __init__(self, host: str, heartbeat_timeout_s: float) -> None:
        self.num_calls = 0
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._public_key, secret_key = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        arguments = self._context, zmq.ROUTER, host, heartbeat_timeout_s, secret_key
        self._listener = Listener(*arguments)
        self.socket = self._listener.socket
        self.address = self._listener.address
        self._in_message = False

    def admit(self) -> Endpoint:
        """Admits one more worker; returns what it needs to connect."""
        public_key, secret_key = zmq.curve_keypair()
        password = secrets.token_hex()
        self._listener.passwords[public_key.decode()] = password
        keys = self._public_key, public_key, secret_key, password
        return Endpoint(self.address, *keys, self._heartbeat_timeout_s)

    def revoke(self, user_id: str) -> None:
        """Admits no further connection of this worker."""
        self._listener.passwords.pop(user_id, None)

    def send(self, routing_id: bytes, message: list[Any]) -> None:
        """Sends without waiting.

        Raises:
            zmq.ZMQError: the peer is disconnected (EHOSTUNREACH), or has not read
                `HIGH_WATER_MARK` messages (EAGAIN).
        """
        try:
            self.socket.send_multipart([routing_id, *message], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            raise
        except BaseException:  # Ctrl-C: completes the message, so that the next one starts anew
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(b"", zmq.NOBLOCK)
            raise

    def receive(self) -> tuple[str, bytes, list[zmq.Frame]] | None:
        """User id, routing id and frames of the next message; None if there is none."""
        while self._in_message and self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv()  # Ctrl-C came within the last message
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        self._in_message = True
        frame = routing_id = self.socket.recv(zmq.NOBLOCK, copy=False)
        frames = []
        while frame.more:
            frame = self.socket.recv(copy=False)
            frames.append(frame)
        self._in_message = False
        return str(frame.get("User-Id")), routing_id.bytes, frames

    def close(self) -> None:
        """Disconnects all peers. Takes at most `LINGER_S` seconds."""
        self._listener.close()
        self._context.term()


def milliseconds(timeout_s: float) -> int:
    """A timeout as ZeroMQ takes it, rounded up."""
    return math.ceil(1e3 * min(max(timeout_s, 0.0), MAX_POLL_S))
