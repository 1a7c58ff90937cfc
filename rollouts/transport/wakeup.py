"""`Wakeup`: makes a selector return when a call through Ray ends."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray


class Wakeup:
    """A socket that becomes readable when a watched Ray call ends.

    Ray completes the future of a call in a thread of its own. A callback in this thread writes to
    the socket.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._ended: deque[tuple[Any, Future[Any]]] = deque()

    def fileno(self) -> int:
        """Returns the file descriptor that a selector watches for reading."""
        return self._reader.fileno()

    def watch(self, ref: ray.ObjectRef[Any], tag: Any = None) -> Future[Any]:
        """Watches a call: the socket becomes readable when the call ends.

        Args:
            ref: the reference that the call returned.
            tag: any value. `handle` passes it on with the future. None means that `handle` does not
                handle this call.

        Returns:
            the future of the call.
        """
        future: Future[Any] = ref.future()

        def wake(ended: Future[Any]) -> None:
            if tag is not None:
                self._ended.append((tag, ended))
            self.wake()

        future.add_done_callback(wake)
        return future

    def wake(self) -> None:
        """Makes the socket readable. Any thread may call this method."""
        # A BlockingIOError means that the socket is already readable. Other OSErrors mean that the
        # socket is closed.
        with contextlib.suppress(OSError):
            self._writer.send(b".")

    def handle(self, handler: Callable[[Any, Future[Any]], None]) -> None:
        """Empties the socket, and calls `handler(tag, future)` for each call with a tag that has
        ended. If the handler raises, for example because of Ctrl-C, the next `handle` goes on with
        the same call, and the socket is readable again."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        try:
            while self._ended:
                handler(*self._ended[0])
                self._ended.popleft()
        except BaseException:
            self.wake()
            raise

    def close(self) -> None:
        """Closes the socket. Calls that end later have no effect."""
        self._reader.close()
        self._writer.close()
