"""`RpcClient`: calls methods of workers over ZeroMQ, from the driver.

A call through Ray costs both sides about a millisecond of processor time, which for a small network
is as much as its gradient. Ray still starts, places, watches and stops the worker: the worker
answers within one long actor call (`serve`), whose end reports why a connection ended.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

import ray
import zmq

from polopt.common.config import ConfigError
from polopt.rollouts.transport.messages import MAX_FRAME_BYTES
from polopt.rollouts.transport.router import Router, milliseconds
from polopt.rollouts.transport.rpc_channel import RpcChannel
from polopt.rollouts.transport.wakeup import Wakeup

logger = logging.getLogger("polopt")
#: Larger messages gain nothing from ZeroMQ: Ray passes them through shared memory.
SMALL_MESSAGE_BYTES = 100_000
#: Limit for the answers that a worker sent before `serve` ended.
FLUSH_TIMEOUT_S = 2.0


class TransportError(RuntimeError):
    """A worker cannot connect, and the config allows no other transport."""


class RpcClient:
    """Channels to all workers, and one wait for RPC futures and calls through Ray.

    Args:
        host: address of this node at which workers reach it.
        heartbeat_timeout_s: a worker whose node answers no ping for this time is disconnected.
        required: a worker that cannot connect raises `TransportError` instead of going through Ray.

    Raises:
        zmq.ZMQError: no socket can be bound at that address.
    """

    def __init__(self, host: str, heartbeat_timeout_s: float, required: bool = False) -> None:
        self._required = required
        self._channels: dict[str, RpcChannel] = {}  # by user id
        self._router = Router(host, heartbeat_timeout_s)
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
        """Ray reports that `connect` or `serve` returned or raised."""
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
