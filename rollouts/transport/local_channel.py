"""`LocalChannel`: a channel to an object in this process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from polopt.rollouts.transport.channel import Channel, Message, Ticket, Transport
from polopt.rollouts.transport.control_page import EarlyStopRequest


class LocalTicket(Ticket):
    """A call that runs in this process while the caller waits for the call."""

    reraises: ClassVar[bool] = True

    def __init__(self, target: Any, transport: Transport, message: Message) -> None:
        self._target = target
        self._transport = transport
        self._message = message
        self._ended = False
        self._answer: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the call, unless it has already run."""
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
    """A channel to an object in this process. Its calls run one at a time, in `Transport.wait`.

    Args:
        target: the object, such as a `CallRunner`. The channel calls
            `target.run_here(number, function, *args)`, and writes requests to stop early to
            `target.control`.
        transport: makes and resolves references.
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
        return 0.0  # the caller itself runs the call, so the call never counts as hanging


def run_here(tickets: Collection[Ticket]) -> list[Ticket]:
    """Runs the first call among `tickets` that belongs to a local channel, if any. Returns the
    ticket of this call in a list, or an empty list."""
    for ticket in tickets:
        if ticket.reraises:  # much faster than `isinstance`, because tickets are abstract classes
            assert isinstance(ticket, LocalTicket)
            ticket.run()
            return [ticket]
    return []
