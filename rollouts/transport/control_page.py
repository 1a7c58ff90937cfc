"""`ControlPage`: a process's progress and requests to end its call early, in shared memory.

The main thread of a worker is busy with a call for seconds, and makes and steps environments, which
may be bound to it. So the driver neither asks it nor sends it anything meanwhile: it reads and
writes a few numbers in a file that both have mapped into memory. Processes on other nodes are
reached through a `ControlAgent` on their node.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from typing import NamedTuple

from polopt.common.progress import PROGRESS
from polopt.rollouts.transport.sockets import left_behind

_PREFIX = "polopt-control-"
#: The first bytes of each page. They tell a page from other files.
_MAGIC = b"polopt01"
#: Number of requests for which a page has room. The numbers of a process's calls have about equal
#: distances, for example twice the number of processes. With a prime number of slots, such calls
#: still get different slots.
_SLOTS = 509
_BYTES = 16 + 16 * _SLOTS


class EarlyStopRequest(NamedTuple):
    """A request to end the fragments of a call early.

    Attributes:
        call: number of the call.
        keep_steps: least number of steps of each fragment.
    """

    call: int
    keep_steps: int


class ControlPage:
    """What the driver reads and writes of a process while that process runs a call.

        page = ControlPage()            # in the worker
        path = page.share()             # from now on other processes can open it
        page = ControlPage.open(path)   # in the driver, once
        page.request_stop(EarlyStopRequest(call, keep_steps=16))
        page.silent_s()

    Without `share`, the page is memory of this process alone.
    """

    def __init__(self) -> None:
        self._at_s = PROGRESS.at_s  # [1] float64, of time.monotonic
        # [2 * _SLOTS] int64: call and steps to keep, by slot
        self._requests = memoryview(bytearray(16 * _SLOTS)).cast("q")

    def share(self) -> str:
        """Moves the page of this process into a file that only this user can open.

        Returns:
            its path, for `open`.

        Raises:
            OSError: no file can be written.
        """
        for path in left_behind(f"{_PREFIX}*"):  # by processes that died before it was opened
            remove(path)
        file, path = tempfile.mkstemp(prefix=_PREFIX)
        try:
            os.write(file, _MAGIC.ljust(_BYTES, b"\0"))
            memory = mmap.mmap(file, _BYTES)
        except OSError:  # the disk is full
            remove(path)
            raise
        finally:
            os.close(file)
        self._map(memory)
        PROGRESS.at_s = self._at_s
        PROGRESS.note()
        return path

    @classmethod
    def open(cls, path: str) -> ControlPage:
        """Maps the page of another process of this node, and removes its file, which both no longer
        need.

        Raises:
            OSError, ValueError: the page does not exist, or it is another user's.
        """
        page = cls()
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid != os.geteuid():
                raise PermissionError(f"{path} belongs to another user")
            memory = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        if memory[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} is not the page of a process")
        page._map(memory)
        remove(path)
        return page

    def _map(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._at_s = view[8:16].cast("d")
        self._requests = view[16:].cast("q")

    def silent_s(self) -> float:
        """Seconds since the process last made progress."""
        return max(0.0, time.monotonic() - self._at_s[0])

    def request_stop(self, request: EarlyStopRequest) -> None:
        """Ends the fragments of a call early. Has no effect on another call."""
        requests, slot = self._requests, 2 * (request.call % _SLOTS)
        requests[slot] = 0  # no call has this number: the process never sees half a request
        requests[slot + 1] = request.keep_steps
        requests[slot] = request.call

    def keep_steps(self, call: int) -> int | None:
        """Least number of steps that a request leaves to each fragment of a call. None without a
        request."""
        requests, slot = self._requests, 2 * (call % _SLOTS)
        if requests[slot] != call:
            return None
        steps = requests[slot + 1]
        # Another request may have come in between.
        return steps if requests[slot] == call else None


def remove(path: str) -> None:
    """Removes the file of a page, if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


class ControlAgent:
    """An actor that opens the pages of processes on its node for a driver on another node."""

    def __init__(self) -> None:
        self._pages: dict[str, ControlPage] = {}

    def open(self, path: str) -> None:
        """See `ControlPage.open`."""
        self._pages[path] = ControlPage.open(path)

    def silent_s(self, path: str) -> float:
        """See `ControlPage.silent_s`."""
        return self._pages[path].silent_s()

    def request_stop(self, path: str, request: EarlyStopRequest) -> None:
        """See `ControlPage.request_stop`."""
        self._pages[path].request_stop(request)

    def forget(self, path: str) -> None:
        """Drops the page of a process that has ended."""
        self._pages.pop(path, None)
