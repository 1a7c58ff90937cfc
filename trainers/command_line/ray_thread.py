"""`RayThread`: Ray for the time of a run, in a thread of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

import psutil
import ray

from polopt.trainers.command_line.signals import Stopped, StopSignals

#: Limits of the start and of the end of Ray, in seconds.
_START_S = 300.0
_END_S = 60.0
#: Ray's processes have this time to end by themselves after `ray.shutdown`, in seconds.
_LEFT_S = 1.0
#: Those that are killed have this time until the kernel has ended them, in seconds.
_KILLED_S = 0.5


class RayThread:
    """Ray from `__enter__` to `__exit__`; no process that it started outlives it.

    One thread calls `ray.init` and `ray.shutdown`. In the main thread, `ray.init` would begin by
    replacing the handler of SIGTERM, and no handler of a signal would run while it waits in
    compiled code. (Its compiled code replaces that handler, too, milliseconds before it returns.)
    The thread lives as long as Ray, because Linux kills Ray's processes with the thread that
    started them. It blocks SIGHUP, and so do they: a closed terminal signals all of them, and the
    command needs them to save a checkpoint.

    Args:
        start: connects to Ray.
        signals: installed.

    Raises:
        Stopped: a signal arrived; all that was started has been killed.
        TimeoutError: Ray has not started within five minutes.
    """

    def __init__(self, start: Callable[[], None], signals: StopSignals) -> None:
        self._start = start
        self._signals = signals
        self._others = _descendants()
        self._processes: set[psutil.Process] = set()
        self._thread = ThreadPoolExecutor(1, "ray", _block_sighup)

    def __enter__(self) -> None:
        self._signals.kill = self.kill
        try:
            with self._signals.raising():
                self._signals.check()
                self._thread.submit(self._start).result(_START_S)
                self._signals.install()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._processes = _descendants() - self._others
        try:
            if kind is not Stopped:
                with self._signals.raising():
                    self._thread.submit(ray.shutdown).result(_END_S)
                    _wait_for_end(self._processes, _LEFT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the processes that Ray has started here. Each is stopped before, so that none
        starts another one meanwhile."""
        found = set(self._processes)
        while new := _descendants() - self._others - found:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            found |= new
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_for_end(found, _KILLED_S)


def _wait_for_end(processes: set[psutil.Process], duration_s: float) -> None:
    deadline_s = time.monotonic() + duration_s
    while any(map(_alive, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _descendants() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if _alive(process)}


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _block_sighup() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
