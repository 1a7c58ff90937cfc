"""`ControlPage`: shared memory that shows whether a process makes progress, and holds requests to
end its calls early.

The main thread of a worker can be busy with one call for seconds, and environments may have to run
in this thread. So the worker cannot receive messages during a call. Instead, the driver and the
worker map the same file into memory. In this memory, the driver reads the time of the worker's last
progress, and writes its requests. For a process on another node, the driver calls a `ControlAgent`
on that node.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from typing import NamedTuple

import psutil

from polopt.common.progress import PROGRESS
from polopt.rollouts.transport.sockets import left_behind

_PREFIX = "polopt-control-"
#: The first bytes of each page, which identify the file as a page.
_MAGIC = b"polopt01"
#: Number of requests that fit into a page. The call with number `n` has slot `n % _SLOTS`. The
#: numbers of consecutive calls of a process often have a constant difference, for example twice the
#: number of processes. `_SLOTS` is prime, so these calls still get different slots.
_SLOTS = 509
_BYTES = 16 + 16 * _SLOTS


class EarlyStopRequest(NamedTuple):
    """A request to end the rollout fragments of a call early.

    Attributes:
        call: number of the call.
        keep_steps: each fragment ends once it has at least this number of steps.
    """

    call: int
    keep_steps: int


class ControlPage:
    """Memory through which the driver observes and controls a process while the process runs a
    call.

        page = ControlPage()            # in the worker
        path = page.share()             # the driver can now open the page
        page = ControlPage.open(path)   # in the driver, once
        page.request_stop(EarlyStopRequest(call, keep_steps=16))
        page.silent_s()

    Before `share` is called, other processes cannot open the page.
    """

    def __init__(self) -> None:
        self._at_s = PROGRESS.at_s  # [1] float64: time.monotonic() at the last progress
        # [2 * _SLOTS] int64: for each slot, the number of the call, and the steps to keep
        self._requests = memoryview(bytearray(16 * _SLOTS)).cast("q")

    def share(self) -> str:
        """Moves the page of this process into a file that only this user can open.

        Returns:
            the path of the file, for `open`.

        Raises:
            OSError: the file cannot be written.
        """
        # Remove old files of processes that died before the driver opened or closed their pages.
        for path in left_behind(f"{_PREFIX}*"):
            if not psutil.pid_exists(_process_of(path)):
                remove(path)
        file, path = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-")
        try:
            os.write(file, _MAGIC.ljust(_BYTES, b"\0"))
            memory = mmap.mmap(file, _BYTES)
        except OSError:  # for example because the disk is full
            remove(path)
            raise
        finally:
            os.close(file)
        self._map(memory)
        PROGRESS.at_s = self._at_s
        PROGRESS.note()
        return path

    @classmethod
    def open(cls, path: str, keep_file: bool = False) -> ControlPage:
        """Maps the page of another process on this node.

        Args:
            path: the path that `share` returned.
            keep_file: if False, removes the file after both processes have mapped it.

        Raises:
            OSError, ValueError: the file does not exist, belongs to another user, or is not a page.
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
        if not keep_file:
            remove(path)
        return page

    def _map(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self._at_s = view[8:16].cast("d")
        self._requests = view[16:].cast("q")

    def silent_s(self) -> float:
        """Returns the seconds since the process last made progress."""
        return max(0.0, time.monotonic() - self._at_s[0])

    def request_stop(self, request: EarlyStopRequest) -> None:
        """Asks the process to end the fragments of a call early. Other calls ignore this
        request."""
        requests, slot = self._requests, 2 * (request.call % _SLOTS)
        # While the request is being written, the slot holds the number 0. No call has this number,
        # so the process never acts on a request that is half written.
        requests[slot] = 0
        requests[slot + 1] = request.keep_steps
        requests[slot] = request.call

    def keep_steps(self, call: int) -> int | None:
        """Returns `EarlyStopRequest.keep_steps` of the request for a call. None if the page has no
        request for this call."""
        requests, slot = self._requests, 2 * (call % _SLOTS)
        if requests[slot] != call:
            return None
        steps = requests[slot + 1]
        # The driver may have overwritten the slot between the two reads.
        return steps if requests[slot] == call else None


def _process_of(path: str) -> int:
    """Returns the id of the process whose page has this path, or -1 if the path has no id."""
    id_, _, rest = os.path.basename(path).removeprefix(_PREFIX).partition("-")
    return int(id_) if rest and id_.isdecimal() else -1


def remove(path: str) -> None:
    """Removes the file of a page, if the file still exists."""
    with contextlib.suppress(OSError):
        os.unlink(path)


class ControlAgent:
    """An actor that reads and writes the pages of processes on its node for a driver on another
    node. It opens a page when it first needs it, and keeps the file. So a new agent that replaces
    this agent can open the page, too.

    The methods raise OSError or ValueError if the page cannot be opened. See `ControlPage.open`."""

    def __init__(self) -> None:
        self._pages: dict[str, ControlPage] = {}

    def _page(self, path: str) -> ControlPage:
        if path not in self._pages:
            self._pages[path] = ControlPage.open(path, keep_file=True)
        return self._pages[path]

    def silent_s(self, path: str) -> float:
        """See `ControlPage.silent_s`."""
        return self._page(path).silent_s()

    def request_stop(self, path: str, request: EarlyStopRequest) -> None:
        """See `ControlPage.request_stop`. Does nothing if the process has ended meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            self._page(path).request_stop(request)

    def forget(self, path: str) -> None:
        """Closes the page of a process that has ended, and removes its file."""
        self._pages.pop(path, None)
        remove(path)
