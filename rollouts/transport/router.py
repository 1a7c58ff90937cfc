"""`Router`: the driver's socket, to which all workers connect."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from polopt.rollouts.transport.messages import BACKLOG, CALL, configure

#: Longest wait that one poll can take (milliseconds in 31 bits).
MAX_POLL_S = 2e6


class Router:
    """ROUTER socket that admits only known CURVE keys.

    CURVE authenticates and encrypts; an authenticator (ZAP, RFC 27) admits the public keys passed
    to `admit`. ZeroMQ assigns routing ids, and each message carries the key that authenticated it,
    so no peer can send or receive in the name of another.

    Args:
        host: address of this node at which workers reach it. The system chooses the port.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.

    Attributes:
        address: at which it listens, `tcp://host:port`.
        public_key: CURVE key of this socket, Z85.
        num_calls: calls sent so far.

    Raises:
        zmq.ZMQError: no socket can be bound at that address.
    """

    def __init__(self, host: str, heartbeat_timeout_s: float) -> None:
        self.num_calls = 0
        self._admitted: set[str] = set()
        self.public_key, secret_key = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self.socket = self._context.socket(zmq.ROUTER)
        configure(self.socket, heartbeat_timeout_s)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=self)
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key (Z85) is admitted. The authenticator calls this on its thread."""
        return key.decode() in self._admitted

    def admit(self, user_id: str) -> None:
        """Admits the peer with this public key (Z85)."""
        self._admitted.add(user_id)

    def revoke(self, user_id: str) -> None:
        """Admits no further connection with this key."""
        self._admitted.discard(user_id)

    @property
    def num_admitted(self) -> int:
        """Number of keys admitted."""
        return len(self._admitted)

    def send(self, routing_id: bytes, message: list[Any]) -> None:
        """Sends without waiting.

        Raises:
            zmq.ZMQError: the peer is disconnected (EHOSTUNREACH), or has not read
                `HIGH_WATER_MARK` messages (EAGAIN).
        """
        try:
            self.socket.send_multipart([routing_id, *message], zmq.NOBLOCK)
        except zmq.ZMQError:
            raise
        except BaseException:  # Ctrl-C: completes the message, so that the next one starts anew
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(b"", zmq.NOBLOCK)
            raise
        self.num_calls += message[0] == CALL

    def receive(self) -> tuple[str, bytes, list[zmq.Frame]] | None:
        """User id, routing id and frames of the next message; None if there is none."""
        while self.socket.getsockopt(zmq.RCVMORE):  # Ctrl-C came within the last one
            self.socket.recv()
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return str(frames[-1].get("User-Id")), frames[0].bytes, frames[1:]

    def close(self) -> None:
        """Disconnects all peers. Takes at most `LINGER_S` seconds."""
        self.socket.close()
        self._authenticator.stop()
        self._context.term()


def milliseconds(timeout_s: float) -> int:
    """A timeout as ZeroMQ takes it, rounded up."""
    return math.ceil(1e3 * min(max(timeout_s, 0.0), MAX_POLL_S))
