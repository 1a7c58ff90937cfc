"""`ray_running`: starts Ray for a run in a separate thread, and ends it after the run."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import ray

from polopt.command_line.signals import StopSignals
from polopt.common.ray_names import START_CONTROL_SERVICE
from polopt.rollouts.transport.sockets import remove_files_of

#: Time limits for starting and ending Ray, in seconds.
_START_S = 300.0
_END_S = 60.0
#: Seconds to wait until the thread has left `START_CONTROL_SERVICE`.
_CONTROL_SERVICE_S = 10.0
#: Seconds in which Ray's processes may end by themselves after `ray.shutdown`.
_LEFT_S = 1.0
#: Seconds to wait until the kernel has ended the killed processes.
_KILLED_S = 0.5


@contextmanager
def ray_running(start: Callable[[], None], signals: StopSignals) -> Iterator[None]:
    """Runs Ray inside the block. At the end of the block, kills all processes that Ray has started.

    A separate thread calls `ray.init` and `ray.shutdown`. In the main thread, `ray.init` would
    replace the handler of SIGTERM. Also, no signal handler could run while `ray.init` waits in
    compiled code. Even in a separate thread, this code replaces the handler of SIGTERM at the end
    of `ray.init`, so the handlers are then installed again.

    The thread lives as long as Ray, because Linux kills Ray's processes when the thread that
    started them ends. The thread and Ray's processes block SIGHUP. When a terminal is closed, all
    processes get SIGHUP, but the command needs Ray's processes to save a checkpoint.

    Args:
        start: a function that connects to Ray.
        signals: the signal handlers, which are already installed.

    Raises:
        Stopped: a signal arrived. All processes that Ray started have been killed.
        TimeoutError: Ray has not started within five minutes, or has not ended within one minute.
        Exception: `start` raised this exception.
    """
    others = _descendants()
    # Ray's processes at the time of `ray.shutdown`. `_descendants` may miss them afterwards,
    # because the processes that still run have lost their parent.
    ended: set[psutil.Process] = set()
    idents: list[int] = []

    def start_in_thread() -> None:
        idents.append(threading.get_ident())
        start()

    def kill() -> None:
        """Kills the processes that Ray has started here, and removes their sockets. First suspends
        each process, so that no process can start another process in the meantime."""
        found = set(ended)
        while new := _descendants() - others - found:
            # If the control service is among them, the thread is in this function or has left it.
            _wait_while_in(START_CONTROL_SERVICE, idents)
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            found |= new
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, _KILLED_S)
        remove_files_of(process.pid for process in found)

    signals.kill = kill
    thread = ThreadPoolExecutor(1, "ray", _block_sighup)
    try:
        with signals.raising():
            signals.check()
            thread.submit(start_in_thread).result(_START_S)
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


def _wait_while_in(function: str, idents: list[int]) -> None:
    """Waits until none of the threads runs the function, but at most `_CONTROL_SERVICE_S`."""
    end_s = time.monotonic() + _CONTROL_SERVICE_S
    while any(_runs(function, ident) for ident in idents) and time.monotonic() < end_s:
        time.sleep(0.01)


def _runs(function: str, ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _block_sighup() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
