"""SIGINT, SIGTERM and SIGHUP as one request to stop a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
#: A run that has not ended so long after the signal is abandoned (`docker stop` kills after 10 s).
GRACE_S = 5.5
#: The process ends so long after the signal, whatever it is doing.
EXIT_S = 7.5


class Stopped(BaseException):
    """A signal ends the run now. Not an `Exception`: no handler of errors may swallow it."""


class StopSignals:
    """Handles the signals that ask a process to stop.

    While a run is under way (`during`), the first signal calls the run's `request`, and the run has
    `GRACE_S` seconds to end. At any other time, after those seconds, and on the second signal,
    `Stopped` is raised in the main thread. After `EXIT_S` seconds the process exits.

    Attributes:
        number: of the first signal; 0 before.
        before_exit: called before the process exits after `EXIT_S` seconds.
    """

    def __init__(self) -> None:
        self.number = 0
        self.before_exit: Callable[[], None] = lambda: None
        self._request: Callable[[], None] | None = None
        self._raised = False
        self._timer: threading.Timer | None = None

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, as shells report it."""
        return 128 + self.number

    def install(self) -> None:
        """Installs the handlers. `ray.init` replaces that of SIGTERM, so call it again after."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._expire)

    @contextmanager
    def during(self, request: Callable[[], None]) -> Iterator[None]:
        """Calls `request` on the first signal instead of raising `Stopped`.

        Raises:
            Stopped: a signal arrived before.
        """
        self._request = request
        try:
            self.check()
            yield
        finally:
            self._request = None

    @contextmanager
    def inherited_block(self) -> Iterator[None]:
        """Processes started within block SIGHUP: a closed terminal signals all of them, and the
        command needs them to save a checkpoint. SIGTERM stays, for Ray ends its processes so."""
        if not hasattr(signal, "SIGHUP"):
            yield
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def check(self) -> None:
        """Raises `Stopped` if a signal has arrived."""
        if self.number:
            self.end_now()

    def end_now(self) -> None:
        """Raises `Stopped` in the main thread, unless that happened before."""
        if not self._raised:
            self._raised = True
            raise Stopped

    def finish(self) -> None:
        """Ends the handling: the run has ended, later signals and the time limits do nothing."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._raised = True
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.end_now()
            return
        self.number = number
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        self._timer = threading.Timer(EXIT_S, self._exit)
        self._timer.daemon = True
        self._timer.start()
        if self._request is None:
            self.end_now()
        else:
            self._request()

    def _exit(self) -> None:
        """Ends a process whose main thread is stuck, such as in a call to a Ray that has died."""
        try:
            self.before_exit()
        finally:
            os._exit(self.exit_code)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        self.end_now()
