"""`Line`: the driver's side of direct calls to one worker."""

from __future__ import annotations

import contextlib
import selectors
import time
from typing import Any

import ray

from polopt.rollouts.transport.direct_calls import Connection, Request
from polopt.rollouts.transport.sockets import new_token

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
        broken: there will be no connection any more.
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
