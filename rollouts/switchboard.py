"""`Switchboard`: the driver's side of direct calls."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from polopt.rollouts.direct_calls import (
    MAX_TIMEOUT_S,
    Connection,
    Request,
    greet,
    new_token,
)
from polopt.rollouts.faults import logger

#: A stranger that connects and says nothing must not keep the driver from its work.
GREETING_TIMEOUT_S = 0.5
#: After a connection has ended, Ray has so long to say why: of a process on the same node it does
#: at once, of one whose node is gone maybe never.
REASON_TIMEOUT_S = 5.0


class DirectCall:
    """A call under way, or ended.

    Args:
        line: to whom.
        request: what was asked for.

    Attributes:
        ended: whether `result` would return, or raise, at once.
        answer: what the method returned, once it has.
        failed: there will be no answer.
        sent_s: monotonic time at which the request was sent; None: it waits for a connection.
        through_ray: the call in its place, where the worker can not reach the driver.
    """

    def __init__(self, line: Line, request: Request) -> None:
        # The one that answers it; the line may have another by the time that is asked for.
        self._serving = line.serving
        self.request = request
        self.sent_s: float | None = None
        self.ended = False
        self.answer: Any = None
        self.failed = False
        self.through_ray: ray.ObjectRef[Any] | None = None

    def result(self, timeout_s: float) -> Any:
        """What the method returned.

        Raises:
            Exception: what `ray.get` raises for a call through Ray that ended like this one.
        """
        if self.through_ray is not None:
            return ray.get(self.through_ray, timeout=timeout_s)
        if self.failed:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                ray.get(self._serving, timeout=REASON_TIMEOUT_S)  # raises, or else:
            raise ConnectionError("the worker has ended its connection, and Ray does not say why")
        return self.answer


class Line:
    """One worker's: a connection, once it stands, and the call of Ray's that answers on it.

    Args:
        actor: the worker's.
        selector: that waits for answers.

    Attributes:
        token: by which the worker is known when it connects.
        serving: the last of those calls.
        open: the worker answers direct calls, or will as soon as it comes to it. If not, it
            answers calls through Ray.
        broken: there was a connection, and there will be none.
        calls: under way, by number.
    """

    def __init__(self, actor: Any, selector: selectors.BaseSelector) -> None:
        self._actor = actor
        self._selector = selector
        self.token = new_token()
        self.serving: Any = None
        self.open = False
        self.broken = False
        self.connection: Connection | None = None
        self.calls: dict[int, DirectCall] = {}
        self._unsent: list[Request] = []  # until there is a connection
        self._number = 0

    @property
    def expected(self) -> bool:
        """Whether the worker has still to connect."""
        return self.connection is None and not self.broken

    def serve(self, address: tuple[str, int]) -> None:
        """Has the worker answer direct calls when it comes to it.

        Args:
            address: at which it connects, if it has not yet.
        """
        self.open = True
        self.serving = self._actor.serve.remote(address, self.token)

    def ask(self, method: str, args: tuple[Any, ...]) -> DirectCall:
        """Sends a request to a worker that serves, or will.

        Args:
            method: of the worker.
            args: of the method; small.
        """
        self._number += 1
        request = Request(self._number, method, args)
        call = self.calls[request.number] = DirectCall(self, request)
        self._send(request)
        return call

    def hang_up(self) -> None:
        """From here on the worker answers calls through Ray, after what it was asked before."""
        if self.open:
            self.open = False
            self._send(Request(0))

    def _send(self, request: Request) -> None:
        if self.connection is None:
            self._unsent.append(request)
            return
        if (call := self.calls.get(request.number)) is not None:
            call.sent_s = time.monotonic()
        try:
            self.connection.send(request)
        except OSError:
            self.fail()
        except BaseException:  # Ctrl-C within a message: what follows would not be understood
            self.fail()
            raise

    def connect(self, connection: Connection) -> None:
        """The worker has called."""
        self.connection = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, self.receive)
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            self._send(request)

    def receive(self) -> None:
        """Takes the answer that has come, or notes that none will."""
        if self.connection is None:  # closed since it was found readable
            return
        try:
            number, answer = self.connection.receive()
        except (EOFError, OSError):
            self.fail()
            return
        except BaseException:  # likewise
            self.fail()
            raise
        call = self.calls.pop(number, None)
        if call is not None:
            call.answer, call.ended = answer, True

    def receive_all(self) -> None:
        """Takes all answers that have come in."""
        with selectors.DefaultSelector() as readable:
            if self.connection is not None:
                readable.register(self.connection.socket, selectors.EVENT_READ)
            while self.connection is not None and readable.select(0):
                self.receive()

    def fail(self) -> None:
        """No call will be answered any more; Ray knows why."""
        self.close()
        for call in self.calls.values():
            call.failed = call.ended = True
        self.calls.clear()

    def go_through_ray(self) -> None:
        """There will be no connection: what waits for it is asked through Ray."""
        self.close()
        for call in self.calls.values():
            method = getattr(self._actor, str(call.request.method))
            call.through_ray = method.remote(*call.request.args)
        self.calls.clear()

    def close(self) -> None:
        """Ends the connection, which ends serving."""
        self.open, self.broken = False, True
        self._unsent.clear()
        if self.connection is not None:
            self._selector.unregister(self.connection.socket)
            self.connection.close()
            self.connection = None


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
                if self._has_ended(call):
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

    def _has_ended(self, call: Any) -> bool:
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
