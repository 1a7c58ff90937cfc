"""`RpcFuture`: one call over ZeroMQ."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

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
        serving: the actor call in which the worker answers it.

    Attributes:
        method: likewise.
        done: `result` returns or raises at once.
    """

    __slots__ = ("_error", "_serving", "_value", "done", "method")

    def __init__(self, method: str, serving: Future[Any]) -> None:
        self.method = method
        self.done = False
        self._serving = serving
        self._value: Any = None
        self._error: Exception | None = None

    def set_value(self, value: Any) -> None:
        """The worker answered."""
        self._value, self.done = value, True

    def set_error(self, error: Exception) -> None:
        """No answer will come. What Ray reports of `serve` takes precedence over `error`."""
        self._error, self.done = error, True

    def result(self) -> Any:
        """What the method returned.

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
