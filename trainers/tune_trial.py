"""What a trainer has to do with a trial of Tune: resources, storage, the current directory, the log
file, and SIGTERM."""

from __future__ import annotations

import copy
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
from pyarrow import fs
from ray import tune

from polopt.common.ray_names import CHDIR_VARIABLE, storage_of
from polopt.trainers.experiment import Experiment


def bundles(experiment: Experiment) -> tune.PlacementGroupFactory:
    """Returns the placement group of a trial. It has one bundle for the driver, and one for each
    other process that the run needs to start. These processes are `workers_needed` workers, the
    `num_workers_below` rollout workers of each of them, the processes that the optimizer starts,
    and the evaluation workers. A process that reserves no resources has no bundle. If no process
    reserves resources, the only bundle has 0.001 CPUs."""
    driver, rollout = experiment.trainer, experiment.rollout
    head = {"CPU": driver.num_cpus_for_driver, "GPU": driver.num_gpus}
    worker = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": rollout.memory_per_worker,
        **rollout.custom_resources_per_worker,
    }
    without_gpu = {**worker, "GPU": 0.0}  # for rollout workers below a worker, and evaluation
    places = rollout.workers_needed
    sampling = [without_gpu] * (places * rollout.num_workers_below)
    evaluation = [without_gpu] * driver.evaluation_num_workers
    nonzero = [
        {key: amount for key, amount in bundle.items() if amount}
        for bundle in [
            head,
            *[worker] * places,
            *sampling,
            *experiment.further_processes,
            *evaluation,
        ]
    ]
    if not any(nonzero):
        nonzero = [{"CPU": 0.001}]  # Tune rejects an empty request
    return tune.PlacementGroupFactory([nonzero[0], *(b for b in nonzero[1:] if b)])


def next_checkpoint(trainable: tune.Trainable) -> Path | None:
    """Returns the directory in Tune's storage to which Tune will copy the next checkpoint. Returns
    None without Tune."""
    storage = storage_of(trainable)
    if storage is None:
        return None
    ahead = copy.copy(storage)
    ahead.current_checkpoint_index += 1
    return Path(ahead.checkpoint_fs_path)


def following(logdir: str) -> Path:
    """Returns the directory in `logdir` for the next checkpoint of a trainer without Tune. Its name
    has the same form as under Tune, with a larger number than the existing checkpoints."""
    found = Path(logdir).glob(f"checkpoint_{'[0-9]' * 6}")
    last = max((int(path.name[-6:]) for path in found), default=-1)
    return Path(logdir, f"checkpoint_{last + 1:06}")


def results_folder(storage: Any, logdir: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a run's results, and the directory of the results in this file
    system.

    Args:
        storage: Tune's `StorageContext` of the trial. Its directory may be in cloud storage. `None`
            means that the trainer runs without Tune.
        logdir: directory of the trainable. Without Tune, this is the directory of the results.
    """
    if storage is None:
        return fs.LocalFileSystem(), logdir
    return storage.storage_filesystem, storage.trial_fs_path


@dataclass(frozen=True)
class RunContext:
    """Arguments that the command line passes to its trial in addition to the config.

    Attributes:
        folder: directory of the experiment. The trainer appends its warnings to the file
            `polopt.log` in this directory. The trainer ends the current iteration early if the
            directory contains a file `stop`.
        working_dir: current directory of the command.
        restore: checkpoint from which training starts. `None` means that training starts from
            scratch.
    """

    folder: Path
    working_dir: Path
    restore: Path | None = None

    @property
    def log_file(self) -> Path:
        """File with the warnings of the trial."""
        return self.folder / "polopt.log"

    @property
    def stop_file(self) -> Path:
        """File whose existence requests the end of the current iteration."""
        return self.folder / "stop"

    def enter(self) -> logging.Handler:
        """Sets the current directory, the import path and the logging of the trial's process. This
        process may run on another node than the command. If `working_dir` does not exist on this
        node, only the logging is set. Returns the handler that writes the log file."""
        if self.working_dir.is_dir():
            os.chdir(self.working_dir)
            if str(self.working_dir) not in sys.path:
                sys.path.insert(0, str(self.working_dir))
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.WARNING)
        logging.getLogger("polopt").addHandler(handler)
        return handler


def directory_before_tune(storage: Any) -> str | None:
    """Returns the current directory if Tune is about to change it to the directory of the trial.
    Returns None if Tune will not change it. Tune changes the directory only in the process of the
    trial, and not in workers.

    Args:
        storage: Tune's `StorageContext` of the trial. `None` means that the trainer runs without
            Tune.
    """
    changes = storage is not None and os.environ.get(CHDIR_VARIABLE, "1") != "0"
    return os.getcwd() if changes else None


@contextmanager
def in_directory(folder: str | None) -> Iterator[None]:
    """Makes `folder` the current directory inside the block. `None` means that the directory is not
    changed.

    Environments, networks and callbacks are made in the user's directory, which
    `directory_before_tune` returns. A relative path then means the same in the trial's process as
    in workers.
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
    """Adds a hint to an error inside the block if the error reports a missing relative path. The
    hint is added only if this path or its folder exists in the user's directory. The path was then
    looked up in the trial's directory by mistake.

    Args:
        users: the return value of `directory_before_tune`.
    """
    try:
        yield
    except Exception as error:
        path = _missing(error, users) if users is not None else None
        if path is not None:
            hint = (
                f"{path!r} was looked up in the directory of the trial instead of {users}, because "
                "Tune has changed the current directory. Give an absolute path, or set the "
                f"environment variable {CHDIR_VARIABLE}=0"
            )
            if isinstance(error, OSError):
                error.strerror = f"{error.strerror}. {hint}"
            elif error.args:
                error.args = (f"{error.args[0]}. {hint}", *error.args[1:])
        raise


def _missing(error: Exception, users: str) -> str | None:
    """Returns the relative path that an error reports as missing, if this path or its folder exists
    in the user's directory. Returns None for other errors.

    This function searches the text of the error for the path, because errors of environments and
    callbacks contain the original error only as text.
    """
    for path in re.findall(re.escape(os.strerror(errno.ENOENT)) + ": '([^/'][^']*)'", str(error)):
        if any(os.path.exists(Path(users, one)) for one in (path, os.path.dirname(path)) if one):
            return str(path)
    return None


def finish_despite_sigterm() -> None:
    """Makes this process ignore SIGTERM if this process is a Ray actor.

    When the driver exits, Ray sends SIGTERM to actors that are still stopping. Ray's handler raises
    SystemExit. If this happened inside `close` or `__del__`, environments or actor handles would
    stay open, and a traceback would be printed. Ignoring SIGTERM is safe here, because the process
    ends after `cleanup` in any case.
    """
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if in_actor and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
