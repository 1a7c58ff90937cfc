"""`StopSignals`: handles SIGINT, SIGTERM and SIGHUP as a request to stop a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from polopt.rollouts.transport.sockets import remove_files_of

_STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
#: Seconds after a signal in which a run may end by itself. After this time, the run is interrupted.
#: `docker stop` kills a process 10 s after the signal. With the values of `GRACE_S`, `EXIT_S` and
#: `_REPORT_S`, the process exits earlier.
GRACE_S = 5.5
#: Seconds after a signal at which the process exits, even if the main thread is still busy.
EXIT_S = 7.5
#: Seconds that `before_exit` may take after `EXIT_S`. This function may never return, because its
#: output may be a full pipe that no process reads.
_REPORT_S = 1.5


class Stopped(BaseException):
    """Raised when a signal ends the run now. It is not a subclass of `Exception`, so that handlers
    of errors do not catch it."""


class StopSignals:
    """Handles the signals that ask a process to stop.

    Inside a block of `raising`, a signal raises `Stopped` in the main thread, but only once.
    Outside of such blocks, a signal only sets `number`.

    Inside a block of `during`, which surrounds a run, the first signal calls the run's `request`.
    The run then has `GRACE_S` seconds to end. After this time, `Stopped` is raised.

    If `finish` is not called within `EXIT_S` seconds after the signal, the process exits. A
    separate thread watches this time, because Python runs no signal handler while the main thread
    is in compiled code.

    Attributes:
        number: number of the first signal. It is 0 before the first signal.
        before_exit: a function that is called before the process exits after `EXIT_S` seconds.
        kill: a function that ends the processes that must not outlive this process.
        raised: whether `Stopped` was raised, or the run has ended. `Stopped` is then not raised
            again.
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
        """Installs the handlers. Must be called in the main thread. A second call installs the
        handlers again after other code has replaced them."""
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
        """Installs the handlers for the block. After the block, restores the previous handlers."""
        before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGALRM)}
        self.install()
        try:
            yield
        finally:
            self.finish()
            for number, handler in before.items():
                # `handler` is None if the previous handler was not set from Python, for example by
                # faulthandler.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside the block, a signal raises `Stopped`."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    @contextmanager
    def during(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside the block, the first signal calls `request`. A second signal raises `Stopped`, and
        so does the end of `GRACE_S`.

        Raises:
            Stopped: see above. Also raised if a signal arrived before the block.
        """
        self._request = request
        try:
            with self.raising():
                self.check()
                yield
        finally:
            self._request = None

    def check(self) -> None:
        """Inside a block of `raising`, raises `Stopped` if a signal has arrived."""
        if self.number:
            self._end_now()

    def finish(self) -> None:
        """Ends the handling of signals after a run. Later signals and the time limits then have no
        effect."""
        self.raised = True
        self._finished.set()
        signal.set_wakeup_fd(-1)
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def leave(self) -> NoReturn:
        """Ends the process with the exit code of the signal, which is 128 plus its number. Does not
        run exit handlers. The exit handlers of Ray and of threads may wait forever for work that
        the signal has interrupted."""
        self.finish()
        self.kill()
        remove_files_of([os.getpid()])
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
        """Enforces the time limits after the first stop signal. Runs in a separate thread."""
        number = 0
        while number not in _STOP_SIGNALS:
            read = os.read(reader, 1)
            if not read:  # `finish` has closed the pipe
                break
            number = read[0]
        signal.alarm(0)  # Ray's own handler sets an alarm that aborts the process after 3 s
        if number and not self._finished.wait(GRACE_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            if not self._finished.wait(EXIT_S - GRACE_S):
                self.number = self.number or number
                report = threading.Thread(target=self.before_exit, daemon=True)
                report.start()
                report.join(_REPORT_S)
                try:
                    self.kill()
                    remove_files_of([os.getpid()])
                finally:
                    os._exit(128 + self.number)
        os.close(reader)
