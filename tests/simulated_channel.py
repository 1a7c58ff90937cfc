"""`SimulatedTransport`: simulates processes inside this process, with a virtual clock.

A call runs when it is sent. A script decides which answer arrives next. If the script chooses no
answer, the virtual time advances. So a test determines the order of arrival, while it runs the real
`step()` of a policy optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ray import cloudpickle

from polopt.rollouts.transport.channel import (
    Channel,
    LostProcessError,
    Message,
    Started,
    Ticket,
    Transport,
)
from polopt.rollouts.transport.control_page import ControlPage, EarlyStopRequest
from polopt.rollouts.transport.local_channel import run_here


class VirtualClock:
    """A clock for tests. Its time passes only in `advance`.

    Attributes:
        now_s: the current time of the clock, in seconds.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, duration_s: float) -> None:
        """Moves the clock forward."""
        self.now_s += duration_s


class Reference:
    """A reference to an object. See `Transport.put`. If `value` is an Exception, the object is
    lost."""

    def __init__(self, value: Any) -> None:
        self.value = value


class SimulatedTicket(Ticket):
    """The ticket of one call to a simulated process.

    Attributes:
        channel: the channel to the process.
        answer: the return value of `result`.
        error: the exception that `result` raises instead, or None.
        done: True once the answer has arrived.
    """

    def __init__(self, channel: SimulatedChannel) -> None:
        self.channel = channel
        self.answer: Any = None
        self.error: Exception | None = None
        self.done = False

    def ended(self) -> bool:
        return self.done

    def result(self, timeout_s: float) -> Any:
        assert self.done, "the call has not ended, so `result` would wait forever"
        if self.error is not None:
            raise self.error
        return self.answer


#: A function that chooses the pending call that ends next. If the function returns None, no call
#: ends now, and time advances.
Script = Callable[[list[SimulatedTicket]], SimulatedTicket | None]


def oldest_first(pending: list[SimulatedTicket]) -> SimulatedTicket | None:
    """A script that chooses the first pending call. `Calls` passes the processes in such an order
    that they answer in turn, like equally fast processes."""
    return pending[0]


def none_ready(pending: list[SimulatedTicket]) -> SimulatedTicket | None:
    """A script in which no call ends, because all processes hang."""
    return None


def of_process(*names: str) -> Script:
    """Returns a script in which only calls to these processes end."""
    return lambda pending: next((one for one in pending if one.channel.name in names), None)


def in_order(names: Iterable[str]) -> Script:
    """Returns a script in which one call ends for each of these names of processes, in the order of
    the names. The script raises StopIteration if no name is left, or if no call to the next process
    is pending."""
    remaining = iter(names)

    def script(pending: list[SimulatedTicket]) -> SimulatedTicket | None:
        wanted = next(remaining)
        return next(one for one in pending if one.channel.name == wanted)

    return script


def shuffled_by(seed: int) -> Script:
    """Returns a script in which a random pending call ends next."""
    return random.Random(seed).choice


class SimulatedChannel(Channel):
    """A channel to an object in this process that behaves as if it were in another process.

    Attributes:
        target: the object.
        alive: True until the process is killed. A later `send` or `stop_early` raises
            AssertionError, because no code may call a process that does not exist.
        tickets: the tickets of all starts and calls so far.
    """

    def __init__(self, make: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self.name = name
        self.alive = True
        self.control = ControlPage()
        self.tickets: list[SimulatedTicket] = []
        self.target = make(*args, control=self.control)
        self.start = self.reply(Started())

    def reply(self, answer: Any) -> SimulatedTicket:
        """Returns a ticket with this answer. The answer arrives when the script chooses the
        ticket."""
        ticket = SimulatedTicket(self)
        ticket.answer = answer
        self.tickets.append(ticket)
        return ticket

    def send(self, message: Message) -> SimulatedTicket:
        assert self.alive, f"{message.name} called in {self.name}, which is dead"
        ticket = self.reply(None)
        references = [arg for arg in message.args if isinstance(arg, Reference)]
        lost = next((ref.value for ref in references if isinstance(ref.value, Exception)), None)
        encoded = cloudpickle.dumps(
            (message.function, [None if isinstance(a, Reference) else a for a in message.args])
        )
        function, args = cloudpickle.loads(encoded)
        given = [
            sent.value if isinstance(sent, Reference) else arg
            for sent, arg in zip(message.args, args, strict=True)
        ]
        if lost is not None:
            ticket.error = lost
        else:
            self.run(ticket, message._replace(function=function, args=tuple(given)))
        return ticket

    def run(self, ticket: SimulatedTicket, message: Message) -> None:
        """Runs a call, and stores the answer in the ticket of the call."""
        answer = self.target.run(message.number, message.function, *message.args)
        if message.by_reference and answer.error is None:
            answer = answer._replace(value=Reference(answer.value))
        else:
            try:
                cloudpickle.dumps(answer, buffer_callback=lambda buffer: None)
            except Exception as error:  # pickling can raise anything
                answer = self.target.refuse(f"its value cannot be pickled: {error!r}")
        ticket.answer = answer

    def stop_early(self, number: int, keep_steps: int) -> None:
        assert self.alive
        self.control.request_stop(EarlyStopRequest(number, keep_steps))

    def silent_s(self) -> float | None:
        return None  # on the virtual clock, a call makes no progress until it ends

    def die(self, error: Exception | None = None) -> None:
        """Ends all pending calls with an error. By default, this is a `LostProcessError`."""
        for ticket in self.tickets:
            if not ticket.done:
                ticket.error = error or LostProcessError("the process died")
                ticket.done = True

    def finish(self) -> None:
        """Ends all pending calls, whatever the script says."""
        for ticket in self.tickets:
            ticket.done = True


class SimulatedTransport(Transport):
    """A transport to simulated processes inside this process.

    Attributes:
        script: see `Script`.
        channels: the channels to all processes so far, in the order of their starts.
        num_puts: number of calls of `put`.
    """

    name = "simulated"

    def __init__(self, script: Script = oldest_first) -> None:
        self.script = script
        self.clock: VirtualClock = VirtualClock()
        self.channels: list[SimulatedChannel] = []
        self.num_puts = 0

    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> SimulatedChannel:
        channel = self.make_channel(make, args, name)
        channel.target.clock = self.clock
        self.channels.append(channel)
        return channel

    def make_channel(
        self, make: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> SimulatedChannel:
        """Returns a channel to a new simulated process. A subclass may return a channel of
        another class."""
        return SimulatedChannel(make, args, name)

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        assert isinstance(channel, SimulatedChannel)
        channel.target = channel.target.remade(*args, control=channel.control)
        channel.start = channel.reply(Started())
        return channel.start

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        ready = run_here(tickets)
        if ready:
            return ready
        pending = [ticket for ticket in tickets if isinstance(ticket, SimulatedTicket)]
        if timeout_s > 0.0 and not any(ticket.done for ticket in pending):
            chosen = self.script(list(pending)) if pending else None
            if chosen is None:
                self.clock.advance(timeout_s)
            else:
                chosen.done = True
        done: list[Ticket] = [ticket for ticket in pending if ticket.done]
        return done[:1]

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        return [], 0

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return {}, {}

    def put(self, value: Any) -> Reference:
        self.num_puts += 1
        return Reference(value)

    def get(self, value: Any) -> Any:
        if not isinstance(value, Reference):
            return value
        if isinstance(value.value, Exception):
            raise value.value
        return value.value

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, SimulatedChannel)
        channel.alive = False
        channel.die()

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        for channel in channels:
            assert isinstance(channel, SimulatedChannel)
            channel.target.stop()
            self.kill(channel)

    def close(self) -> None:
        """Does nothing, because this transport opens nothing."""
