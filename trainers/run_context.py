"""The process of a trial: what the command line passes to it, and how it ends."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train.constants import RAY_CHDIR_TO_TRIAL_DIR


@dataclass(frozen=True)
class RunContext:
    """Arguments that the command line passes to its trial besides the config.

    Attributes:
        folder: directory of the experiment. The trainer appends its warnings to `polopt.log`
            there, and ends the current iteration early once a file `stop` exists there.
        working_dir: current directory of the command.
        restore: checkpoint with which training starts. None: train from scratch.
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
        """Prepares the process of the trial, which may be on another node than the command. Returns
        the handler that writes the log file."""
        if self.working_dir.is_dir():
            os.chdir(self.working_dir)
            if str(self.working_dir) not in sys.path:
                sys.path.insert(0, str(self.working_dir))
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.WARNING)
        logging.getLogger("polopt").addHandler(handler)
        return handler


def directory_before_tune(storage: Any) -> str | None:
    """The current directory, if Tune is about to change it to the directory of a trial, in this
    process only: workers stay in it. None if Tune leaves it as it is.

    Args:
        storage: Tune's `StorageContext` of the trial. None without Tune.
    """
    changes = storage is not None and os.environ.get(RAY_CHDIR_TO_TRIAL_DIR, "1") != "0"
    return os.getcwd() if changes else None


@contextmanager
def in_directory(folder: str | None) -> Iterator[None]:
    """Runs a block in a directory. None: where it is.

    Environments, networks and callbacks are made in the user's directory, so that a relative path
    means the same in the trial's process as in workers.
    """
    before = os.getcwd() if folder is not None else None
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        if before is not None:
            os.chdir(before)


@contextmanager
def explain_missing_file(users: str | None) -> Iterator[None]:
    """Adds to the error of a block that a path exists in the user's directory and was looked for in
    the trial's.

    Args:
        users: what `directory_before_tune` has returned.
    """
    try:
        yield
    except Exception as error:
        path = _missing(error, users) if users is not None else None
        if path is not None:
            hint = (
                f"{path!r} exists in {users}, and was looked for in the directory of the trial, to "
                "which Tune has changed. Give an absolute path, or set the environment variable "
                f"{RAY_CHDIR_TO_TRIAL_DIR}=0"
            )
            if isinstance(error, OSError):
                error.strerror = f"{error.strerror}. {hint}"
            elif error.args:
                error.args = (f"{error.args[0]}. {hint}", *error.args[1:])
        raise


def _missing(error: Exception, users: str) -> str | None:
    """The relative path that an error says was not found although it, or its folder, is in the
    user's directory. None for other errors. Errors of environments and callbacks hold the traceback
    of the original error as text."""
    for path in re.findall(re.escape(os.strerror(errno.ENOENT)) + ": '([^/'][^']*)'", str(error)):
        if any(os.path.exists(Path(users, one)) for one in (path, os.path.dirname(path)) if one):
            return str(path)
    return None


def finish_despite_sigterm() -> None:
    """In an actor of Tune, makes this process ignore SIGTERM.

    Ray sends SIGTERM to actors that are still being stopped when the driver leaves. Its handler
    raises SystemExit. Inside `close` or `__del__` of an environment or an actor handle, that would
    leave them open and print a traceback. The process ends after `cleanup` in any case.
    """
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if in_actor and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
