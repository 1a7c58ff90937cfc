"""`Wakeup`: makes a poll return when a call through Ray ends."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from concurrent.futures import Future
from typing import Any

import ray


class Wakeup:
    """Socket that becomes readable when a watched Ray call ends.

    Ray completes futures on its own thread, which writes to the socket.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._watched: set[Any] = set()
        self._ended: deque[tuple[Any, Future[Any]]] = deque()

    def fileno(self) -> int:
        """File descriptor to poll for reading."""
        return self._reader.fileno()

    def watch(self, ref: ray.ObjectRef[Any], tag: Any = None) -> Future[Any] | None:
        """Has the socket become readable when a call ends.

        Args:
            ref: what the call returned.
            tag: `take` returns it with the result. None: `take` does not.

        Returns:
            its future. None if the reference is watched already.
        """
        if ref in self._watched:
            return None
        self._watched.add(ref)
        future: Future[Any] = ref.future()

        def wake(ended: Future[Any]) -> None:
            self._watched.discard(ref)
            if tag is not None:
                self._ended.append((tag, ended))
            self.wake()

        future.add_done_callback(wake)
        return future

    def wake(self) -> None:
        """Makes the socket readable. Any thread may call this."""
        # BlockingIOError: the socket is readable already. OSError: it is closed.
        with contextlib.suppress(OSError):
            self._writer.send(b".")

    def take(self) -> list[tuple[Any, Future[Any]]]:
        """Empties the socket. `(tag, future)` of calls that have ended since the last `take`."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken

    def close(self) -> None:
        """Closes the socket. Calls that end later are ignored."""
        self._reader.close()
        self._writer.close()
