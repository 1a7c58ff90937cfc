"""`SocketTransport`: sends calls over Unix sockets within a node, and all other calls through Ray.

An actor call costs both sides about a millisecond of processor time. The gradient of a small
network takes about as long. Ray still starts, places, watches and stops the processes. A process
answers calls over its socket inside one long actor call, `serve`. If the connection ends, the
result of `serve` contains the reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray import cloudpickle

from polopt.rollouts.transport.channel import (
    Channel,
    ChannelError,
    LostProcessError,
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
from polopt.rollouts.transport.socket_server import NUMBER_BYTES, Endpoint
from polopt.rollouts.transport.sockets import (
    CONNECTION_ERRORS,
    HANDSHAKE_TIMEOUT_S,
    PrivateListener,
    buffer_bytes,
    hang_up,
    limit,
)
from polopt.rollouts.transport.wakeup import Wakeup

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
#: The longest time from the report that a process has connected until the listener has admitted
#: the connection.
ADMIT_TIMEOUT_S = 3.0 * HANDSHAKE_TIMEOUT_S
#: The largest number of bytes that a message takes in the send buffer in addition to its own bytes.
_MESSAGE_OVERHEAD = 2048


class SocketTicket(Ticket):
    """The ticket of one call over a socket.

    Attributes:
        arrival: position of the answer in the order of arrival. None until the call has ended.
        size: number of bytes that the call takes in the send buffer.
    """

    __slots__ = ("_error", "_message", "_serving", "arrival", "size")

    def __init__(self, size: int, serving: Future[Any]) -> None:
        self.size = size
        self.arrival: int | None = None
        self._serving = serving
        self._message = b""
        self._error: ChannelError | None = None

    def ended(self) -> bool:
        return self.arrival is not None

    def end(self, arrival: int, message: bytes = b"", error: ChannelError | None = None) -> None:
        """Ends the call with the message that holds the answer, or with an error."""
        self.arrival, self._message, self._error = arrival, message, error

    def result(self, timeout_s: float) -> Any:
        if self._error is None:
            return _decoded(self._message)
        try:
            self._serving.result(min(REASON_TIMEOUT_S, timeout_s))
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
    """A channel to one process, over a socket connection and through Ray.

    These calls go through Ray:

    - all calls before the process has connected,
    - calls with references among their arguments,
    - calls whose value stays in the process,
    - calls that do not fit into the kernel's buffer. Over the socket, the driver would wait until
      the process has time to read the call.

    Args:
        through_ray: the channel to the actor of the process.
        transport: the transport with the listener.

    Attributes:
        refused: True if the process cannot connect. All its calls then go through Ray.
    """

    def __init__(self, through_ray: RayChannel, transport: SocketTransport) -> None:
        self.through_ray = through_ray
        self.name = through_ray.name
        self.start = through_ray.start
        self.started = through_ray.started
        self._transport = transport
        self.refused = False
        self._connection: Connection | None = None
        self._endpoint: Endpoint | None = None
        # The call of `connect`. None once the connection is admitted or cannot be made.
        self._connecting: Future[Any] | None = None
        self._retry_s = math.inf  # the time at which the process connects again
        # The call of `serve` that answers calls over the socket. None while the process answers
        # calls through Ray.
        self._serving: Future[Any] | None = None
        self._serves: set[Future[Any]] = set()  # all calls of `serve` for the present connection
        self._room = 0  # bytes that still fit into the kernel's buffer
        self._pending: dict[int, SocketTicket] = {}

    def note_started(self, started: Started) -> None:
        self.through_ray.note_started(started)
        self.started = started

    def stop_early(self, number: int, keep_steps: int) -> None:
        self.through_ray.stop_early(number, keep_steps)

    def silent_s(self) -> float | None:
        return self.through_ray.silent_s()

    # ---- sending --------------------------------------------------------------------------------

    def send(self, message: Message) -> Ticket:
        number, _, function, args, by_reference, _ = message
        if by_reference or any(isinstance(arg, ray.ObjectRef) for arg in args):
            self.pause()
            return self.through_ray.send(message)
        if self._connection is None:
            self.connect()
            self._transport.poll(0.0)
        encoded = cloudpickle.dumps((number, function, args, by_reference))
        size = len(encoded) + _MESSAGE_OVERHEAD
        if self._connection is None or size > self._room:
            self.pause()
            return self.through_ray.send_encoded(encoded)
        if self._serving is None:
            self._serving = self._watch(self.through_ray.actor.serve.remote(self._endpoint))
            self._serves.add(self._serving)
        ticket = self._pending[number] = SocketTicket(size, self._serving)
        self._room -= size
        self._transport.num_calls += 1
        self._write(number.to_bytes(NUMBER_BYTES, "big") + encoded)
        return ticket

    def pause(self) -> None:
        """Ends `serve` in the process, so that the process can answer calls through Ray. The
        process first answers the calls that were sent over the socket. The next call over the
        socket starts `serve` again."""
        if self._serving is not None and self._connection is not None:
            self._serving = None
            self._write(b"")

    def _write(self, message: bytes) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(message)
        except CONNECTION_ERRORS as error:
            self.fail(f"{self.name}: {type(error).__name__}: {error}")
        except BaseException:  # after Ctrl-C, the process may have received half a message
            self.fail(f"{self.name}: sending was interrupted")
            raise

    # ---- the connection -------------------------------------------------------------------------

    def connect(self) -> None:
        """Makes the process connect to the driver, unless it is connected, is connecting, or cannot
        connect. Does not wait."""
        if self._connecting is not None and time.monotonic() >= self._retry_s:
            # The listener has dropped the connection. If it still admits the connection, the token
            # is unknown.
            self._transport.expect_no_more(self._endpoint)
            self._connecting = None
        if self._connection is None and self._connecting is None and not self.refused:
            self._retry_s = math.inf
            self._endpoint = self._transport.endpoint_for(self)
            self._connecting = self._watch(self.through_ray.actor.connect.remote(self._endpoint))

    def _watch(self, ref: Any) -> Future[Any]:
        return self._transport.wakeup.watch(ref, self)

    @property
    def is_connected(self) -> bool:
        """True if the process is connected."""
        return self._connection is not None

    def connected(self, connection: Connection) -> None:
        """Stores the connection of the process, which has connected and authenticated."""
        self._connection, self._connecting = connection, None
        self._room = buffer_bytes(connection)

    def receive(self) -> None:
        """Receives one message from the process, and ends the call that it answers."""
        assert self._connection is not None
        try:
            message = self._connection.recv_bytes()
            number = int.from_bytes(message[:NUMBER_BYTES], "big")
            ticket = self._pending.get(number)
            if ticket is not None:
                self._room += ticket.size
                ticket.end(self._transport.next_arrival(), message)
                del self._pending[number]
        except CONNECTION_ERRORS as error:
            self.fail(f"{self.name}: {type(error).__name__}: {error}")
        except BaseException:  # after Ctrl-C, the rest of the message is lost
            self.fail(f"{self.name}: receiving was interrupted")
            raise

    def actor_call_ended(self, call: Future[Any]) -> None:
        """Handles the end of an actor call of `connect` or `serve`, which Ray has reported."""
        error = call.exception()
        problem = str(call.result()) if error is None else str(error) or type(error).__name__
        if call is self._connecting:
            # Without a problem, the process has connected, but the listener has not admitted the
            # connection yet. If the process connected again, it would close this connection.
            if not problem:
                self._retry_s = time.monotonic() + ADMIT_TIMEOUT_S
            else:
                self._connecting = None
                self._transport.expect_no_more(self._endpoint)
                # After an error, the process has died. The next call through Ray reports this.
                self.refused = error is None
                if self.refused:
                    self._transport.note_unreachable(self, problem)
        elif problem and call in self._serves:
            while self._connection is not None and self._connection.poll(0):
                self.receive()  # the last answers that the process sent before `serve` ended
            self.fail(f"{self.name}: {problem}")
        self._serves.discard(call)

    def fail(self, reason: str) -> None:
        """Ends the connection. Unanswered calls over this connection end with an error."""
        self._hang_up()
        for ticket in self._pending.values():
            if not ticket.ended():
                ticket.end(self._transport.next_arrival(), error=ChannelError(reason))
        self._pending.clear()

    def _hang_up(self) -> None:
        connection, self._connection, self._serving = self._connection, None, None
        self._serves.clear()
        if connection is not None:
            self._transport.forget(connection)
            hang_up(connection)


class SocketTransport(Transport):
    """A transport that sends calls over sockets to processes on this node, and other calls through
    Ray. `wait` waits for answers over sockets and through Ray at the same time. Only one thread may
    use the transport, but any thread may call `kill` and the channels' `stop_early`.

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
        self._admitted: deque[tuple[Connection, bytes]] = deque()
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
        """Queues a connection that has authenticated. The listener calls this method in another
        thread."""
        self._admitted.append((connection, token))
        self.wakeup.wake()

    def endpoint_for(self, channel: SocketChannel) -> Endpoint:
        """Returns the data that a process needs to connect."""
        token = secrets.token_bytes(16)
        self._expected[token] = channel
        return Endpoint(self._listener.address, self._node, self._key, token, self._timeout_s)

    def expect_no_more(self, endpoint: Endpoint | None) -> None:
        """Notes that the process with this endpoint will not connect."""
        if endpoint is not None:
            self._expected.pop(endpoint.token, None)

    def _take_admitted(self) -> None:
        while self._admitted:
            connection, token = self._admitted.popleft()
            channel = self._expected.pop(token, None)
            if channel is None:
                hang_up(connection)
                continue
            limit(connection, min(self._timeout_s, MESSAGE_TIMEOUT_S))
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
                if key.data.is_connected:
                    key.data.receive()
                continue
            self.wakeup.handle(SocketChannel.actor_call_ended)
            self._take_admitted()

    # ---- processes ------------------------------------------------------------------------------

    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> SocketChannel:
        return SocketChannel(self.through_ray.start(make, args, options, name), self)

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        assert isinstance(channel, SocketChannel)
        channel.pause()
        channel.start = self.through_ray.remake(channel.through_ray, args)
        return channel.start

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        own = {c.through_ray: c for c in channels if isinstance(c, SocketChannel)}
        waiting, number = self.through_ray.waiting(list(own))
        return [own[channel] for channel in waiting if isinstance(channel, RayChannel)], number

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return self.through_ray.resources()

    def put(self, value: Any) -> Any:
        return self.through_ray.put(value)

    def get(self, value: Any) -> Any:
        return self.through_ray.get(value)

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, SocketChannel)
        # Any thread may call `kill`. The thread that polls closes the connection later.
        self.through_ray.kill(channel.through_ray)

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        for channel in channels:
            assert isinstance(channel, SocketChannel)
            channel.pause()
        actors = [c.through_ray for c in channels if isinstance(c, SocketChannel)]
        self.through_ray.stop(actors, timeout_s)
        for channel in channels:
            if isinstance(channel, SocketChannel):
                channel.fail(f"{channel.name} was stopped")

    def paths(self, channels: Sequence[Channel]) -> str:
        refused = [isinstance(c, SocketChannel) and c.refused for c in channels]
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
