"""SIGINT, SIGTERM and SIGHUP as one request to stop a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
#: A run that has not ended so long after the signal is abandoned (`docker stop` kills after 10 s).
GRACE_S = 5.5
#: The process ends so long after the signal, whatever it is doing.
EXIT_S = 7.5
#: Then `before_exit` has this time, in seconds: it prints, and the pipe may have no reader.
_REPORT_S = 1.5


class Stopped(BaseException):
    """A signal ends the run now. Not an `Exception`: no handler of errors may swallow it."""


class StopSignals:
    """Handles the signals that ask a process to stop.

    Where the program allows it (`raising`), a signal raises `Stopped` in the main thread, once.
    Elsewhere it is noted. While a run is under way (`during`), the first signal calls the run's
    `request` instead, and the run has `GRACE_S` seconds to end. After `EXIT_S` seconds the process
    exits, whatever the main thread is doing: Python tells a thread of its own about the signal,
    also while the main thread is in compiled code, where no handler runs.

    Attributes:
        number: of the first signal. 0 before.
        before_exit: called before the process exits after `EXIT_S` seconds.
        kill: ends processes that must not outlive this one.
        raised: `Stopped` was raised, or the run has ended: it is not raised again.
    """

    def __init__(self) -> None:
        self.number = 0
        self.before_exit: Callable[[], None] = lambda: None
        self.kill: Callable[[], None] = lambda: None
        self._request: Callable[[], None] | None = None
        self._may_raise = self.raised = False
        self._writer: int | None = None
        self._finished = threading.Event()

    def install(self) -> None:
        """Installs the handlers, in the main thread. Again, if others have replaced them."""
        if self._writer is None:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=[reader], daemon=True).start()
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, lambda *_: self._end_now())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the handlers are installed. Afterwards the ones from before are again."""
        before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGALRM)}
        self.install()
        try:
            yield
        finally:
            self.finish()
            for number, handler in before.items():
                # None: a handler that was not set from Python, such as faulthandler's.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal raises `Stopped`."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    @contextmanager
    def during(self, request: Callable[[], None]) -> Iterator[None]:
        """Within, the first signal calls `request`, and a second one raises `Stopped`.

        Raises:
            Stopped: a signal arrived before.
        """
        self._request = request
        try:
            with self.raising():
                self.check()
                yield
        finally:
            self._request = None

    def check(self) -> None:
        """Raises `Stopped` if a signal has arrived, where that is allowed."""
        if self.number:
            self._end_now()

    def finish(self) -> None:
        """Ends the handling: the run has ended, later signals and the time limits do nothing."""
        self.raised = True
        self._finished.set()
        signal.set_wakeup_fd(-1)
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def leave(self) -> NoReturn:
        """Ends the process with the exit code of the signal, 128 plus its number, and without exit
        handlers. Exit handlers of Ray and of threads may wait for what the signal has
        interrupted."""
        self.finish()
        self.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number and self._request is not None:
            self.number = number
            self._request()
            return
        self.number = self.number or number
        self._end_now()

    def _end_now(self) -> None:
        if self._may_raise and not self.raised:
            self.raised = True
            raise Stopped

    def _watch(self, reader: int) -> None:
        """Enforces the time limits after the first signal that asks to stop."""
        number = 0
        while number not in _STOP_SIGNALS:
            read = os.read(reader, 1)
            if not read:  # finished
                break
            number = read[0]
        signal.alarm(0)  # Ray's own handler has the process aborted after 3 s
        if number and not self._finished.wait(GRACE_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            if not self._finished.wait(EXIT_S - GRACE_S):
                self.number = self.number or number
                report = threading.Thread(target=self.before_exit, daemon=True)
                report.start()
                report.join(_REPORT_S)
                try:
                    self.kill()
                finally:
                    os._exit(128 + self.number)
        os.close(reader)
