"""What connections of polopt's own have in common."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time

#: What can be waited for at most in one call of the kernel's (milliseconds in 31 bits).
MAX_TIMEOUT_S = 2e6
TOKEN_BYTES = 16


def new_token() -> bytes:
    """By which those who belong together know each other; `TOKEN_BYTES` random ones."""
    return secrets.token_bytes(TOKEN_BYTES)


def hang_up(connected: socket.socket) -> None:
    """Ends a connection, also where a process that was forked meanwhile holds it, too."""
    with contextlib.suppress(OSError):  # it has ended already
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()


def fill(buffer: memoryview, connected: socket.socket) -> bool:
    """Reads as many bytes as the buffer has, and not one more: the next belong to somebody else.

    Returns:
        False, if the other end has left before.

    Raises:
        OSError: the connection is broken, or silent for longer than its timeout.
    """
    while buffer:
        count = connected.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def greeting(connected: socket.socket, size: int, timeout_s: float) -> bytes | None:
    """The first `size` bytes that a caller says; None if it has not said them after `timeout_s`
    seconds, all in all, or has left."""
    said = b""
    until_s = time.monotonic() + timeout_s
    try:
        while len(said) < size:
            connected.settimeout(max(1e-3, until_s - time.monotonic()))
            more = connected.recv(size - len(said))
            if not more:
                return None
            said += more
    except OSError:
        return None
    return said
