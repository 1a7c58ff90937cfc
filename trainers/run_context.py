"""The process of a trial: what the command line passes to it, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import ray


@dataclass(frozen=True)
class RunContext:
    """What the command line passes to its trial besides the config.

    Attributes:
        folder: directory of the experiment. The trainer appends its warnings to `polopt.log`
            there, and ends the current iteration early once a file `stop` exists there.
        working_dir: current directory of the command.
        restore: checkpoint to start from; None: train from scratch.
    """

    folder: Path
    working_dir: Path
    restore: Path | None = None

    @property
    def log_file(self) -> Path:
        """Warnings of the trial."""
        return self.folder / "polopt.log"

    @property
    def stop_file(self) -> Path:
        """Request to end the current iteration."""
        return self.folder / "stop"

    def enter(self) -> logging.Handler:
        """Prepares the process of the trial, which may be on another node than the command; returns
        the handler that writes the log file."""
        if self.working_dir.is_dir():
            os.chdir(self.working_dir)
            if str(self.working_dir) not in sys.path:
                sys.path.insert(0, str(self.working_dir))
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.WARNING)
        logging.getLogger("polopt").addHandler(handler)
        return handler


def finish_despite_sigterm() -> None:
    """In an actor of Tune, ignores SIGTERM from now on.

    Ray sends it to actors that are still being stopped when the driver leaves. Its handler raises
    SystemExit, which inside `close` or `__del__` of an environment or an actor handle leaves them
    open and prints a traceback. The process ends after `cleanup` in any case.
    """
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if in_actor and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
