"""`Listener`: a socket that admits only known peers, over tcp and from processes of its node."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import tempfile
import weakref

import zmq
from zmq.auth.thread import ThreadAuthenticator

from polopt.rollouts.transport.endpoint import IPC, Address, is_private
from polopt.rollouts.transport.messages import configure

BACKLOG = 1024

#: Of the authenticator, which would log passwords at DEBUG.
logger = logging.getLogger(__name__)
logger.setLevel(logging.WARNING)


class Passwords(dict[str, str]):
    """Passwords by user id, read by the authenticator's thread while users are revoked.

    That thread looks a user up after it has asked whether there is one; a `KeyError` would end it.
    """

    def __missing__(self, user_id: str) -> str:
        return secrets.token_hex()


class Listener:
    """Socket that admits only the peers in `passwords`.

    Over tcp, CURVE authenticates both sides and encrypts. Processes of the same node may connect to
    a Unix socket instead, in a directory that only this user can enter. They authenticate by
    password (PLAIN); nothing leaves the kernel, so nothing is encrypted. An authenticator (ZAP, RFC
    27) decides, and each message carries the user id that it has verified.

    Args:
        context: of the socket.
        kind: type of the socket, as `zmq.ROUTER`.
        host: address of this node at which peers reach it. The system chooses the port.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.
        max_frame_bytes: a peer that announces a larger frame is disconnected.
        secret_key: CURVE key of this socket, Z85.

    Attributes:
        address: where it listens.
        passwords: by user id, of all peers that are admitted.
        socket: the socket.

    Raises:
        zmq.ZMQError: no socket can be bound at `host`, or the authenticator does not start.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        host: str,
        heartbeat_timeout_s: float,
        max_frame_bytes: int,
        secret_key: bytes,
    ) -> None:
        self.passwords = Passwords()
        self._directory: weakref.finalize[[str, int], Listener] | None = None
        self._authenticator = ThreadAuthenticator(context, log=logger)
        self.socket = context.socket(kind)
        configure(self.socket, heartbeat_timeout_s, max_frame_bytes)
        self.socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        if kind == zmq.ROUTER:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._start_authenticator()
            self._authenticator.configure_curve_callback(credentials_provider=self)
            # Not by `configure_plain`, which ignores a dict that is still empty.
            self._authenticator.passwords["*"] = self.passwords
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            tcp = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self.address = Address(tcp, self._bind_ipc())
        except BaseException:
            self.close()
            raise

    def _start_authenticator(self) -> None:
        try:
            self._authenticator.start()
        except RuntimeError as error:  # no new thread, or none within 10 s
            raise zmq.ZMQError(errno.EAGAIN, str(error)) from error

    def _bind_ipc(self) -> str:
        """Also listens for processes of this node. Returns the address; empty where the node has no
        private directory, or one with a path that is too long for a Unix socket."""
        try:
            directory = tempfile.mkdtemp(prefix="polopt-")
            # Also runs when the interpreter exits.
            self._directory = weakref.finalize(self, _remove, directory, os.getpid())
            address = f"{IPC}{directory}/s"
            if is_private(directory):
                # Takes effect for addresses that are bound afterwards.
                self.socket.setsockopt(zmq.PLAIN_SERVER, 1)
                self.socket.bind(address)
                return address
        except (OSError, zmq.ZMQError):
            pass
        self.remove_directory()
        return ""

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key (Z85) is admitted. The authenticator calls this on its thread."""
        return key.decode() in self.passwords

    def remove_directory(self) -> None:
        """Removes the private directory; there are no further connections within the node."""
        if self._directory:
            self._directory()

    def close(self) -> None:
        """Disconnects all peers."""
        self.socket.close()  # before the authenticator, without which all peers are admitted
        self._authenticator.stop()
        self.remove_directory()


def _remove(directory: str, pid: int) -> None:
    """Removes a directory of process `pid`; does nothing in processes forked from it."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
