"""The interface for messages between processes: `Channel`, `Ticket` and `Transport`.

    strategy -> Calls -> Channel.send(...) -> Ticket -> Transport.wait(tickets) -> Ticket.result()

A strategy is a policy optimizer. Its `Calls` object (`rollouts/workers/calls.py`) makes other
processes run functions, and reaches these processes only through the classes of this file. The
driver is the process that sends the calls. A gradient worker is the driver of its own rollout
workers.

A transport decides at the start of a process how all its calls travel. To add a transport, for
example over MPI, implement the abstract methods in this file, and write a counterpart of
`ProcessActor` for the processes. Then add the transport to `open_transport` and to the option
`transport` of `RolloutConfig`.
"""

from __future__ import annotations

import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

#: A function that runs in a process, `fn(target, *args)`. See `Message`.
Function = Callable[..., Any]


class Message(NamedTuple):
    """One call, as a channel sends it.

    Attributes:
        number: number of the call, at least 1. Every call has its own number.
        name: name of the function, for error messages.
        function: the function, which runs as `function(target, *args)`. `target` is the object in
            the process. Cloudpickle encodes the function.
        args: the arguments after `target`. In place of a reference (`Transport.put`), the function
            gets the object.
        by_reference: if True, the return value stays in the process, and the answer holds a
            reference to this value.
        version: version of the driver's weights when the call is sent. 0 for calls that set up a
            process, and for processes that take no weights.
    """

    number: int
    name: str
    function: Function
    args: tuple[Any, ...]
    by_reference: bool = False
    version: int = 0


class TransportError(RuntimeError):
    """The transport or the all-reduce backend that the config requires cannot be used. For example,
    `transport` is `socket`, but a process cannot connect to the driver."""


class ChannelError(RuntimeError):
    """A call got no answer that the driver can use. A plain `ChannelError` means that the
    connection to the process ended."""


class UndecodableAnswerError(ChannelError):
    """The driver cannot unpickle the answer of a process. The message says why."""


class UnsendableError(RuntimeError):
    """A process could not unpickle the arguments of a call, or could not pickle the answer. The
    call would probably fail in the same way in every process."""


class LostProcessError(ChannelError):
    """Ray reports that the process of a call has died, or could not make its object. If a
    connection ends without such a report, the error is a plain `ChannelError`.

    Attributes:
        at_start: True if an exception ended the start of the process, for example because the
            process could not make its object.
        preempted: True if Ray reports that the node of the process was preempted.
    """

    def __init__(self, message: str, at_start: bool = False, preempted: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start
        self.preempted = preempted


class LostReferenceError(ChannelError):
    """The object of a reference among the arguments of a call is lost, usually because the process
    that made this object has died."""


class AnswerTimeoutError(ChannelError):
    """A call has ended, but the driver could not fetch its answer in time. `Transport.get` raises
    this error if an object could not be fetched in time."""


class Ticket(ABC):
    """One call that was sent.

    Attributes:
        reraises: True if the function runs in the caller's own process. `result` then raises the
            function's exception unchanged.
    """

    reraises: ClassVar[bool] = False

    @abstractmethod
    def ended(self) -> bool:
        """Returns True if the call has an answer or has failed. Does not wait.

        `ended` may return True before the answer has arrived in this process, so `Ticket.result`
        may still wait. Once `Transport.wait` has returned the ticket, the answer has arrived, or
        the call has failed. After a failure, `Ticket.result` may still wait for the reason.
        """

    @abstractmethod
    def result(self, timeout_s: float) -> Any:
        """Returns the answer of the process.

        Args:
            timeout_s: the longest time to wait for the answer.

        Raises:
            LostProcessError: the process has died, or could not make its object.
            LostReferenceError: an argument was a reference whose object is lost.
            AnswerTimeoutError: the answer could not be fetched in time.
            UndecodableAnswerError: the answer cannot be unpickled.
            UnsendableError: the process could not unpickle the arguments, or pickle the answer.
            ChannelError: the connection ended, and Ray did not report that the process has died.
            Exception: if `reraises` is True, the unchanged exception of the function.
        """


class Started(NamedTuple):
    """The answer of a process to its start.

    Attributes:
        pid: process id.
        node: id of the node on which the process runs.
        control: path of the `ControlPage` of the process, the memory that shows its progress. Empty
            if the process could not share its page.
        unreachable: the reason why the process cannot connect to the driver. Empty if it has
            connected, or if all calls go through Ray.
    """

    pid: int = 0
    node: str = ""
    control: str = ""
    unreachable: str = ""


class Channel(ABC):
    """The driver's connection to one process. The process answers calls in the order of sending.

        channel = transport.start(make_worker, (config, 1), options, "worker 1")
        ticket = channel.send(Message(number, "sample", sample, (weights,)))
        transport.wait([ticket], timeout_s=60.0)
        answer = ticket.result(60.0)

    Attributes:
        name: name of the process, for error messages.
        start: the ticket of the last start. The answer to a start is a `Started`.
        started: the answer to `start`. Set by `note_started`.
    """

    name: str
    start: Ticket
    started: Started = Started()

    @abstractmethod
    def send(self, message: Message) -> Ticket:
        """Sends a call. Does not wait for its answer.

        Raises:
            TransportError: a process cannot connect to the driver, and the config allows no other
                transport.
            Exception: the function or its arguments cannot be pickled. Pickling can raise any
                exception.
        """

    @abstractmethod
    def stop_early(self, number: int, keep_steps: int) -> None:
        """Asks the process to end the rollout fragments of call `number` once they have
        `keep_steps` steps. Does not wait. Any thread may call this method."""

    @abstractmethod
    def silent_s(self) -> float | None:
        """Returns the seconds since the process last made progress, such as a step of an
        environment. None if this is not known."""

    def note_started(self, started: Started) -> None:
        """Stores the answer to `start`."""
        self.started = started


class Transport(ABC):
    """Starts processes, and waits for the first of many answers.

    Attributes:
        name: name of the transport, as in the option `transport`.
        clock: a function that returns the seconds of a monotonic clock. Strategies measure time
            with this clock, so that tests can simulate time and reruns can repeat it.
    """

    name: str
    clock: Callable[[], float]

    @property
    def event(self) -> int | None:
        """Number of the last event, if this transport numbers what it sends and receives. None
        otherwise."""
        return None

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """Makes a decision that depends on time. A transport that repeats an earlier run returns
        the decision of that run, and calls `repeat` if the decision was True.

        Args:
            decision: makes the decision.
            repeat: brings about what was true when the decision was made, such as the end of an
                evaluation.
        """
        return decision()

    def take_timing(self) -> dict[str, Any]:
        """Returns what depended on timing since the previous call of this method, as plain data.
        Empty unless a transport collects this."""
        return {}

    @abstractmethod
    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> Channel:
        """Starts a process, which makes its object by `make(*args, control=page)`. Does not wait.

        Args:
            make: a function or class that returns the object. Calls run as `fn(object, *args)`. The
                object needs the methods of `polopt.rollouts.workers.call_runner.CallRunner`.
            args: the arguments of `make`.
            options: resources of the process, as arguments of Ray's `ActorClass.options`.
            name: name of the process, for error messages.
        """

    @abstractmethod
    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        """Makes a process replace its object by a new object of the same class, with new
        arguments. The process first runs the calls that were sent before. Returns the ticket of the
        new start."""

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        """Waits until one of several calls has ended. If a call is to this process itself, it runs
        during the wait.

        Args:
            tickets: the oldest ticket of each process. A process answers in order, so its other
                calls cannot end earlier.
            timeout_s: the longest time to wait, in seconds.

        Returns:
            some or all of the calls that have ended, in order of arrival as far as the transport
            knows it. The list may be empty, even before `timeout_s` seconds have passed.

        Raises:
            TransportError: see `Channel.send`.
        """

    @abstractmethod
    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        """Finds the processes that may be waiting for resources.

        Args:
            channels: the processes that are starting.

        Returns:
            the processes that may be waiting, and an upper limit on the number of processes that
            really wait. The list can be longer than this number, because Ray reports how many
            requests are unmet, but not which processes made them. The number is only an upper
            limit, because other programs may have made some of the requests.
        """

    def leaving(self, channels: Iterable[Channel]) -> list[Channel]:
        """Returns those of the channels whose nodes have announced their end, for example because
        a cloud provider takes them back soon. Does not wait. Empty unless a transport knows of
        nodes.

        Args:
            channels: the channels to processes that are up. Usually, no channel is read from this
                iterable.
        """
        return []

    @abstractmethod
    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Returns the total amount of each resource in the cluster, and the free amount of each
        resource, both by Ray's name of the resource."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Stores an object, and returns a reference to it. The reference can be an argument of
        several calls, and the object is encoded only once."""

    @abstractmethod
    def get(self, value: Any) -> Any:
        """Returns the object of a reference. Returns a value that is not a reference unchanged.

        Raises:
            LostReferenceError: the object is lost.
            AnswerTimeoutError: the object could not be fetched in time.
        """

    @abstractmethod
    def kill(self, channel: Channel) -> None:
        """Kills a process. The calls that the process has not answered end with an error. Any
        thread may call this method. The process may already have ended."""

    @abstractmethod
    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        """Ends processes. Waits up to `timeout_s` seconds for the `stop` methods of their objects,
        and then kills the processes."""

    @abstractmethod
    def close(self) -> None:
        """Closes everything that this transport has opened, except for the processes that `start`
        started. Call `stop` first, which ends these processes."""

    def paths(self, channels: Sequence[Channel]) -> str:
        """Returns the names of the transports that calls to these processes use, separated by
        commas. Results report this text."""
        return self.name


def is_of_signal(error: BaseException) -> bool:
    """Returns True if a signal handler raised the exception. For example, Ray's handler of SIGTERM
    raises SystemExit. In this case, the data that this process was unpickling are not the cause."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.Signals}
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not frames.isdisjoint(handlers)
