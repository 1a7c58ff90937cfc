"""`LocalChannel`: calls of an object in this process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from polopt.rollouts.transport.channel import Channel, Message, Ticket, Transport
from polopt.rollouts.transport.control_page import EarlyStopRequest


class LocalTicket(Ticket):
    """A call that runs in this process, when the caller waits for it."""

    reraises: ClassVar[bool] = True

    def __init__(self, target: Any, transport: Transport, message: Message) -> None:
        self._target = target
        self._transport = transport
        self._message = message
        self._ended = False
        self._answer: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the call, unless it has run."""
        if self._ended:
            return
        number, _, function, args, by_reference, _ = self._message
        try:
            answer = self._target.run_here(number, function, *map(self._transport.get, args))
            if by_reference:
                answer = answer._replace(value=self._transport.put(answer.value))
            self._answer = answer
        except BaseException as error:
            self._error = error
        self._ended = True

    def ended(self) -> bool:
        return self._ended

    def result(self, timeout_s: float) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class LocalChannel(Channel):
    """Calls of an object in this process. They run one at a time, in `Transport.wait`.

    Args:
        target: its `run_here(number, function, *args)` is called, and its `control` page gets the
            requests to stop early.
        transport: carries references.
        name: see `Channel`.
    """

    def __init__(self, target: Any, transport: Transport, name: str = "this process") -> None:
        self.target = target
        self._transport = transport
        self.name = name

    def send(self, message: Message) -> Ticket:
        return LocalTicket(self.target, self._transport, message)

    def stop_early(self, number: int, keep_steps: int) -> None:
        self.target.control.request_stop(EarlyStopRequest(number, keep_steps))

    def silent_s(self) -> float | None:
        return 0.0  # it runs while the caller waits


def run_here(tickets: Collection[Ticket]) -> list[Ticket]:
    """Runs the first call of a local channel, if there is one among `tickets`."""
    for ticket in tickets:
        if isinstance(ticket, LocalTicket):
            ticket.run()
            return [ticket]
    return []
