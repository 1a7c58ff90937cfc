"""`polopt train`: one experiment as a `tune.Tuner`."""

from __future__ import annotations

import errno
import logging
import math
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from rich.console import Console

from polopt.common.config import ConfigError
from polopt.dashboards.tensorboard import TensorBoardLayout
from polopt.metrics.diagnosis import diagnose
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.evaluation import name_on_command_line
from polopt.trainers.command_line.output import say, say_findings
from polopt.trainers.command_line.plan import Plan, ray_address
from polopt.trainers.command_line.progress import Progress
from polopt.trainers.command_line.ray_thread import RayThread
from polopt.trainers.command_line.signals import Stopped, StopSignals
from polopt.trainers.command_line.stopping import StopWhen
from polopt.trainers.presets import PRESETS
from polopt.trainers.restoring import BEST, find_checkpoint
from polopt.trainers.run_context import RunContext

#: Checkpoints that a run keeps, the newest ones.
_KEPT = 3
#: A disk with fewer free bytes counts as full.
_FULL_BYTES = 1 << 20


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


def run(planned: Plan, options: RunOptions, signals: StopSignals) -> str:
    """Trains until a limit is reached, a signal arrives, or something fails, and prints what there
    is then. Ray, if it was started here, has ended when this returns.

    Args:
        planned: the experiment.
        options: of the command line.
        signals: installed.

    Returns:
        what ended the run early; empty if nothing or a signal did.

    Raises:
        ConfigError: the results directory cannot be created.
    """
    if not options.verbose:
        _silence()
    folder = _new_folder(planned.name, options.results_dir)
    context = RunContext(folder, Path.cwd(), planned.restore)
    stop = StopWhen(planned.example.stop, context.stop_file)
    progress = Progress(Console(), _title(planned), planned.example.stop, context.log_file)
    experiment = planned.experiment
    names = {"--env": name_on_command_line(experiment.rollout.env)}
    network = getattr(getattr(experiment.policy, "model", None), "custom", None)
    if network is not None:
        names["--network"] = name_on_command_line(network)

    def report(error: str = "") -> None:
        say_findings(diagnose(progress.history.results()))
        _report(folder, names, bool(progress.num_results or error), stopped=bool(signals.number))

    def abandon() -> None:
        progress.close()
        report()

    signals.before_exit = abandon
    with progress:
        error = _fit(planned, options, context, (stop, progress), signals)
    signals.finish()
    context.stop_file.unlink(missing_ok=True)
    report(error)
    return "" if signals.number else error


def _fit(
    planned: Plan,
    options: RunOptions,
    context: RunContext,
    hooks: tuple[StopWhen, Progress],
    signals: StopSignals,
) -> str:
    """Runs the experiment; returns what ended it early, or an empty string."""
    stop, progress = hooks
    failure, folders = _TrialFailure(), [context.folder]

    def request() -> None:
        if not progress.num_results:
            signals.check()
        progress.stopping = "stopping with a checkpoint; a second signal stops at once"
        stop.request()

    def start() -> None:
        start_ray(planned, options.verbose)

    progress.say("starting Ray")
    try:
        # A Python config may have started Ray, and keeps it.
        with nullcontext() if ray.is_initialized() else RayThread(start, signals):
            progress.say("starting workers")
            with signals.during(request):
                results = _tuner(planned, options, context, (stop, progress, failure)).fit()
            return str(stop.error or "") or _error_of(results, folders)
    except Stopped:
        return ""
    except Exception as caught:  # a callback may raise anything; Tune, while it reads an error
        error = failure.error or f"{type(caught).__name__}: {caught}"
        return _with_full_disk(error, folders + failure.folders)


def _tuner(
    planned: Plan,
    options: RunOptions,
    context: RunContext,
    hooks: tuple[StopWhen, Progress, _TrialFailure],
) -> tune.Tuner:
    stop, *callbacks = hooks
    return tune.Tuner(
        tune.with_parameters(PRESETS[planned.example.run], run=context),
        param_space=planned.config,
        tune_config=tune.TuneConfig(trial_dirname_creator=_trial_name),
        run_config=tune.RunConfig(
            name=context.folder.name,
            storage_path=str(context.folder.parent),
            stop=stop,
            callbacks=[*callbacks, TensorBoardLayout(), *planned.example.callbacks],
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=_KEPT,
                checkpoint_frequency=options.checkpoint_every,
                checkpoint_at_end=True,
            ),
            sync_config=tune.SyncConfig(sync_artifacts=True),  # files of the trial, as `trace.json`
            verbose=0,
        ),
    )


class _TrialFailure(tune.Callback):
    """Remembers the error of a trial. Tune reads it from a file in the results, which is empty if
    the disk is full.

    Attributes:
        error: the last line of its traceback; empty if there is none.
        folders: where Tune writes files of the trial before it copies them to the results.
    """

    def __init__(self) -> None:
        self.error = ""
        self.folders: list[Path] = []

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial starts."""
        self.folders = [Path(trial.local_path)]

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial has failed."""
        self.error = _last_line(Path(trial.error_file).read_text())


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _with_full_disk(error: str, folders: Sequence[Path]) -> str:
    """Replaces the error of a write to a full disk, which has no path, by one that names those of
    the directories that are on a full disk; returns others unchanged."""
    for number in (errno.ENOSPC, errno.EDQUOT):
        if error.rstrip().endswith(f"[Errno {number}] {os.strerror(number)}"):
            full = [folder for folder in folders if shutil.disk_usage(folder).free < _FULL_BYTES]
            return f"{os.strerror(number)}: {', '.join(map(str, full or folders))}"
    return error


def _trial_name(trial: Any) -> str:
    return f"{trial.trainable_name}_{trial.trial_id}"


def _new_folder(experiment: str, results_dir: Path) -> Path:
    name = f"{experiment}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
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


def _report(folder: Path, names: Mapping[str, str | None], exists: bool, stopped: bool) -> None:
    """Prints what a run has left in its folder; if nothing exists, removes the folder.

    Args:
        folder: of the run.
        names: see `_next_step`.
        exists: whether it has a result.
        stopped: by a signal.
    """
    checkpoint = None
    if exists:
        trials = [path for path in folder.iterdir() if path.is_dir()]
        say(f"results     {trials[0] if trials else folder}")
        with suppress(CheckpointError):  # there is none
            checkpoint = find_checkpoint(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if checkpoint is not None:
        say(f"checkpoint  {checkpoint}")
        best = _best_of(folder)
        if best is not None and best != checkpoint:
            say(f"best        {best}")
        say(_next_step(best or checkpoint, names))
    elif stopped:
        say(f"stopped{'' if exists else ' before the first result'}; nothing was saved")


def _best_of(folder: Path) -> Path | None:
    """The checkpoint of the best evaluation; None: nothing was evaluated."""
    return next((path.parent for path in folder.glob(f"*/{BEST}/manifest.json")), None)


def _next_step(checkpoint: Path, names: Mapping[str, str | None]) -> str:
    """Returns the command that evaluates a checkpoint, runnable in the current directory.

    Args:
        checkpoint: its directory.
        names: by option, the name of what a checkpoint cannot hold; empty: it is not needed, None:
            there is none.
    """
    command = [*_program(), "evaluate", str(checkpoint)]
    for option, name in names.items():
        if name is None:
            return f"next        polopt evaluate needs {option}: the one of this run is local"
        command += [option, name] if name else []
    return f"next        {shlex.join(command)}"


def _program() -> list[str]:
    """Returns how this command was started."""
    script = Path(sys.argv[0])
    if script.name == "polopt":
        return ["polopt"] if shutil.which("polopt") else [str(script.absolute())]
    return [sys.executable, "-m", "polopt.trainers.command_line.cli"]


def _error_of(results: tune.ResultGrid, folders: Sequence[Path]) -> str:
    """Returns the last line of the trial's traceback and the file that holds all of it."""
    if not results.errors:
        return ""
    last = _last_line(str(results.errors[0])) or type(results.errors[0]).__name__
    traceback = f"(traceback: {Path(results[0].path, 'error.txt')})"
    return f"{_with_full_disk(last, folders)} {traceback}"


def start_ray(planned: Plan, verbose: bool = False) -> None:
    """Starts Ray here, also where a cluster is running, or attaches to the one that `RAY_ADDRESS`
    names.

    Ray started here has at least as many logical CPUs as the trial reserves: on a small machine
    processes share CPUs instead of waiting for CPUs that never come.
    """
    experiment = planned.experiment
    workers = experiment.num_remote_workers * experiment.rollout.num_cpus_per_worker
    needed = experiment.trainer.num_cpus_for_driver + workers
    num_cpus = max(os.cpu_count() or 1, math.ceil(needed))
    here: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False}
    folder = planned.folder
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
    ray.init(**options)


def _silence() -> None:
    """Hides messages of Ray about itself."""
    warnings.filterwarnings("ignore", module=r"(ray|tensorboardX)(\..*)?")
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def _title(planned: Plan) -> str:
    env = planned.experiment.rollout.env
    named = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    return f"{planned.name}: {planned.example.run} on {named}"
