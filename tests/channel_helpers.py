"""Processes at the other end of a channel, and helpers with which tests call them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from polopt.rollouts.transport.channel import Channel, Message, Ticket, Transport
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call_runner import Answer, CallRunner

LIMIT_S = 60.0
#: Options of a process that needs no resources.
NO_RESOURCES = {"num_cpus": 0}


class Notebook(CallRunner):
    """An object that keeps a list of notes. Calls add notes.

    Args:
        first: the first note. None means that the list is empty.
        control: see `CallRunner`.
        clock: see `CallRunner`.
    """

    def __init__(
        self,
        first: Any = None,
        control: ControlPage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if first == "fail":
            raise ZeroDivisionError("division in the constructor")
        super().__init__(control, clock)
        self.notes: list[Any] = [] if first is None else [first]


def note(book: Notebook, value: Any) -> Any:
    book.notes.append(value)
    return value


def notes(book: Notebook) -> list[Any]:
    return book.notes


def pid(book: Notebook) -> int:
    return os.getpid()


def note_slowly(book: Notebook, value: Any, duration_s: float) -> Any:
    time.sleep(duration_s)
    return note(book, value)


class Line:
    """A channel to a process, with methods for calls.

    Attributes:
        kind: name of the transport.
        transport: the transport that started the process.
        channel: the channel to the process.
    """

    _numbers = itertools.count(1)

    def __init__(self, kind: str, transport: Transport, channel: Channel) -> None:
        self.kind = kind
        self.transport = transport
        self.channel = channel

    def send(self, function: Callable[..., Any], *args: Any, by_reference: bool = False) -> Ticket:
        number = next(self._numbers)
        return self.channel.send(Message(number, "a function", function, args, by_reference))

    def answer(self, ticket: Ticket) -> Any:
        """Waits for the result of a ticket, and returns it. Raises the errors of
        `Ticket.result`."""
        return ticket_answer(self.transport, ticket)

    def call(self, function: Callable[..., Any], *args: Any, by_reference: bool = False) -> Any:
        """Calls a function in the process, and returns its value."""
        answer = self.answer(self.send(function, *args, by_reference=by_reference))
        assert isinstance(answer, Answer)
        assert answer.error is None, answer.error
        return answer.value

    def note_started(self) -> None:
        self.channel.note_started(ticket_answer(self.transport, self.channel.start))


def ticket_answer(transport: Transport, ticket: Ticket) -> Any:
    until_s = time.monotonic() + LIMIT_S
    while not transport.wait([ticket], 1.0):
        assert time.monotonic() < until_s
    assert ticket.ended()
    return ticket.result(LIMIT_S)


def wait_for(transport: Transport, condition: Callable[[], bool]) -> None:
    """Polls a `SocketTransport` until a condition holds."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        transport.poll(0.1)  # type: ignore[attr-defined]
