"""`RpcFuture`: one call over ZeroMQ."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray

#: After a connection has ended, limit for Ray to report why. It reports the death of a process on
#: the same node at once, that of a whole node after its own health check.
REASON_TIMEOUT_S = 5.0


class RpcError(RuntimeError):
    """A call over ZeroMQ failed, and Ray reports no reason."""


class UndecodableAnswerError(RpcError):
    """The answer of a worker cannot be unpickled in this process."""


class RpcFuture:
    """One call over ZeroMQ.

    Args:
        method: that is called.
        args: of the method.
        serving: the actor call in which the worker answers it.

    Attributes:
        method: likewise.
        args: likewise.
        done: `result` returns or raises at once.
        sent_s: monotonic time at which the call was sent; None: it waits for a connection.
    """

    __slots__ = ("_ended", "_error", "_ray_call", "_serving", "_value", "args", "method", "sent_s")

    def __init__(self, method: str, args: tuple[Any, ...], serving: Future[Any]) -> None:
        self.method = method
        self.args = args
        self.sent_s: float | None = None
        self._serving = serving
        self._ended = False
        self._ray_call: tuple[ray.ObjectRef[Any], Future[Any]] | None = None
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._ended if self._ray_call is None else self._ray_call[1].done()

    def set_value(self, value: Any) -> None:
        """The worker answered."""
        self._value, self._ended = value, True

    def set_error(self, error: Exception) -> None:
        """No answer will come. What Ray reports of `serve` takes precedence over `error`."""
        self._error, self._ended = error, True

    def set_ray_call(self, ref: ray.ObjectRef[Any], ended: Future[Any]) -> None:
        """The call is made through Ray instead."""
        self._ray_call = ref, ended

    def result(self, timeout_s: float) -> Any:
        """What the method returned.

        Raises:
            Exception: what `ray.get` raises for a call through Ray that ended like this one.
            UndecodableAnswerError: the answer cannot be unpickled.
            RpcError: the connection ended, and Ray reports no reason.
        """
        if self._ray_call is not None:
            return ray.get(self._ray_call[0], timeout=timeout_s)
        if self._error is None:
            return self._value
        if not isinstance(self._error, UndecodableAnswerError):
            with contextlib.suppress(FutureTimeoutError):
                self._serving.result(REASON_TIMEOUT_S)
        raise self._error
