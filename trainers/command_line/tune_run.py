"""`polopt train`: one experiment as a `tune.Tuner`."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from rich.console import Console

from polopt.common.config import ConfigError
from polopt.dashboards.tensorboard import TensorBoardLayout
from polopt.rollouts.ray_session import attach_or_start
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.examples import Example
from polopt.trainers.command_line.plan import Plan, ray_address
from polopt.trainers.command_line.processes import Process, descendants, kill_remaining
from polopt.trainers.command_line.progress import Progress
from polopt.trainers.command_line.signals import Stopped, StopSignals
from polopt.trainers.command_line.stopping import StopWhen
from polopt.trainers.presets import PRESETS
from polopt.trainers.restoring import find_checkpoint
from polopt.trainers.run_context import RunContext

#: Checkpoints that a run keeps, the newest ones.
_KEPT = 3


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line besides the experiment.

    Attributes:
        results_dir: directory of results and checkpoints.
        checkpoint_every: iterations between checkpoints; 0: only at the end.
        verbose: show the output of Ray and of the workers.
    """

    results_dir: Path
    checkpoint_every: int = 20
    verbose: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        results: directory of the trial; None if there is no result.
        checkpoint: the newest complete one; None if there is none.
        error: what ended the run early; empty if nothing did.
    """

    results: Path | None
    checkpoint: Path | None
    error: str = ""


def run(
    planned: Plan,
    options: RunOptions,
    console: Console,
    signals: StopSignals,
    report: Callable[[Outcome], None],
) -> Outcome:
    """Trains until a limit is reached, a signal arrives, or something fails. Ray, if it was started
    here, has ended when this returns.

    Args:
        planned: the experiment.
        options: of the command line.
        console: of standard output.
        signals: installed.
        report: called once, at the end, in another thread if the run does not end in time.

    Raises:
        ConfigError: the results directory cannot be created.
    """
    if not options.verbose:
        _silence()
    folder = _new_folder(planned.example, options.results_dir)
    context = RunContext(folder, Path.cwd(), planned.restore)
    stop = StopWhen(planned.example.stop, context.stop_file)
    with Progress(console, _title(planned), planned.example.stop, context.log_file) as progress:

        def abandon() -> None:
            progress.close()
            report(_outcome(folder, progress.num_results, ""))

        signals.before_exit = abandon
        error = _fit(planned, options, context, (stop, progress), signals)
    signals.finish()
    context.stop_file.unlink(missing_ok=True)
    outcome = _outcome(folder, progress.num_results, "" if signals.number else error)
    report(outcome)
    return outcome


def _fit(
    planned: Plan,
    options: RunOptions,
    context: RunContext,
    hooks: tuple[StopWhen, Progress],
    signals: StopSignals,
) -> str:
    """Runs the experiment; returns what ended it early, or an empty string."""
    stop, progress = hooks

    def request() -> None:
        if not progress.num_results:
            signals.end_now()
        progress.stopping = "stopping with a checkpoint; a second signal stops at once"
        stop.request()

    try:
        progress.say("starting Ray")
        with _ray_for(planned, options.verbose, signals), signals.during(request):
            progress.say("starting workers")
            results = _tuner(planned, options, context, hooks).fit()
            return str(stop.error or "") or _error_of(results)
    except Stopped:
        return ""  # `signals.number` is set
    except Exception as caught:  # a callback or a full disk may raise anything
        return f"{type(caught).__name__}: {caught}"


def _tuner(
    planned: Plan, options: RunOptions, context: RunContext, hooks: tuple[StopWhen, Progress]
) -> tune.Tuner:
    stop, progress = hooks
    return tune.Tuner(
        tune.with_parameters(PRESETS[planned.example.run], run=context),
        param_space=planned.config,
        tune_config=tune.TuneConfig(trial_dirname_creator=_trial_name),
        run_config=tune.RunConfig(
            name=context.folder.name,
            storage_path=str(context.folder.parent),
            stop=stop,
            callbacks=[progress, TensorBoardLayout(), *planned.example.callbacks],
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=_KEPT,
                checkpoint_frequency=options.checkpoint_every,
                checkpoint_at_end=True,
            ),
            sync_config=tune.SyncConfig(sync_artifacts=True),  # files of the trial, as `trace.json`
            verbose=0,
        ),
    )


def _trial_name(trial: Any) -> str:
    return f"{trial.trainable_name}_{trial.trial_id}"


def _new_folder(example: Example, results_dir: Path) -> Path:
    name = f"{example.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    folder = results_dir.expanduser().resolve() / name
    try:
        for number in range(1, 1000):  # runs that start in the same second
            if not folder.exists():
                break
            folder = folder.with_name(f"{name}_{number}")
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--results-dir {results_dir}: {error.strerror or error}") from None
    return folder


def _outcome(folder: Path, num_results: int, error: str) -> Outcome:
    if not num_results and not error:
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(None, None)
    trials = [path for path in folder.iterdir() if path.is_dir()]
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError:
        checkpoint = None
    return Outcome(trials[0] if trials else folder, checkpoint, error)


def _error_of(results: tune.ResultGrid) -> str:
    """Returns the last line of the trial's traceback and the file that holds all of it."""
    if not results.errors:
        return ""
    lines = [line.strip() for line in str(results.errors[0]).splitlines() if line.strip()]
    last = lines[-1] if lines else type(results.errors[0]).__name__
    return f"{last} (traceback: {Path(results[0].path, 'error.txt')})"


@contextmanager
def _ray_for(planned: Plan, verbose: bool, signals: StopSignals) -> Iterator[None]:
    """Ray for the time of the run; one that a Python config has started is used and left."""
    if ray.is_initialized():
        yield
        return
    before = descendants()
    try:
        with signals.during(lambda: None), signals.inherited_block():
            start_ray(planned, verbose)
        signals.install()  # ray.init replaces the handler of SIGTERM
        yield
    finally:
        started = descendants() - before
        signals.before_exit = _then_kill(started, signals.before_exit)
        ray.shutdown()
        kill_remaining(started, within_s=1.0)


def _then_kill(processes: set[Process], first: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        kill_remaining(processes, within_s=0.0)

    return both


def start_ray(planned: Plan, verbose: bool = False) -> None:
    """Starts Ray here, also where a cluster is running, or attaches to the one that `RAY_ADDRESS`
    names.

    Ray started here has at least as many logical CPUs as the trial reserves: on a small machine
    processes share CPUs instead of waiting for CPUs that never come.
    """
    trainer, rollout = planned.experiment.trainer, planned.experiment.rollout
    places = rollout.num_workers * (1 + rollout.num_workers_below)
    needed = trainer.num_cpus_for_driver + places * rollout.num_cpus_per_worker
    num_cpus = max(os.cpu_count() or 1, math.ceil(needed))
    here: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False}
    folder = planned.example.folder
    environment: dict[str, Any] | None = None
    if folder not in (None, Path.cwd()):  # Ray adds the current directory by itself
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    options = {
        "address": ray_address(),
        **(here if ray_address() == "local" else {}),
        "runtime_env": environment,
        "log_to_driver": verbose,
        "logging_level": logging.INFO if verbose else logging.CRITICAL,
    }
    attach_or_start(num_cpus, options)


def _silence() -> None:
    """Hides messages of Ray about itself."""
    warnings.filterwarnings("ignore", module=r"(ray|tensorboardX)(\..*)?")
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _title(planned: Plan) -> str:
    env = planned.experiment.rollout.env
    named = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    return f"{planned.example.name}: {planned.example.run} on {named}"
