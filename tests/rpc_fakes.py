"""Fakes of Ray's actors, answering RPC calls on threads of this process; and calls of methods."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray import cloudpickle

from polopt.rollouts.transport.endpoint import Address, Endpoint
from polopt.rollouts.transport.rpc_client import RpcChannel, RpcFuture
from polopt.rollouts.transport.rpc_server import RpcServer

_numbers = itertools.count(1)


class CalledTarget:
    """Object whose methods are called by name, where a worker runs a function."""

    def run(self, number: int, function: bytes, *args: Any) -> Any:
        return getattr(self, function.decode())(*args)

    def run_encoded(self, call: bytes) -> Any:
        number, function, args = cloudpickle.loads(call)
        return self.run(number, function, *args)

    def refuse(self, why: str) -> str:
        return f"refused: {why}"


class Echo(CalledTarget):
    """Object whose only method is `echo`."""

    def echo(self, value: Any) -> Any:
        return value


def call(
    channel: RpcChannel,
    method: str,
    *args: Any,
    number: int | None = None,
    ended: deque[RpcFuture] | None = None,
) -> RpcFuture:
    """Calls a method of the `CalledTarget` behind a channel."""
    number = next(_numbers) if number is None else number
    ended = deque() if ended is None else ended
    return channel.call(number, method, method.encode(), args, ended)


class FakeRef:
    """`ray.ObjectRef` of one actor call."""

    def __init__(self) -> None:
        self.ended: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.ended


class FakeMethod:
    """`actor.method` with its `remote`."""

    def __init__(self, actor: FakeActor, function: Callable[..., Any]) -> None:
        self._actor = actor
        self._function = function

    def remote(self, *args: Any) -> FakeRef:
        ref = FakeRef()
        self._actor.calls.put((ref, self._function, args))
        return ref

    def options(self, concurrency_group: str) -> FakeMethod:
        """The method in a concurrency group, whose calls do not wait for the others."""
        return FakeGroupMethod(self._actor, self._function)


class FakeGroupMethod(FakeMethod):
    """Method whose calls run on threads of their own."""

    def remote(self, *args: Any) -> FakeRef:
        ref = FakeRef()
        threading.Thread(target=run_call, args=(ref, self._function, args), daemon=True).start()
        return ref


def run_call(ref: FakeRef, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        ref.ended.set_result(function(*args))
    except Exception as error:
        ref.ended.set_exception(error)


class FakeActor:
    """Actor that runs calls in order, on one thread.

    Attributes:
        endpoints: with which `connect` was called.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.server = RpcServer()
        self.endpoints: list[Endpoint] = []
        self.calls: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            run_call(*call)
        self.server.close()

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(self, getattr(self.target, name))

    @property
    def connect(self) -> FakeMethod:
        def connect(endpoint: Endpoint) -> str:
            self.endpoints.append(endpoint)
            return self.server.connect(endpoint)

        return FakeMethod(self, connect)

    @property
    def serve(self) -> FakeMethod:
        return FakeMethod(self, lambda endpoint: self.server.serve(self.target, endpoint))

    @property
    def take_large_answer(self) -> FakeMethod:
        return FakeMethod(self, self.server.take_large_answer)

    def stop(self) -> None:
        self.calls.put(None)
        self._thread.join(30.0)


class SilentActor:
    """Actor whose calls do not return; a test plays the worker, with its keys."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []

    def __getattr__(self, name: str) -> SilentActor:
        return self

    def remote(self, endpoint: Endpoint) -> FakeRef:
        self.endpoints.append(endpoint)
        return FakeRef()


def connect_raw(address: Address) -> socket.socket:
    """A plain connection, by `ipc` if there is such an address."""
    if not address.ipc:
        host, _, port = address.tcp.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)))
    made = socket.socket(socket.AF_UNIX)
    made.connect(address.ipc.removeprefix("ipc://"))
    return made


class Proxy:
    """Forwards a connection to `address`; after `stall`, it stays open in silence.

    Attributes:
        address: to connect to instead.
        left: bytes that are still forwarded to `address`.
    """

    def __init__(self, address: Address) -> None:
        self._remote = connect_raw(address)
        self._local: socket.socket | None = None
        self.left = 1 << 40
        if address.ipc:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"{address.ipc.removeprefix('ipc://')}-proxy")
            self._listener.listen()
            self.address = Address("", f"{address.ipc}-proxy")
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = Address(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while self._local is None or not self._local.recv(1, socket.MSG_PEEK):
                self._local = self._listener.accept()[0]  # again, if one closes without a byte
            threading.Thread(target=self._back, daemon=True).start()
            while data := self._local.recv(1 << 16):
                self._remote.sendall(data[: self.left])
                self.left -= len(data[: self.left])

    def _back(self) -> None:
        assert self._local is not None
        with contextlib.suppress(OSError):
            while data := self._remote.recv(1 << 16):
                if self.left > 0:
                    self._local.sendall(data)

    def stall(self, after_bytes: int = 0) -> None:
        """Forwards only so many more bytes."""
        self.left = after_bytes

    def close(self) -> None:
        for end in (self._remote, self._listener, self._local):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
