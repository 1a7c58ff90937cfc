"""`RpcClient`: has workers run functions over ZeroMQ, from the driver.

A call through Ray costs both sides about a millisecond of processor time, which for a small network
is as much as its gradient. Ray still starts, places, watches and stops the worker: the worker
answers within one long actor call (`serve`), whose end reports why a connection ended.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray
import zmq

from polopt.common.config import ConfigError
from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.listener import Listener
from polopt.rollouts.transport.messages import (
    ANSWER,
    AUTO_FRAME_BYTES,
    CALL,
    END,
    HELLO,
    LARGE,
    MAX_FRAME_BYTES,
    NONE_WANTED,
    decode,
    encode,
    fits,
    header_of,
    is_of_signal,
    milliseconds,
)
from polopt.rollouts.transport.wakeup import Wakeup

logger = logging.getLogger("polopt")
#: Larger messages gain nothing from ZeroMQ: Ray passes them through shared memory.
SMALL_MESSAGE_BYTES = 100_000
#: Limit for the answers that a worker sent before `serve` ended.
FLUSH_TIMEOUT_S = 2.0
#: After a connection has ended, limit for Ray to report why. It reports the death of a process on
#: the same node at once, that of a whole node after its own health check.
REASON_TIMEOUT_S = 5.0


class RpcError(RuntimeError):
    """A call over ZeroMQ failed, and Ray reports no reason."""


class UndecodableAnswerError(RpcError):
    """The answer of a worker cannot be unpickled in this process; the message says why."""


class RpcFuture:
    """One call over ZeroMQ.

    Args:
        name: of the function that is called.
        serving: the actor call in which the worker answers it.
        ended: gets the future once it is done.

    Attributes:
        name: likewise.
        done: `result` returns or raises at once.
    """

    __slots__ = ("_ended", "_error", "_serving", "_value", "done", "name")

    def __init__(self, name: str, serving: Future[Any], ended: deque[RpcFuture]) -> None:
        self.name = name
        self.done = False
        self._ended = ended
        self._serving = serving
        self._value: Any = None
        self._error: Exception | None = None

    def fetch(self, call: Future[Any]) -> None:
        """The answer is fetched by an actor call of its own, and failures are those of this
        call."""
        self._serving = call

    def set_value(self, value: Any) -> None:
        """The worker answered."""
        self._value, self.done = value, True
        self._ended.append(self)

    def set_error(self, error: Exception) -> None:
        """No answer will come. What Ray reports of the actor call takes precedence over `error`."""
        self._error, self.done = error, True
        self._ended.append(self)

    def result(self) -> Any:
        """What the worker answered.

        Raises:
            Exception: what `ray.get` raises for a call through Ray that ended like this one.
            UndecodableAnswerError: the answer cannot be unpickled.
            RpcError: the connection ended, and Ray reports no reason.
        """
        if self._error is None:
            return self._value
        if not isinstance(self._error, UndecodableAnswerError):
            with contextlib.suppress(FutureTimeoutError):
                self._serving.result(REASON_TIMEOUT_S)
        raise self._error


class LargeCallError(ValueError):
    """The arguments of a call do not fit into a message; nothing was sent."""


class RpcChannel:
    """Calls of one worker, over one connection.

    Args:
        router: to which the worker connects.
        wakeup: written to when `serve` ends.
        actor: handle of the worker; its class has `connect(endpoint)` and `serve(endpoint)`, and
            `take_large_answer(endpoint, number)`, which is called in the concurrency group
            `control`; see `RpcServer`.
        name: of the worker, for messages.

    Attributes:
        name: of the worker.
        open: the worker answers calls over the connection, or does so after it has finished what
            Ray has sent it before. If not, it answers calls through Ray.
        broken: the connection has ended for good.
        refused: the worker cannot connect; all its calls go through Ray.
        connecting: the actor call in which the worker connects.
        serving: the last `serve`; its end reports why the connection ended.
    """

    def __init__(self, router: Router, wakeup: Wakeup, actor: Any, name: str) -> None:
        self.name = name
        self._router = router
        self._wakeup = wakeup
        self._actor = actor
        self._endpoint = router.admit()
        self.user_id = self._endpoint.public_key.decode()
        self.open = self.broken = self.refused = False
        self.connecting = wakeup.watch(actor.connect.remote(self._endpoint), self)
        self.serving: Future[Any] | None = None
        self._routing_id: bytes | None = None  # known after HELLO
        self._pending: dict[int, RpcFuture] = {}
        # By the call that fetches the answer: its number and future.
        self._fetched: dict[Future[Any], tuple[int, RpcFuture]] = {}

    @property
    def connected(self) -> bool:
        """Calls can be made. Until then, and after the connection has ended, they go through
        Ray."""
        return self._routing_id is not None and not self.broken

    def call(
        self,
        number: int,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        ended: deque[RpcFuture],
    ) -> RpcFuture:
        """Has a worker that is connected run a function. Calls run in the order in which they are
        made.

        Args:
            number: of the call, unique in this process.
            name: of the function, for messages.
            function: first argument of the worker's `run` after the number; picklable, by value if
                need be, as the further ones.
            args: the further ones.
            ended: gets the future once it is done.

        Raises:
            LargeCallError: an argument is larger than a message can be.
            Exception: an argument cannot be pickled.
        """
        content = function, args, self._oldest_wanted(number)
        frames = encode(CALL, number, content, by_value=True)
        if not fits(frames, self._endpoint.max_frame_bytes):
            self._router.num_large_messages += 1
            raise LargeCallError(f"{self.name}: arguments of {name} do not fit into a message")
        if not self.open:
            self.open = True
            self.serving = self._wakeup.watch(self._actor.serve.remote(self._endpoint), self)
        assert self.serving is not None
        future = self._pending[number] = RpcFuture(name, self.serving, ended)
        self._router.num_calls += 1
        self._send(frames)
        return future

    def pause(self) -> None:
        """The worker answers calls through Ray from now on, after the calls made so far."""
        if self.open:
            self.open = False
            self._send(encode(END, self._oldest_wanted(NONE_WANTED)))

    def _oldest_wanted(self, otherwise: int) -> int:
        """Number of the oldest call whose answer has not come. The worker drops the large answers
        to older ones."""
        fetched = [number for number, _ in self._fetched.values()]
        return min([*self._pending, *fetched], default=otherwise)

    def _send(self, message: list[Any]) -> None:
        assert self._routing_id is not None
        try:
            self._router.send(self._routing_id, message)
        except zmq.ZMQError as error:
            self.fail(f"{self.name}: {error}")

    def receive(self, routing_id: bytes, frames: list[zmq.Frame]) -> None:
        """Takes a message of this channel's user."""
        kind, number = header_of(frames)
        if kind == HELLO and self._routing_id is None:
            self._routing_id = routing_id
        elif kind == ANSWER:
            future = self._pending.pop(number, None)
            if future is not None:
                self._decode(future, frames)
        elif kind == LARGE:
            future = self._pending.pop(number, None)
            if future is not None:
                self._fetch(future, number)
        elif kind == END:
            self.fail(f"{self.name} has ended its connection")

    def _fetch(self, future: RpcFuture, number: int) -> None:
        """Fetches an answer through Ray, which also works within `serve` and after the connection
        has ended."""
        self._router.num_large_messages += 1
        take = self._actor.take_large_answer.options(concurrency_group="control")
        call = self._wakeup.watch(take.remote(self._endpoint, number), self)
        assert call is not None
        future.fetch(call)
        self._fetched[call] = number, future

    def take_fetched(self, call: Future[Any]) -> bool:
        """Takes an answer that came through Ray; False: `call` did not fetch one."""
        fetched = self._fetched.pop(call, None)
        if fetched is None:
            return False
        future = fetched[1]
        error = call.exception()
        if error is None:
            self._decode(future, list(map(zmq.Frame, call.result())))
        else:
            future.set_error(RpcError(f"{self.name}: its answer to {future.name}: {error}"))
        return True

    def _decode(self, future: RpcFuture, frames: list[zmq.Frame]) -> None:
        try:
            value = decode(frames)
        except BaseException as error:  # unpickling can raise anything; it is the worker's failure
            if is_of_signal(error):
                raise
            future.set_error(UndecodableAnswerError(f"{type(error).__name__}: {error}"))
        else:
            future.set_value(value)

    def refuse(self) -> None:
        """The worker cannot connect."""
        self._shut()
        self.broken, self.refused = False, True

    def fail(self, reason: str) -> None:
        """Ends the connection and all calls that wait for an answer; not those that wait for Ray to
        fetch it."""
        self._shut()
        for future in self._pending.values():
            future.set_error(RpcError(reason))
        self._pending.clear()

    def close(self) -> None:
        """Ends the connection and drops its calls; the worker returns from `serve`."""
        self._pending.clear()
        self._fetched.clear()
        self.pause()
        self._shut()

    def _shut(self) -> None:
        self.open, self.broken = False, True
        self._router.revoke(self.user_id)


class Router:
    """ROUTER socket that admits only known workers; see `Listener`.

    ZeroMQ assigns routing ids, and each message carries the user id that was authenticated, so no
    peer can send or receive in the name of another.

    Args:
        host: address of this node at which workers reach it. The system chooses the port.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.
        max_frame_bytes: largest frame that either side sends.

    Attributes:
        address: at which it listens.
        max_frame_bytes: likewise.
        num_calls: calls sent so far.
        num_large_messages: calls and answers so far that were too large, and went through Ray.

    Raises:
        zmq.ZMQError: no socket can be bound at that address; see `Listener`.
    """

    def __init__(self, host: str, heartbeat_timeout_s: float, max_frame_bytes: int) -> None:
        self.num_calls = 0
        self.num_large_messages = 0
        self.max_frame_bytes = max_frame_bytes
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._public_key, secret_key = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        limits = heartbeat_timeout_s, max_frame_bytes
        self._listener = Listener(self._context, zmq.ROUTER, host, *limits, secret_key)
        self.socket = self._listener.socket
        self.address = self._listener.address
        self._in_message = False

    def admit(self) -> Endpoint:
        """Admits one more worker; returns what it needs to connect."""
        public_key, secret_key = zmq.curve_keypair()
        password = secrets.token_hex()
        self._listener.passwords[public_key.decode()] = password
        keys = self._public_key, public_key, secret_key, password
        limits = self._heartbeat_timeout_s, self.max_frame_bytes
        return Endpoint(self.address, *keys, *limits)

    def revoke(self, user_id: str) -> None:
        """Admits no further connection of this worker."""
        self._listener.passwords.pop(user_id, None)

    def send(self, routing_id: bytes, message: list[Any]) -> None:
        """Sends without waiting.

        Raises:
            zmq.ZMQError: the peer is disconnected (EHOSTUNREACH), or has not read
                `HIGH_WATER_MARK` messages (EAGAIN).
        """
        try:
            self.socket.send_multipart([routing_id, *message], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            raise
        except BaseException:  # Ctrl-C: completes the message, so that the next one starts anew
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(b"", zmq.NOBLOCK)
            raise

    def receive(self) -> tuple[str, bytes, list[zmq.Frame]] | None:
        """User id, routing id and frames of the next message; None if there is none."""
        while self._in_message and self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv()  # Ctrl-C came within the last message
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        self._in_message = True
        frame = routing_id = self.socket.recv(zmq.NOBLOCK, copy=False)
        frames = []
        while frame.more:
            frame = self.socket.recv(copy=False)
            frames.append(frame)
        self._in_message = False
        return str(frame.get("User-Id")), routing_id.bytes, frames

    def close(self) -> None:
        """Disconnects all peers. Takes at most `LINGER_S` seconds."""
        self._listener.close()
        self._context.term()


class TransportError(RuntimeError):
    """A worker cannot connect, and the config allows no other transport."""


class RpcClient:
    """Channels to all workers, and one wait for RPC futures and calls through Ray. Belongs to one
    thread.

    Args:
        host: address of this node at which workers reach it.
        heartbeat_timeout_s: a worker whose node answers no ping for this time is disconnected.
        required: a worker that cannot connect raises `TransportError` instead of going through Ray,
            and messages may have parts of `MAX_FRAME_BYTES` instead of `AUTO_FRAME_BYTES`.

    Raises:
        zmq.ZMQError: no socket can be bound at that address.
    """

    def __init__(self, host: str, heartbeat_timeout_s: float, required: bool = False) -> None:
        self._required = required
        self._channels: dict[str, RpcChannel] = {}  # by user id
        max_frame_bytes = MAX_FRAME_BYTES if required else AUTO_FRAME_BYTES
        self._router = Router(host, heartbeat_timeout_s, max_frame_bytes)
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._router.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    @property
    def address(self) -> str:
        """At which it listens for workers of other nodes, `tcp://host:port`."""
        return self._router.address.tcp

    @property
    def num_calls(self) -> int:
        """Calls sent over ZeroMQ so far."""
        return self._router.num_calls

    @property
    def num_large_messages(self) -> int:
        """Calls and answers so far that were too large for ZeroMQ, and went through Ray."""
        return self._router.num_large_messages

    def channel(self, channel: RpcChannel | None, actor: Any, name: str) -> RpcChannel:
        """The channel of a worker: `channel`, unless it is None or broken.

        Args:
            channel: the one that the worker had.
            actor: see `RpcChannel`.
            name: likewise.
        """
        if channel is None or channel.broken:
            self._channels = {u: c for u, c in self._channels.items() if not c.broken}
            channel = RpcChannel(self._router, self._wakeup, actor, name)
            self._channels[channel.user_id] = channel
        return channel

    def watch(self, ref: ray.ObjectRef[Any]) -> None:
        """Has `poll` return when a call through Ray ends."""
        self._wakeup.watch(ref)

    def poll(self, timeout_s: float) -> None:
        """Takes all messages that have arrived; waits for the first, or for the end of a watched
        call through Ray.

        Args:
            timeout_s: limit of the wait; 0: none.

        Raises:
            TransportError: a worker cannot connect, and no other transport is allowed.
        """
        for source, _ in self._poller.poll(milliseconds(timeout_s)):
            if source is self._router.socket:
                while self._receive():
                    pass
            else:
                for channel, ended in self._wakeup.take():
                    self._actor_call_ended(channel, ended)

    def _receive(self) -> bool:
        """Takes one message, if there is one. Those of unknown users are dropped unread."""
        received = self._router.receive()
        if received is None:
            return False
        user_id, routing_id, frames = received
        channel = self._channels.get(user_id)
        if channel is not None and frames and not channel.broken:
            channel.receive(routing_id, frames)
        return True

    def _actor_call_ended(self, channel: RpcChannel, ended: Future[Any]) -> None:
        """Ray reports that a call of the channel returned or raised."""
        if channel.take_fetched(ended):
            return
        if channel.broken or ended not in (channel.connecting, channel.serving):
            return
        error = ended.exception()
        problem = "" if error is not None else str(ended.result())
        if problem and ended is channel.connecting:
            self._note_unreachable(channel.name, problem)
            channel.refuse()
        elif error is not None or problem:
            # A worker that still runs has sent its last answers, and END behind them.
            killed = isinstance(error, ray.exceptions.RayActorError)
            self._flush(channel, 0.0 if killed else FLUSH_TIMEOUT_S)
            channel.fail(f"{channel.name}: {problem or error}")

    def _flush(self, channel: RpcChannel, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not channel.broken:
            if not self._router.socket.poll(milliseconds(until_s - time.monotonic())):
                return
            self._receive()

    def _note_unreachable(self, name: str, problem: str) -> None:
        if self._required:
            raise TransportError(
                f"{name} cannot connect to the driver ({problem}), with transport: zmq. "
                "Allowed: a network in which workers reach the driver; or transport: auto or ray"
            )
        logger.warning(
            "%s cannot connect to the driver (%s). Its calls go through Ray, which is slower.",
            name,
            problem,
        )

    def close(self) -> None:
        """Ends all connections. Takes at most `LINGER_S` seconds."""
        for channel in self._channels.values():
            channel.close()
        self._router.close()
        self._wakeup.close()


def open_rpc(transport: str, message_bytes: int, timeout_s: float) -> RpcClient | None:
    """The client that calls go through; None: they go through Ray.

    Args:
        transport: `ray`, `zmq` or `auto`; see `RolloutConfig`.
        message_bytes: size of the larger one of a typical call and its answer.
        timeout_s: a worker whose node answers no ping for this time is disconnected.

    Raises:
        ConfigError: `transport: zmq` with messages that are too large for it.
        TransportError: `transport: zmq` where no socket can be bound.
    """
    required = transport == "zmq"
    if required and message_bytes > MAX_FRAME_BYTES:
        raise ConfigError(
            f"key 'transport': got 'zmq' with messages of {message_bytes} bytes. "
            f"Allowed: up to {MAX_FRAME_BYTES}; for larger ones 'ray' or 'auto'"
        )
    if transport == "ray" or not (required or message_bytes <= SMALL_MESSAGE_BYTES):
        return None
    host = ray.util.get_node_ip_address()
    try:
        return RpcClient(host, timeout_s, required)
    except zmq.ZMQError as error:
        problem = f"cannot listen at {host}: {error}"
        if required:
            raise TransportError(f"transport: zmq: {problem}") from error
        logger.warning("%s. All calls go through Ray, which is slower.", problem)
        return None
