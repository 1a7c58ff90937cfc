"""What connections of polopt's own have in common."""

from __future__ import annotations

import contextlib
import secrets
import socket

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
