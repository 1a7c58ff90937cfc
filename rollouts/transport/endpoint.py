"""`Endpoint`: what a peer needs for one connection; sent through Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Any, NamedTuple

import zmq

IPC = "ipc://"
#: Limit for a process of this node to accept a connection.
ACCEPT_TIMEOUT_S = 1.0


class Address(NamedTuple):
    """Where a `Listener` listens.

    Attributes:
        tcp: `tcp://host:port`.
        ipc: `ipc://path`, for processes of its node; empty: only tcp.
    """

    tcp: str
    ipc: str = ""


class Endpoint(NamedTuple):
    """Address and keys for one connection.

    Attributes:
        address: to connect to.
        server_key: public CURVE key of the listener, Z85.
        public_key: CURVE key of the peer, Z85; also its user id.
        secret_key: likewise.
        password: of the peer, for connections within a node.
        heartbeat_timeout_s: a listener that answers no ping for this time is disconnected.
        max_frame_bytes: largest frame that either side sends.
    """

    address: Address
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    password: str
    heartbeat_timeout_s: float
    max_frame_bytes: int

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"  # without the secrets

    def authenticate(self, peer: zmq.Socket[Any]) -> str:
        """Sets the keys of a socket; returns the address to which it then connects: `ipc` if a
        process of this node listens there, else `tcp`."""
        if _is_reachable(self.address.ipc):
            peer.setsockopt(zmq.PLAIN_USERNAME, self.public_key)
            peer.setsockopt(zmq.PLAIN_PASSWORD, self.password.encode())
            return self.address.ipc
        peer.setsockopt(zmq.IPV6, 1)
        peer.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        peer.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        return self.address.tcp


def _is_reachable(ipc: str) -> bool:
    """Whether a process of this user listens there. Containers of a node need not share files, and
    nodes may share files. PLAIN does not authenticate the listener; the directory does."""
    path = ipc.removeprefix(IPC)
    if not path or not is_private(os.path.dirname(path)):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ACCEPT_TIMEOUT_S)
        probe.connect(path)
        return True
    return False


def is_private(directory: str) -> bool:
    """Whether this is a directory that only this user can enter."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return private and status.st_uid == os.geteuid()
