"""`RpcChannel`: the driver's side of one worker's connection."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import zmq

from polopt.rollouts.transport.messages import (
    ANSWER,
    CALL,
    END,
    HELLO,
    decode,
    encode,
    header_of,
)
from polopt.rollouts.transport.router import Router
from polopt.rollouts.transport.rpc_future import RpcError, RpcFuture, UndecodableAnswerError
from polopt.rollouts.transport.wakeup import Wakeup


class RpcChannel:
    """Calls of one worker, over one connection.

    Args:
        router: to which the worker connects.
        wakeup: written to when `serve` ends.
        actor: handle of the worker; its class has `connect(endpoint)` and `serve(endpoint)`,
            see `RpcServer`.
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
        self._numbers = itertools.count(1)

    @property
    def connected(self) -> bool:
        """Calls can be made. Until then, and after the connection has ended, they go through
        Ray."""
        return self._routing_id is not None and not self.broken

    def call(self, method: str, args: tuple[Any, ...]) -> RpcFuture:
        """Calls a method of a worker that is connected. Calls run in the order in which they are
        made.

        Raises:
            ValueError: an argument is larger than a message can be.
        """
        number = next(self._numbers)
        frames = encode(CALL, number, (method, args))
        if not self.open:
            self.open = True
            self.serving = self._wakeup.watch(self._actor.serve.remote(self._endpoint), self)
        assert self.serving is not None
        future = self._pending[number] = RpcFuture(method, self.serving)
        self._router.num_calls += 1
        self._send(frames)
        return future

    def pause(self) -> None:
        """The worker answers calls through Ray from now on, after the calls made so far."""
        if self.open:
            self.open = False
            self._send(encode(END))

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
        elif kind == END:
            self.fail(f"{self.name} has ended its connection")

    def _decode(self, future: RpcFuture, frames: list[zmq.Frame]) -> None:
        try:
            value = decode(frames)
        except Exception as error:  # unpickling can raise anything; it is the worker's failure
            text = f"{self.name}: its answer to {future.method} cannot be unpickled: {error!r}"
            future.set_error(UndecodableAnswerError(text))
        else:
            future.set_value(value)

    def refuse(self) -> None:
        """The worker cannot connect."""
        self._shut()
        self.broken, self.refused = False, True

    def fail(self, reason: str) -> None:
        """Ends the connection and all calls that wait for an answer."""
        self._shut()
        for future in self._pending.values():
            future.set_error(RpcError(reason))
        self._pending.clear()

    def close(self) -> None:
        """Ends the connection and drops its calls; the worker returns from `serve`."""
        self.pause()
        self._pending.clear()
        self._shut()

    def _shut(self) -> None:
        self.open, self.broken = False, True
        self._router.revoke(self.user_id)
