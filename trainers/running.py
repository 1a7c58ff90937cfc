"""One experiment in the command's own process: shown while it runs, written down as Tune does it,
and ended with a checkpoint."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from polopt.trainers.config import Experiment
from polopt.trainers.examples import Example
from polopt.trainers.planning import Plan
from polopt.trainers.progress import STARTING_RAY, Progress
from polopt.trainers.result_files import ResultFiles, Tally
from polopt.trainers.stopping import OnInterrupt
from polopt.trainers.training import Training

#: Imported by each process that Ray starts, before there is anything for it to do.
PRELOADED = ["polopt.rollouts.workers.rollout_worker"]
#: Checkpoints of one run, the newest ones.
KEPT = 3


@dataclass(frozen=True)
class RunOptions:
    """What the command line says besides the experiment.

    Attributes:
        results_dir: where results and checkpoints go.
        checkpoint_every: iterations between checkpoints; 0: only at the end.
        verbose: show what Ray and workers print.
    """

    results_dir: Path
    checkpoint_every: int = 0
    verbose: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        results: directory of its results; None if it did not come to any.
        checkpoint: the last; None if there is none.
        interrupted: by Ctrl-C.
        error: what ended it early; empty if nothing did.
    """

    results: Path | None
    checkpoint: Path | None
    interrupted: bool
    error: str = ""


def run(planned: Plan, options: RunOptions, console: Console) -> Outcome:
    """Trains until a limit is reached, Ctrl-C is pressed, or something fails. Whichever it is,
    workers and the Ray that was started here have ended by then."""
    stop = planned.stop
    if not options.verbose:
        _quiet()
    with Progress(console, _title(planned)) as progress:

        def interrupt() -> None:
            stop.interrupt()
            begun = progress.state != STARTING_RAY
            when = " after this iteration, with a checkpoint" if begun else ""
            progress.say(f"stopping{when}; Ctrl-C again: at once")

        outcome = Outcome(None, None, interrupted=True)
        with OnInterrupt(interrupt):
            try:
                with _ray_for(planned.experiment, options.verbose):
                    # Who did not want to wait for Ray does not want to wait for workers.
                    if not stop.interrupted:
                        outcome = _train(planned, options, progress)
            except KeyboardInterrupt:  # the second, while Ray was started or ended
                stop.interrupt()
        return outcome


def _train(planned: Plan, options: RunOptions, progress: Progress) -> Outcome:
    """The run itself, in a folder of its own."""
    progress.say("starting workers")
    stop = planned.stop
    trial_id = f"{secrets.token_hex(3)[:5]}_00000"  # of the form that Tune's have
    folder = _new_folder(planned.example, options.results_dir, trial_id)
    checkpoints = _Checkpoints(folder)
    error = ""
    try:
        with (
            ResultFiles(folder, planned.config) as files,
            Training(planned.experiment, planned.example.run, planned.worker_config) as training,
        ):
            if planned.restore is not None:
                training.load(planned.restore)
            for result in _iterations(training, Tally(trial_id, planned.config)):
                result["done"] = done = stop(result)
                every = options.checkpoint_every
                due = done or (every and result["training_iteration"] % every == 0)
                result["checkpoint_dir_name"] = checkpoints.save(training) if due else None
                files.write(result)
                progress.show(result)
                if done:
                    break
    except KeyboardInterrupt:  # the second: at once
        stop.interrupt()
    except Exception:  # whatever an environment, a worker or a disk comes up with
        error = _write_error(folder)
    return Outcome(folder, checkpoints.newest, stop.interrupted, error)


def _iterations(training: Training, tally: Tally) -> Iterator[dict[str, Any]]:
    """Results, one for each iteration, without end."""
    while True:
        started_s = time.perf_counter()
        result = training.step()
        yield tally.complete(result, time.perf_counter() - started_s)


class _Checkpoints:
    """Those of one run, under the names that Tune gives them; only the newest stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: list[Path] = []
        self._number = 0

    @property
    def newest(self) -> Path | None:
        return self._saved[-1] if self._saved else None

    def save(self, training: Training) -> str:
        """Writes one, and removes the oldest when there are too many; its name."""
        path = self._folder / f"checkpoint_{self._number:06d}"
        training.save(path)
        self._number += 1
        self._saved.append(path)
        while len(self._saved) > KEPT:
            # Somebody may have been there before; it is not worth a run.
            shutil.rmtree(self._saved.pop(0), ignore_errors=True)
        return path.name


def _new_folder(example: Example, results_dir: Path, trial_id: str) -> Path:
    name = f"{example.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    folder = results_dir.expanduser().resolve() / name / f"{example.run}_{trial_id}"
    folder.mkdir(parents=True)
    return folder


def _write_error(folder: Path) -> str:
    """Of the exception that is handled: the traceback to a file, its last line to the user."""
    text = traceback.format_exc()
    path = folder / "error.txt"
    last = [line.strip() for line in text.splitlines() if line.strip()][-1]
    try:
        path.write_text(text)
    except OSError as error:  # a full disk may be what ended the run
        return f"{last} (the traceback could not be written: {error})"
    return f"{last} (traceback: {path})"


@contextmanager
def _ray_for(experiment: Experiment, verbose: bool) -> Iterator[None]:
    """Ray, while workers need it; without workers nothing does, and a config that is a program may
    have started it."""
    if experiment.rollout.num_workers == 0 or ray.is_initialized():
        yield
        return
    try:
        start_ray(experiment, verbose)
        yield
    finally:
        ray.shutdown()


def start_ray(experiment: Experiment, verbose: bool = False) -> None:
    """Starts Ray here, or attaches to the cluster that `RAY_ADDRESS` names.

    Logical CPUs are as many as the workers need, if that is more than there are: on a small machine
    they take turns instead of waiting for ever for CPUs that do not come. The learner is in this
    process, and asks Ray for none.
    """
    rollout = experiment.rollout
    places = rollout.num_workers * (1 + rollout.num_workers_below)
    cores = os.cpu_count() or 1
    num_cpus = max(cores, math.ceil(places * rollout.num_cpus_per_worker))
    here: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "_system_config": {
            "preload_python_modules": PRELOADED,
            # Ray starts a process for each CPU ahead, which is too many where few are needed; the
            # first option has it do so with its node, not once a driver has come.
            "enable_worker_prestart": num_cpus <= 2 * places,
            "prestart_worker_first_driver": False,
            # All of them at once, but not so many that one takes a minute and is given up.
            "worker_maximum_startup_concurrency": max(cores, min(places, 4 * cores)),
            # Else those that wait for their actor are ended again.
            "num_workers_soft_limit": places,
            # Ray's patience of 10 s in finer steps: the raylet may ask its object store too early.
            "raylet_client_connect_timeout_milliseconds": 50,
            "raylet_client_num_connect_attempts": 200,
        },
    }
    ray.init(
        **({} if "RAY_ADDRESS" in os.environ else here),
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
    )


def _quiet() -> None:
    """Ray talks about itself; what matters to the user is shown otherwise."""
    warnings.filterwarnings("ignore", module=r"(ray|tensorboardX)(\..*)?")
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _title(planned: Plan) -> str:
    env = planned.experiment.rollout.env
    named = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    return f"{planned.example.name}: {planned.example.run} on {named}"
