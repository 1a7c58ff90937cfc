"""`SocketTransport`: sends the calls of processes on this node over Unix sockets.

An actor call costs both sides about a millisecond of processor time. The gradient of a small
network takes about as long. Ray still starts, places, watches and stops the processes. A process
connects to the driver at its start, and then answers all calls over its socket, inside one long
actor call, `serve`. If the connection ends, the result of `serve` contains the reason. A process
that cannot connect, for example because it runs on another node, answers all calls through Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import secrets
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import Connection
from typing import Any, Literal

import ray
from ray import cloudpickle

from polopt.rollouts.transport.channel import (
    Channel,
    ChannelError,
    LostProcessError,
    LostReferenceError,
    Message,
    Started,
    Ticket,
    Transport,
    TransportError,
    UndecodableAnswerError,
    is_of_signal,
)
from polopt.rollouts.transport.local_channel import run_here
from polopt.rollouts.transport.ray_channel import RayChannel, RayTicket, RayTransport
from polopt.rollouts.transport.references import Reference, Values
from polopt.rollouts.transport.socket_server import NUMBER_BYTES, REMAKE, Endpoint
from polopt.rollouts.transport.sockets import (
    CONNECTION_ERRORS,
    Outbox,
    PrivateListener,
    Wakeup,
    hang_up,
    limit,
)

logger = logging.getLogger("polopt")
#: The longest time to wait for the rest of a message that a process has begun to send. The sender
#: has the whole message in memory, so the rest arrives soon.
MESSAGE_TIMEOUT_S = 10.0
#: While calls through Ray are pending, the driver asks Ray at least once in this time which calls
#: have ended. Futures do not report the end of every call (see `_ended_through_ray`).
RECHECK_S = 1.0
#: The longest timeout that is passed to a selector. Not every selector accepts longer timeouts.
MAX_WAIT_S = 1e6
#: The longest time to wait for the result of `serve` after a connection has ended. Ray usually
#: reports the death of a process on the same node much earlier.
REASON_TIMEOUT_S = 5.0
#: The largest number of bytes of calls to one process that may wait for the process to read them.
MAX_UNSENT_BYTES = 1 << 30
#: The numbers of calls that replace the object of a process. No call of a function has them.
_REMAKE_NUMBERS = itertools.count(1 << 62)

State = Literal["connecting", "connected", "through ray", "ended"]


class SocketTicket(Ticket):
    """The ticket of one call over a socket.

    Args:
        channel: the channel to the process.
        args: the arguments of the call. Until the call has ended, the ticket keeps them, so that
            the process can fetch the values of references among them.

    Attributes:
        arrival: position of the answer in the order of arrival. None until the call has ended.
    """

    __slots__ = ("_args", "_channel", "_error", "_message", "arrival")

    def __init__(self, channel: SocketChannel, args: tuple[Any, ...] = ()) -> None:
        self.arrival: int | None = None
        self._args = args
        self._channel = channel
        self._message = b""
        self._error: ChannelError | None = None

    def ended(self) -> bool:
        return self.arrival is not None

    def end(self, arrival: int, message: bytes = b"", error: ChannelError | None = None) -> None:
        """Ends the call with the message that holds the answer, or with an error."""
        self.arrival, self._message, self._error = arrival, message, error
        self._args = ()

    def result(self, timeout_s: float) -> Any:
        if self._error is None:
            answer = _decoded(self._message)
            if isinstance(answer, ChannelError):
                raise answer
            self._channel.note_reference(getattr(answer, "value", None))
            return answer
        if isinstance(self._error, LostReferenceError):
            raise self._error
        try:
            self._channel.serving.result(min(REASON_TIMEOUT_S, timeout_s))
        except FutureTimeoutError:
            pass
        except ray.exceptions.RayError as error:
            raise LostProcessError(str(error).strip() or type(error).__name__) from error
        raise self._error


def _decoded(message: bytes) -> Any:
    """Returns the answer in a message.

    Raises:
        UndecodableAnswerError: the answer cannot be unpickled.
    """
    try:
        return pickle.loads(memoryview(message)[NUMBER_BYTES:])
    except BaseException as error:  # unpickling can raise anything
        if is_of_signal(error):
            raise
        raise UndecodableAnswerError(f"{type(error).__name__}: {error}") from error


class SocketChannel(Channel):
    """A channel to one process.

        connecting --the process has connected--> connected --the connection ends--> ended
             |
             +----the process cannot connect----> through ray

    The answer to the start decides between `connected` and `through ray`. No call is sent before.

    Args:
        through_ray: the channel to the actor of the process.
        transport: the transport with the listener.
        endpoint: the endpoint to which the process connects.

    Attributes:
        state: see the diagram.
        serving: the actor call in which the process answers calls.
    """

    def __init__(
        self, through_ray: RayChannel, transport: SocketTransport, endpoint: Endpoint
    ) -> None:
        self.through_ray = through_ray
        self.name = through_ray.name
        self.start = through_ray.start
        self.started = through_ray.started
        self.state: State = "connecting"
        self._transport = transport
        self._endpoint = endpoint
        self._outbox: Outbox | None = None
        self._connection: Connection | None = None
        self.serving: Future[Any] = transport.wakeup.watch(through_ray.actor.serve.remote(), self)
        self._pending: dict[int, SocketTicket] = {}
        self._dropped: list[bytes] = []  # tokens of values that the process need not keep

    def note_started(self, started: Started) -> None:
        """Stores the answer to the start, and decides how calls travel.

        Raises:
            TransportError: the process cannot connect, and the config allows no other transport.
        """
        self.through_ray.note_started(started)
        self.started = started
        if self.state != "connecting":
            return
        if started.unreachable:
            self.state = "through ray"
            self._transport.note_unreachable(self, started.unreachable)
        else:
            self._transport.take_admitted()

    def stop_early(self, number: int, keep_steps: int) -> None:
        self.through_ray.stop_early(number, keep_steps)

    def silent_s(self) -> float | None:
        return self.through_ray.silent_s()

    def note_reference(self, value: Any) -> None:
        """Makes the process drop a value that stays in it once the driver has no reference to this
        value. The next call tells the process."""
        if isinstance(value, Reference):
            weakref.finalize(value, self._dropped.append, value.token).atexit = False

    # ---- sending --------------------------------------------------------------------------------

    def send(self, message: Message) -> Ticket:
        number, _, function, args, by_reference, _ = message
        # A reference that only processes of the other kind understand goes through the driver.
        foreign = Reference if self.state == "through ray" else ray.ObjectRef
        try:
            args = tuple([self._transport.get(a) if isinstance(a, foreign) else a for a in args])
        except LostReferenceError as error:
            ticket = SocketTicket(self)
            ticket.end(self._transport.next_arrival(), error=error)
            return ticket
        if self.state == "through ray":
            return self.through_ray.send(message._replace(args=args))
        return self._send(number, function, args, by_reference)

    def remake(self, args: tuple[Any, ...]) -> Ticket:
        """See `Transport.remake`."""
        if self.state == "through ray":
            self.start = self._transport.through_ray.remake(self.through_ray, args)
        else:
            self.start = self._send(next(_REMAKE_NUMBERS), REMAKE, args, False)
        return self.start

    def _send(
        self, number: int, function: Any, args: tuple[Any, ...], by_reference: bool
    ) -> Ticket:
        ticket = SocketTicket(self, args)
        dropped, self._dropped[:] = self._dropped[:], []
        encoded = cloudpickle.dumps((number, function, args, by_reference, dropped))
        if self._outbox is None:
            ticket.end(self._transport.next_arrival(), error=ChannelError(f"{self.name} has ended"))
            return ticket
        self._pending[number] = ticket
        self._transport.num_calls += 1
        try:
            self._outbox.send(number.to_bytes(NUMBER_BYTES, "big") + encoded, MESSAGE_TIMEOUT_S)
        except CONNECTION_ERRORS as error:
            self.fail(f"{self.name}: {type(error).__name__}: {error}")
        except BaseException:  # after Ctrl-C, the process may have received half a message
            self.fail(f"{self.name}: sending was interrupted")
            raise
        return ticket

    # ---- the connection -------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """Stores the connection of the process, which has connected and authenticated."""
        self.state = "connected"
        self._connection = connection
        self._outbox = Outbox(connection, MAX_UNSENT_BYTES)

    def receive(self) -> None:
        """Receives one message from the process, and ends the call that it answers."""
        assert self._connection is not None
        try:
            message = self._connection.recv_bytes()
            number = int.from_bytes(message[:NUMBER_BYTES], "big")
            ticket = self._pending.get(number)
            if ticket is not None:
                ticket.end(self._transport.next_arrival(), message)
                del self._pending[number]
        except CONNECTION_ERRORS as error:
            self.fail(f"{self.name}: {type(error).__name__}: {error}")
        except BaseException:  # after Ctrl-C, the rest of the message is lost
            self.fail(f"{self.name}: receiving was interrupted")
            raise

    def serving_ended(self, call: Future[Any]) -> None:
        """Handles the end of `serve`, which Ray has reported."""
        error = call.exception()
        problem = str(call.result()) if error is None else str(error)
        if self.state == "connected":
            while self._connection is not None and self._connection.poll(0):
                self.receive()  # the last answers that the process sent before `serve` ended
            self.fail(f"{self.name}: {problem or type(error).__name__}")
        elif error is not None:
            self._transport.expect_no_more(self._endpoint)  # the process has died

    def fail(self, reason: str) -> None:
        """Ends the connection. Unanswered calls over this connection end with an error."""
        outbox, self._outbox = self._outbox, None
        connection, self._connection = self._connection, None
        if connection is not None and outbox is not None:
            self.state = "ended"
            self._transport.forget(connection)
            outbox.close()
        for ticket in self._pending.values():
            if not ticket.ended():
                ticket.end(self._transport.next_arrival(), error=ChannelError(reason))
        self._pending.clear()


class SocketTransport(Transport):
    """A transport that sends calls over sockets to processes on this node, and through Ray to other
    processes. `wait` waits for answers over sockets and through Ray at the same time. Only one
    thread may use the transport, but any thread may call `kill` and the channels' `stop_early`.

    Args:
        through_ray: the transport that starts the processes, and carries calls through Ray.
        timeout_s: the longest time that a process waits for the rest of a message, in seconds. The
            limit for the driver is the shorter of this time and `MESSAGE_TIMEOUT_S`.
        required: if True, the driver raises `TransportError` for a process that cannot connect. If
            False, the calls of this process go through Ray.

    Attributes:
        num_calls: number of calls that were sent over sockets so far.
        wakeup: makes the selector return when a call through Ray ends.

    Raises:
        OSError: the listener cannot bind a socket.
    """

    name = "socket"

    def __init__(self, through_ray: RayTransport, timeout_s: float, required: bool = False) -> None:
        self.through_ray = through_ray
        self.clock: Callable[[], float] = through_ray.clock
        self.num_calls = 0
        self._timeout_s = timeout_s
        self._required = required
        self._arrivals = 0
        self._recheck_s = -math.inf  # the next time to ask Ray which calls have ended
        self._key = secrets.token_bytes(32)
        self._node = ray.get_runtime_context().get_node_id()
        self._expected: dict[bytes, SocketChannel] = {}  # by token
        self._admitted: deque[tuple[Connection, SocketChannel]] = deque()
        self._values = Values()
        self.wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.wakeup, selectors.EVENT_READ)
        try:
            self._listener = PrivateListener(self._key, self._admit)
        except OSError:
            self._selector.close()
            self.wakeup.close()
            raise

    # ---- connections ----------------------------------------------------------------------------

    def _admit(self, connection: Connection, token: bytes) -> None:
        """Queues a connection that has authenticated, and tells the process. The listener calls
        this method in another thread."""
        channel = self._expected.pop(token, None)
        if channel is None:
            hang_up(connection)
            return
        limit(connection, min(self._timeout_s, MESSAGE_TIMEOUT_S), sending=False)
        self._admitted.append((connection, channel))
        with contextlib.suppress(*CONNECTION_ERRORS):  # the channel then notices the end
            connection.send_bytes(b"")
        self.wakeup.wake()

    def _endpoint(self) -> Endpoint:
        token = secrets.token_bytes(16)
        return Endpoint(self._listener.address, self._node, self._key, token, self._timeout_s)

    def expect_no_more(self, endpoint: Endpoint) -> None:
        """Notes that the process with this endpoint will not connect."""
        self._expected.pop(endpoint.token, None)

    def take_admitted(self) -> None:
        """Gives the connections that the listener has admitted to their channels."""
        while self._admitted:
            connection, channel = self._admitted.popleft()
            self._selector.register(connection, selectors.EVENT_READ, channel)
            channel.connected(connection)

    def forget(self, connection: Connection) -> None:
        """Stops waiting for messages over this connection."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)

    def note_unreachable(self, channel: SocketChannel, problem: str) -> None:
        """Logs that a process cannot connect.

        Raises:
            TransportError: the config allows no other transport.
        """
        if self._required:
            raise TransportError(
                f"{channel.name} cannot connect to the driver ({problem}), but the config says "
                "transport: socket. Use transport: auto or ray, or start all workers on the "
                "driver's node"
            )
        elsewhere = channel.started.node != self._node
        logger.log(
            logging.INFO if elsewhere else logging.WARNING,
            "%s cannot connect to the driver (%s). Its calls go through Ray, which is slower.",
            channel.name,
            problem,
        )

    def next_arrival(self) -> int:
        """Returns the position of the next answer in the order of arrival."""
        self._arrivals += 1
        return self._arrivals

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        ended = run_here(tickets) or self._ended(tickets)
        if not ended:
            if any(isinstance(ticket, RayTicket) for ticket in tickets):
                timeout_s = min(timeout_s, RECHECK_S)
            self.poll(timeout_s)
            ended = self._ended(tickets)
        return ended

    def _ended(self, tickets: Collection[Ticket]) -> list[Ticket]:
        arrived = [t for t in tickets if isinstance(t, SocketTicket) and t.arrival is not None]
        if len(arrived) > 1:
            arrived.sort(key=lambda ticket: ticket.arrival or 0)
        return [*arrived, *self._ended_through_ray(tickets)]

    def _ended_through_ray(self, tickets: Collection[Ticket]) -> list[RayTicket]:
        """Returns the calls through Ray that have ended.

        The future of a call says whether the call has ended. To ask Ray takes much longer, so the
        driver asks Ray once for each call, when it begins to watch the future, and then once per
        `RECHECK_S`. Ray does not complete the future of an answer whose unpickling raises
        SystemExit.
        """
        through_ray = [ticket for ticket in tickets if isinstance(ticket, RayTicket)]
        ask = {ticket.ref for ticket in through_ray if ticket.future is None}
        for ticket in through_ray:
            ticket.future = ticket.future or self.wakeup.watch(ticket.ref)
        now_s = time.monotonic()
        if now_s >= self._recheck_s:
            self._recheck_s = now_s + RECHECK_S
            ask = {ticket.ref for ticket in through_ray}
        ended = set(ray.wait(list(ask), num_returns=len(ask), timeout=0)[0]) if ask else set()
        return [t for t in through_ray if t.ref in ended or (t.future and t.future.done())]

    def poll(self, timeout_s: float) -> None:
        """Handles everything that has arrived, but at most one message of each process. If nothing
        has arrived, waits for the next arrival, for at most `timeout_s` seconds.

        Raises:
            TransportError: see `note_unreachable`.
        """
        for key, _ in self._selector.select(min(max(0.0, timeout_s), MAX_WAIT_S)):
            if key.data is not None:
                if key.data.state == "connected":
                    key.data.receive()
                continue
            self.wakeup.handle(SocketChannel.serving_ended)
            self.take_admitted()

    # ---- processes ------------------------------------------------------------------------------

    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> SocketChannel:
        endpoint = self._endpoint()
        actor = self.through_ray.start(make, args, options, name, endpoint)
        channel = SocketChannel(actor, self, endpoint)
        self._expected[endpoint.token] = channel
        return channel

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        assert isinstance(channel, SocketChannel)
        return channel.remake(args)

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        own = {c.through_ray: c for c in channels if isinstance(c, SocketChannel)}
        waiting, number = self.through_ray.waiting(list(own))
        return [own[channel] for channel in waiting if isinstance(channel, RayChannel)], number

    def leaving(self, channels: Iterable[Channel]) -> list[Channel]:
        return self.through_ray.leaving(channels)

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return self.through_ray.resources()

    def put(self, value: Any) -> Any:
        reference = self._values.put(value)
        weakref.finalize(reference, self._values.drop, reference.token).atexit = False
        return reference

    def get(self, value: Any) -> Any:
        if isinstance(value, Reference):
            return self._values.get(value)
        return self.through_ray.get(value)

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, SocketChannel)
        # Any thread may call `kill`. The thread that polls closes the connection later.
        self.through_ray.kill(channel.through_ray)

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        for channel in channels:
            assert isinstance(channel, SocketChannel)
            channel.fail(f"{channel.name} was stopped")  # ends `serve`, so the actor can stop
        actors = [c.through_ray for c in channels if isinstance(c, SocketChannel)]
        self.through_ray.stop(actors, timeout_s)

    def paths(self, channels: Sequence[Channel]) -> str:
        refused = [isinstance(c, SocketChannel) and c.state == "through ray" for c in channels]
        if not any(refused):
            return "socket"
        return "ray" if all(refused) else "socket, ray"

    def close(self) -> None:
        self._listener.close()
        # `get_map` returns None if the selector is already closed.
        for key in list((self._selector.get_map() or {}).values()):
            if key.data is not None:
                key.data.fail(f"{key.data.name}: the connection was closed")
        while self._admitted:
            hang_up(self._admitted.popleft()[0])
        self._values.close()
        self._selector.close()
        self.wakeup.close()
        self.through_ray.close()


def open_transport(transport: str, timeout_s: float) -> Transport:
    """Opens the transport that a config names.

    Args:
        transport: `ray`, `socket` or `auto`. See `RolloutConfig`.
        timeout_s: see `SocketTransport`.

    Raises:
        TransportError: `transport` is `socket`, and no socket can be bound.
    """
    through_ray = RayTransport()
    if transport == "ray":
        return through_ray
    required = transport == "socket"
    try:
        return SocketTransport(through_ray, timeout_s, required)
    except OSError as error:
        if required:
            raise TransportError(f"transport: socket: no socket can be bound: {error}") from error
        logger.warning(
            "No socket can be bound (%s). All calls go through Ray, which is slower.", error
        )
        return through_ray
