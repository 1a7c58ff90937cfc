"""The seam for messages: `Channel`, `Ticket` and `Transport`.

    strategy -> Calls -> Channel.send(...) -> Ticket -> Transport.wait(tickets) -> Ticket.result()

`Calls` knows only these classes. How a call travels, what happens to one that is too large, and
what happens where no connection can be made, is the business of a transport. A transport over MPI
would implement the abstract methods of this file, and nothing else.
"""

from __future__ import annotations

import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

#: A function that runs in a process, `fn(target, *args)`. See `Channel`.
Function = Callable[..., Any]


class Message(NamedTuple):
    """One call, as a channel sends it.

    Attributes:
        number: number of the call. No other call has the same one. Never 0.
        name: name of the function, for messages to the user.
        function: `fn(target, *args)`, where `target` is the object in the process. Cloudpickle
            encodes it.
        args: the further arguments. A reference (`Transport.put`) stands for its object.
        by_reference: the answer's value stays where it is made, and the answer holds a reference.
        version: of the driver's weights when it is sent. For records of a run.
    """

    number: int
    name: str
    function: Function
    args: tuple[Any, ...]
    by_reference: bool = False
    version: int = 0


class TransportError(RuntimeError):
    """A process cannot be reached, and the config allows no other transport."""


class ChannelError(RuntimeError):
    """A call got no answer, because the connection to its process ended."""


class UndecodableAnswerError(ChannelError):
    """The answer of a process cannot be unpickled in this process. The message says why."""


class UnsendableError(RuntimeError):
    """The arguments of a call, or its answer, cannot be pickled. Another process would fail the
    same."""


class LostProcessError(ChannelError):
    """Ray reports that the process of a call has died. A connection that ended without such a
    report is a `ChannelError`.

    Attributes:
        at_start: it died while it was being made.
    """

    def __init__(self, message: str, at_start: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start


class LostReferenceError(ChannelError):
    """A reference among the arguments of a call stands for an object that is lost, because the
    process that made it has died."""


class AnswerTimeoutError(ChannelError):
    """An answer exists, but could not be fetched in time."""


class Ticket(ABC):
    """One call that was sent.

    Attributes:
        reraises: `result` raises what the function raised, unchanged. Only for a function that ran
            in the caller's own process.
    """

    reraises: ClassVar[bool] = False

    @abstractmethod
    def ended(self) -> bool:
        """Whether there is an answer or a failure. Returns at once. It may be True before the
        answer has reached this process. After `Transport.wait` has returned the ticket, `result`
        returns at once, too."""

    @abstractmethod
    def result(self, timeout_s: float) -> Any:
        """The answer of the process.

        Args:
            timeout_s: limit for fetching it.

        Raises:
            LostProcessError: the process has died.
            LostReferenceError: the object of a reference among the arguments is lost.
            AnswerTimeoutError: the answer could not be fetched in time.
            UndecodableAnswerError: the answer cannot be unpickled.
            UnsendableError: the arguments or the value cannot be pickled.
            ChannelError: the connection ended for another reason.
        """


class Started(NamedTuple):
    """What a process tells once it has started.

    Attributes:
        pid: its process id.
        node: where it runs: an id of the node.
        control: path of its `ControlPage`. Empty if it could not share one.
    """

    pid: int = 0
    node: str = ""
    control: str = ""


class Channel(ABC):
    """The driver's end of one process, which answers calls in the order in which they are sent.

        channel = transport.start(make_worker, (config, 1), options, "worker 1")
        ticket = channel.send(Message(number, "sample", sample, (weights,)))
        transport.wait([ticket], timeout_s=60.0)
        answer = ticket.result(60.0)

    Attributes:
        name: name of the process, for messages to the user.
        start: ticket whose answer is `Started`, once the process runs.
        started: that answer, once `note_started` was called.
    """

    name: str
    start: Ticket
    started: Started = Started()

    @abstractmethod
    def send(self, message: Message) -> Ticket:
        """Sends a call. Does not wait for its answer.

        Raises:
            TransportError: see there.
            Exception: function or arguments cannot be pickled. Any exception.
        """

    @abstractmethod
    def stop_early(self, number: int, keep_steps: int) -> None:
        """Ends the fragments of a call once they have `keep_steps` steps. Does not wait. Any thread
        may call this."""

    @abstractmethod
    def silent_s(self) -> float | None:
        """Seconds since the process last made progress. None: it cannot be told."""

    def note_started(self, started: Started) -> None:
        """Takes the answer to `start`."""
        self.started = started


class Transport(ABC):
    """Starts processes, and waits for the first of many answers.

    Attributes:
        name: name of the transport, as in the option `transport`.
        clock: seconds of a monotonic clock. Everything behind `step()` reads this one.
    """

    name: str
    clock: Callable[[], float]

    @property
    def event(self) -> int | None:
        """Number of the last event in the record of the run. None: the run is not recorded."""
        return None

    @abstractmethod
    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> Channel:
        """Starts a process with the object that `make(*args)` returns. Does not wait.

        Args:
            make: makes the object in the process. Calls run as `fn(object, *args)`. The object
                needs the methods of `polopt.rollouts.workers.call_runner.CallRunner`.
            args: its arguments.
            options: resources of the process, as Ray's `ActorClass.options` takes them.
            name: name of the process, for messages to the user.
        """

    @abstractmethod
    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        """Has a process replace its object by `make(*args)`. Calls that were sent before come
        first. Returns the ticket of the new start."""

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        """Waits until one of several calls has ended. A function of this process's own channel runs
        here.

        Args:
            tickets: of each process only the oldest one: it answers in order.
            timeout_s: limit of the wait.

        Returns:
            calls that have ended, in order of arrival where that is known. Empty if the time is
            over, or if something else has happened that the caller should look at.
        """

    @abstractmethod
    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        """Processes that have not started, and may wait for resources.

        Args:
            channels: the processes that have not started.

        Returns:
            the processes that may wait for resources, and the largest number of them that does. Ray
            counts requests only, and other programs may have made the same request.
        """

    @abstractmethod
    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Amounts of resources in the cluster, and the amounts that are free, by name."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """A reference to an object, for the arguments of several calls: it is encoded once."""

    @abstractmethod
    def get(self, value: Any) -> Any:
        """The object of a reference. Any other value itself.

        Raises:
            LostReferenceError: the object is lost.
            AnswerTimeoutError: it could not be fetched in time.
        """

    @abstractmethod
    def kill(self, channel: Channel) -> None:
        """Ends a process at once, and all calls that it has not answered. Any thread may call this,
        also of a process that has ended."""

    @abstractmethod
    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        """Ends processes: their objects get `timeout_s` seconds to stop first."""

    @abstractmethod
    def close(self) -> None:
        """Ends what this transport has opened. Processes go on, and are stopped by `stop`."""

    def paths(self, channels: Sequence[Channel]) -> str:
        """How calls to these processes travel, as results report it. Several ways are separated by
        a comma."""
        return self.name


def is_of_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised an exception. It then belongs to this process, and
    not to what this process was unpickling. Ray's handler of SIGTERM raises SystemExit."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.Signals}
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not frames.isdisjoint(handlers)
