"""The seam for messages: `Channel`, `Ticket` and `Transport`.

    strategy -> Calls -> Channel.send(...) -> Ticket -> Transport.wait(tickets) -> Ticket.result()

`Calls` knows only these classes. A transport decides how a call travels, how a call is sent that
is too large for its connection, and what happens if no connection can be made. A transport over
MPI would implement the abstract methods of this file, have a process side as `ProcessActor` is, and
be named in `open_transport`.
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
        number: number of the call, 1 or larger. Every call has its own number.
        name: name of the function, for error messages.
        function: runs as `function(target, *args)`, where `target` is the object in the process.
            Cloudpickle encodes it.
        args: the arguments after `target`. A reference (`Transport.put`) stands for its object.
        by_reference: the value stays in the process that makes it, and the answer holds a reference
            to the value.
        version: version of the driver's weights when the call is sent. Records of a run hold it.
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
    """The arguments of a call, or its answer, cannot be pickled. The call would fail in the same
    way in every process."""


class LostProcessError(ChannelError):
    """Ray reports that the process of a call has died. If a connection ends without such a report,
    the error is a plain `ChannelError`.

    Attributes:
        at_start: the process died while its object was being made.
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
        reraises: True if the function runs in the caller's own process. `result` then raises the
            function's exception unchanged.
    """

    reraises: ClassVar[bool] = False

    @abstractmethod
    def ended(self) -> bool:
        """Whether there is an answer or a failure. Returns at once.

        This may be True before the answer has reached this process, so `result` may still wait.
        Once `Transport.wait` has returned the ticket, `result` does not wait.
        """

    @abstractmethod
    def result(self, timeout_s: float) -> Any:
        """The answer of the process.

        Args:
            timeout_s: the longest time to wait for the answer.

        Raises:
            LostProcessError: the process has died.
            LostReferenceError: an argument was a reference whose object is lost.
            AnswerTimeoutError: the answer could not be fetched in time.
            UndecodableAnswerError: the answer cannot be unpickled.
            UnsendableError: the arguments or the value cannot be pickled.
            ChannelError: the connection ended for another reason.
        """


class Started(NamedTuple):
    """The first answer of a process, once it has started.

    Attributes:
        pid: process id.
        node: id of the node on which the process runs.
        control: path of the `ControlPage` of the process. Empty if it could not share one.
    """

    pid: int = 0
    node: str = ""
    control: str = ""


class Channel(ABC):
    """The driver's connection to one process. The process answers calls in the order of sending.

        channel = transport.start(make_worker, (config, 1), options, "worker 1")
        ticket = channel.send(Message(number, "sample", sample, (weights,)))
        transport.wait([ticket], timeout_s=60.0)
        answer = ticket.result(60.0)

    Attributes:
        name: name of the process, for error messages.
        start: the ticket of the start. Its answer is `Started`.
        started: the answer to `start`, after `note_started` was called with it.
    """

    name: str
    start: Ticket
    started: Started = Started()

    @abstractmethod
    def send(self, message: Message) -> Ticket:
        """Sends a call. Does not wait for its answer.

        Raises:
            TransportError: the process cannot be reached, and the config allows no other transport.
            Exception: the function or its arguments cannot be pickled. Pickling can raise any
                exception.
        """

    @abstractmethod
    def stop_early(self, number: int, keep_steps: int) -> None:
        """Asks the process to end the fragments of a call once they have `keep_steps` steps. Does
        not wait. Any thread may call this."""

    @abstractmethod
    def silent_s(self) -> float | None:
        """Seconds since the process last made progress. None if that is not known."""

    def note_started(self, started: Started) -> None:
        """Keeps the answer to `start`."""
        self.started = started


class Transport(ABC):
    """Starts processes, and waits for the first of many answers.

    Attributes:
        name: name of the transport, as in the option `transport`.
        clock: returns the seconds of a monotonic clock. All code that `step()` runs measures time
            with this clock.
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
            args: the arguments of `make`.
            options: resources of the process, in the form that Ray's `ActorClass.options` takes.
            name: name of the process, for error messages.
        """

    @abstractmethod
    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        """Has a process replace its object by a new `make(*args)`. The process first runs the calls
        that were sent before. Returns the ticket of the new start."""

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        """Waits until one of several calls has ended. A call to this process itself runs during the
        wait.

        Args:
            tickets: the oldest ticket of each process. A process answers in order, so its other
                calls cannot end earlier.
            timeout_s: the longest wait.

        Returns:
            the calls that have ended, in order of arrival where that is known. Empty if the time is
            over, or if the caller should look at something else that has happened.
        """

    @abstractmethod
    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        """Finds the processes that may be waiting for resources.

        Args:
            channels: the processes that have not started.

        Returns:
            the processes that may be waiting, and the largest number of them that can be. Ray only
            counts requests, and some may come from other programs.
        """

    @abstractmethod
    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Amounts of resources in the cluster, and the amounts that are free, by name."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """A reference to an object. It can be an argument of several calls, and the object is
        encoded only once."""

    @abstractmethod
    def get(self, value: Any) -> Any:
        """The object of a reference. A value that is not a reference is returned unchanged.

        Raises:
            LostReferenceError: the object is lost.
            AnswerTimeoutError: the object could not be fetched in time.
        """

    @abstractmethod
    def kill(self, channel: Channel) -> None:
        """Ends a process at once, and all calls that it has not answered. Any thread may call this,
        also for a process that has ended already."""

    @abstractmethod
    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        """Ends processes. Their objects first get `timeout_s` seconds to stop."""

    @abstractmethod
    def close(self) -> None:
        """Closes everything that this transport has opened, except for the processes that `start`
        started. Those are ended by `stop`, which comes first."""

    def paths(self, channels: Sequence[Channel]) -> str:
        """The transports of calls to these processes, as results report them: one name, or several
        names with commas between them."""
        return self.name


def is_of_signal(error: BaseException) -> bool:
    """Whether a signal handler raised an exception, as Ray's handler of SIGTERM raises SystemExit.
    The data that this process was unpickling then did not cause it."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.Signals}
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not frames.isdisjoint(handlers)
