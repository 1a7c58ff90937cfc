"""`ray_running`: Ray for the time of a run, in a thread of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import ray

from polopt.trainers.command_line.signals import StopSignals

#: Limits of the start and of the end of Ray, in seconds.
_START_S = 300.0
_END_S = 60.0
#: Ray's processes have this time to end by themselves after `ray.shutdown`, in seconds.
_LEFT_S = 1.0
#: Killed processes have this time until the kernel has ended them, in seconds.
_KILLED_S = 0.5


@contextmanager
def ray_running(start: Callable[[], None], signals: StopSignals) -> Iterator[None]:
    """Within, Ray runs. No process that it started outlives it.

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
        Stopped: a signal arrived. All that was started has been killed.
        TimeoutError: Ray has not started within five minutes.
    """
    others = _descendants()
    ended: set[psutil.Process] = set()  # by `ray.shutdown`. What is left of them has no parent here

    def kill() -> None:
        """Kills the processes that Ray has started here. Each is stopped before, so that none
        starts another one meanwhile."""
        found = set(ended)
        while new := _descendants() - others - found:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            found |= new
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, _KILLED_S)

    signals.kill = kill
    thread = ThreadPoolExecutor(1, "ray", _block_sighup)
    try:
        with signals.raising():
            signals.check()
            thread.submit(start).result(_START_S)
            signals.install()
        try:
            yield
        finally:
            if not signals.raised:
                ended |= _descendants() - others
                with signals.raising():
                    thread.submit(ray.shutdown).result(_END_S)
                    psutil.wait_procs(ended, _LEFT_S)
    finally:
        kill()


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _block_sighup() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
