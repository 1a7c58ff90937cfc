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

from polopt.rollouts.transport.router import Router, milliseconds
from polopt.rollouts.transport.rpc_channel import RpcChannel
from polopt.rollouts.transport.wakeup import Wakeup

logger = logging.getLogger("polopt")
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
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._required = required
        self._channels: dict[str, RpcChannel] = {}  # by user id
        self._router = Router(host, heartbeat_timeout_s)
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._router.socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    @property
    def address(self) -> str:
        """At which it listens, `tcp://host:port`."""
        return self._router.address

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
            wait_s = self._heartbeat_timeout_s
            channel = RpcChannel(self._router, self._wakeup, actor, name, wait_s)
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
                    self._serving_ended(channel, ended)

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

    def _serving_ended(self, channel: RpcChannel, ended: Future[Any]) -> None:
        """Ray reports that `serve` returned or raised."""
        if ended is not channel.serving or channel.broken or channel.through_ray:
            return
        error = ended.exception()
        problem = "" if error is not None else str(ended.result())
        if problem and not channel.connected:
            self._note_unreachable(channel.name, problem)
            channel.go_through_ray()
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
