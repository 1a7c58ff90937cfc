"""`Switchboard`: all lines of a driver, and the wait for whichever call ends first."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from polopt.rollouts.transport.direct_calls import Connection, greet
from polopt.rollouts.transport.line import REASON_TIMEOUT_S, DirectCall, Line
from polopt.rollouts.transport.sockets import MAX_TIMEOUT_S

logger = logging.getLogger("polopt")
#: A stranger that connects and says nothing must not keep the driver from its work.
GREETING_TIMEOUT_S = 0.5


class Switchboard:
    """Makes direct calls, and waits for whatever ends first, direct calls or calls through Ray.

    A worker runs calls in the order in which they were made, direct or not: it either serves its
    line or answers Ray, and changes over when it comes to it.

    Args:
        host: the address at which workers can reach the driver.
        timeout_s: a worker that stops for longer in the middle of a message is gone.

    Attributes:
        refused: a worker could not reach the driver, so all calls go through Ray.

    Raises:
        OSError: nobody can listen at that address.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = (host, int(self._listener.getsockname()[1]))
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._lines: list[Line] = []
        # That a call through Ray has ended is known first in a thread of Ray's, which rings.
        self._bell, self._button = socket.socketpair()
        self._watched: set[Any] = set()
        self._selector = selectors.DefaultSelector()
        for end, act in ((self._listener, self._accept), (self._bell, self._look_after_lines)):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ, act)
        self._button.setblocking(False)
        self.refused = False

    def line(self, line: Line | None, actor: Any) -> Line:
        """The line to an actor, open: the one it had, if that is not broken.

        Args:
            line: that; None: it had none.
            actor: a handle, whose class has `serve`.
        """
        if line is None or line.broken:
            line = Line(actor, self._selector)
            self._lines = [other for other in self._lines if not other.broken] + [line]
        if not line.open:
            line.serve(self.address)
            self._watch(line.serving)
        return line

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """The first of the calls, in their order, that has ended; none after the timeout.

        Args:
            calls: each a `DirectCall` or a reference of Ray's.
            timeout_s: 0: only those that have ended already.
        """
        until_s = time.monotonic() + timeout_s
        self._turn(0.0)
        while True:
            for call in calls:
                if self._is_over(call):
                    return [call]
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0.0:
                return []
            self._turn(remaining_s)

    def close(self) -> None:
        """Ends all connections."""
        for line in self._lines:
            line.close()
        self._selector.close()
        for end in (self._listener, self._bell, self._button):
            end.close()

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(min(timeout_s, MAX_TIMEOUT_S)):
            act: Callable[[], None] = key.data
            act()

    def _is_over(self, call: Any) -> bool:
        ref = call.through_ray if isinstance(call, DirectCall) else call
        if ref is None:
            ended: bool = call.ended
            return ended
        if _has_ended(ref):
            return True
        self._watch(ref)
        return False

    def _watch(self, ref: ray.ObjectRef[Any]) -> None:
        """Sees to it that `wait` wakes when a call through Ray ends."""
        if ref in self._watched:
            return
        self._watched.add(ref)

        def ring(_: Future[Any]) -> None:
            self._watched.discard(ref)
            # Full: it rings already. Closed: nobody waits any more.
            with contextlib.suppress(OSError):
                self._button.send(b".")

        ref.future().add_done_callback(ring)

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has thought better of it
            return
        except OSError as error:  # of the system; it would be asked again and again
            self._selector.unregister(self._listener)
            self._listener.close()  # who has called already hears of it
            self._refuse(str(error))
            return
        expected = {line.token: line for line in self._lines if line.expected}
        token = greet(caller, list(expected), GREETING_TIMEOUT_S) if expected else None
        if token is None:
            caller.close()
            return
        try:
            expected[token].connect(Connection(caller, self._timeout_s))
        except OSError as error:
            logger.warning("a worker's connection is of no use: %s", error)
            caller.close()

    def _look_after_lines(self) -> None:
        """A worker that no longer serves its open line has failed, or could not connect."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        for line in self._lines:
            wanted = line.open or (line.calls and line.expected)
            if not wanted or not _has_ended(line.serving):
                continue
            never_connected = line.expected
            line.receive_all()  # what it answered before
            try:
                reason = ray.get(line.serving, timeout=REASON_TIMEOUT_S)
            except Exception:  # which those who wait for this line get from `DirectCall.result`
                line.fail()
                continue
            if never_connected:
                self._refuse(reason or "it turned them away")
                line.go_through_ray()
            else:
                line.fail()

    def _refuse(self, reason: str) -> None:
        if not self.refused:
            self.refused = True
            logger.warning(
                "workers can not connect to the driver at %s:%d (%s). All calls go through Ray, "
                "which takes longer.",
                *self.address,
                reason,
            )


def _has_ended(ref: ray.ObjectRef[Any]) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])
