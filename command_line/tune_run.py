"""`polopt train`: runs one experiment with a `tune.Tuner`."""

from __future__ import annotations

import errno
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from rich.console import Console

from polopt.command_line.names import name_on_command_line
from polopt.command_line.output import say, say_findings
from polopt.command_line.plan import Plan, ray_address
from polopt.command_line.progress_table import Progress, SweepTrial
from polopt.command_line.ray_thread import ray_running
from polopt.command_line.signals import Stopped, StopSignals
from polopt.common.add_ons import add_ons
from polopt.common.config import ConfigError
from polopt.common.plain_data import argument_for, encode
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.envs.env_sources import env_name
from polopt.rollouts.ray_session import warn_if_crowded
from polopt.trainers.checkpoint_fields import unsaved_in
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import Experiment, doubtful
from polopt.trainers.find_checkpoint import BEST, find_checkpoint
from polopt.trainers.result_files import ResultTable, TensorBoardEvents
from polopt.trainers.stop_when import StopWhen
from polopt.trainers.tune_trial import RunContext

#: Number of checkpoints that each trial keeps. Older checkpoints are deleted.
_KEPT = 3
#: The reason that is shown if neither a limit nor a signal ended the run.
_ENDED_ITSELF = "the trial ended itself: its last result has done=True, which a callback may set"
#: A disk with fewer free bytes counts as full.
_FULL_BYTES = 1 << 20
#: The largest number of lines with returns of a sweep.
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Search:
    """Trials that are chosen while the experiment runs.

    Attributes:
        algorithm: chooses the options in which a trial differs from the config of the experiment.
        callback: a callback of Tune, which is called before all others.
        folder: directory of the experiment. It may hold trials of an earlier process.
        most_trials: the largest number of trials.
        report: prints the outcome at the end.
    """

    algorithm: Searcher
    callback: tune.Callback
    folder: Path
    most_trials: int
    report: Callable[[], None]


def run(
    planned: Plan,
    results_dir: Path,
    signals: StopSignals,
    checkpoint_every: int = 20,
    verbose: bool = False,
    search: Search | None = None,
) -> str:
    """Trains until a result reaches a limit, the trial ends itself, a signal arrives, or an error
    occurs. Then prints the directories of the results and checkpoints. If this function started
    Ray, it also ends Ray.

    Args:
        planned: the experiment.
        results_dir: directory of results and checkpoints.
        signals: the signal handlers, which are already installed.
        checkpoint_every: number of iterations between two checkpoints. With 0, a checkpoint is
            saved only at the end.
        verbose: whether to show the output of Ray and of the workers.
        search: chooses the trials of a sweep. `None` means the grids, distributions and seeds of
            the experiment.

    Returns:
        the error that ended the run early, or an empty string. The string is also empty if a signal
        ended the run.

    Raises:
        ConfigError: the results directory cannot be created.
    """
    if not verbose:  # hides Ray's own messages
        warnings.filterwarnings("ignore", module=r"(ray|tensorboardX)(\..*)?")
        logging.getLogger("ray").setLevel(logging.CRITICAL)
    folder = new_folder(planned.name, results_dir) if search is None else search.folder
    context = RunContext(folder, Path.cwd(), planned.restore)
    limits = planned.example.stop
    stop, failure = StopWhen(limits, context.stop_file), _TrialFailure(folder)
    is_sweep = planned.is_sweep or search is not None
    what = "several trials" if is_sweep else planned.example.run
    title = f"{planned.name}: {what} on {env_name(planned.experiment.rollout.env)}"
    progress = Progress(Console(), title, limits, context.log_file, is_sweep)
    of_add_ons = [callback for add_on in add_ons() for callback in add_on.tune_callbacks()]
    config = tune.RunConfig(
        name=folder.name,
        storage_path=str(folder.parent),
        stop=_SweepStopper(stop, progress) if is_sweep else stop,
        callbacks=[
            *([] if search is None else [search.callback]),
            progress,
            failure,
            *of_add_ons,
            ResultTable(),
            TensorBoardEvents(),
            *planned.example.callbacks,
        ],
        checkpoint_config=tune.CheckpointConfig(
            num_to_keep=_KEPT, checkpoint_frequency=checkpoint_every, checkpoint_at_end=True
        ),
        sync_config=tune.SyncConfig(sync_artifacts=True),  # copies files such as `trace.json`
        verbose=0,
    )

    def request() -> None:
        if not progress.num_results:
            signals.check()
        progress.stopping = "saving a checkpoint and stopping; a second signal stops at once"
        stop.request()

    def fit() -> str:
        """Returns the error that ended the experiment early, or an empty string."""
        progress.say("starting Ray")
        start = partial(start_ray, planned, verbose)
        # If a Python config has already started Ray, this Ray is used, and is not ended here.
        with nullcontext() if ray.is_initialized() else ray_running(start, signals):
            progress.say("starting workers")
            tuner = tune.Tuner(
                tune.with_parameters(planned.preset, run=context),
                param_space=planned.config,
                tune_config=tune.TuneConfig(
                    num_samples=planned.example.num_samples
                    if search is None
                    else search.most_trials,
                    # For each of the `num_samples` samples, values of distributions are drawn once.
                    # All seeds and all points of a grid use these values.
                    search_alg=BasicVariantGenerator(constant_grid_search=True)
                    if search is None
                    else search.algorithm,
                    # Without a limit, Tune would start one trial of a search algorithm at a time.
                    max_concurrent_trials=None if search is None else search.most_trials,
                    trial_dirname_creator=lambda trial: f"{trial.trainable_name}_{trial.trial_id}",
                ),
                run_config=config,
            )
            with signals.during(request):
                results = tuner.fit()
            return str(stop.error or "") or failure.text_of(results)

    def report(error: str = "") -> None:
        progress.close()
        if is_sweep:
            if signals.number:
                say(f"ended       {_signal_name(signals)}")
            if search is not None:
                search.report()
            else:
                _report_sweep(folder, progress, bool(error))
            return
        say_findings(progress.findings())
        exists, stopped = bool(progress.num_results or error), bool(signals.number)
        if progress.num_results and (stopped or not error):
            # The signal is shown even if `stop.reason` is set, because the result after the signal
            # may also reach a limit.
            reason = _signal_name(signals) or stop.reason or progress.stop_reason
            say(f"ended       {reason or _ENDED_ITSELF}")
        _report(folder, planned.experiment, exists, stopped)

    for text in dict.fromkeys(t for one in planned.experiments for t in doubtful(one)):
        say(f"warning     {text}")
    error = ""
    signals.before_exit = report
    with progress, suppress(Stopped):
        try:
            error = fit()
        except Exception as caught:  # from a callback, or from Tune while Tune reads an error
            error = failure.with_full_disk(failure.error or f"{type(caught).__name__}: {caught}")
    signals.finish()
    context.stop_file.unlink(missing_ok=True)
    report(error)
    return "" if signals.number else error


class _SweepStopper(tune.Stopper):
    """Ends each trial of a sweep when the trial reaches a limit. After a request to stop, ends the
    sweep as soon as all running trials have saved their checkpoints.

    Args:
        stop: the limits.
        progress: used to find the running trials.
    """

    def __init__(self, stop: StopWhen, progress: Progress) -> None:
        self._stop, self._progress = stop, progress
        self._awaited: list[SweepTrial] | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self._stop(trial_id, result)

    def stop_all(self) -> bool:
        """Returns whether the sweep ends now. Tune calls this method several times a second."""
        if not self._stop.is_requested:
            return False
        if self._awaited is None:
            self._awaited = [trial for trial in self._progress.trials.values() if trial.is_running]
        return not any(trial.is_running for trial in self._awaited)


def _signal_name(signals: StopSignals) -> str:
    return signal.Signals(signals.number).name if signals.number else ""


class _TrialFailure(tune.Callback):
    """Keeps the error of a failed trial. Tune itself reads this error from a file in the results.
    If the disk is full, this file is empty.

    Args:
        folder: directory of the results.

    Attributes:
        error: the last line of the failed trial's traceback. It is empty if no trial has failed.
    """

    def __init__(self, folder: Path) -> None:
        self.error = ""
        self._folders = [folder]

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the local directory of a trial. Tune calls this method when the trial starts."""
        # Tune writes the files of the trial to this directory, and then copies them to the results.
        self._folders = [self._folders[0], Path(trial.local_path)]

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the error of a trial. Tune calls this method when the trial has failed."""
        self.error = _last_line(Path(trial.error_file).read_text())

    def text_of(self, results: tune.ResultGrid) -> str:
        """Returns the last line of a failed trial's traceback, and the file with the whole
        traceback. Returns an empty string if no trial has failed."""
        if not results.errors:
            return ""
        last = _last_line(str(results.errors[0])) or type(results.errors[0]).__name__
        failed = next(one for one in map(results.__getitem__, range(len(results))) if one.error)
        traceback = f"(traceback: {Path(failed.path, 'error.txt')})"
        several = f"{len(results.errors)} of {len(results)} trials failed. One of them: "
        return f"{several * (len(results) > 1)}{self.with_full_disk(last)} {traceback}"

    def with_full_disk(self, error: str) -> str:
        """If an error says that a disk is full, returns its message with the directories on this
        disk. The error itself has no path. Returns other errors unchanged."""
        for number in (errno.ENOSPC, errno.EDQUOT):
            if error.rstrip().endswith(f"[Errno {number}] {os.strerror(number)}"):
                full = [f for f in self._folders if shutil.disk_usage(f).free < _FULL_BYTES]
                return f"{os.strerror(number)}: {', '.join(map(str, full or self._folders))}"
        return error


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def new_folder(experiment: str, results_dir: Path) -> Path:
    """Creates a directory for an experiment, whose name has the time.

    Raises:
        ConfigError: the directory cannot be created.
    """
    name = f"{experiment}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    folder = results_dir.expanduser().resolve() / name
    try:
        while folder.exists():  # another run has started in the same second
            folder = folder.with_name(f"{folder.name}_1")
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--results-dir {results_dir}: {error.strerror or error}") from None
    return folder


def _report(folder: Path, experiment: Experiment, exists: bool, stopped: bool) -> None:
    """Prints the paths of the results and checkpoints in the folder of a run. If `exists` is False,
    the run has ended without a result and without an error, and this function removes the folder.
    """
    checkpoint = None
    if exists:
        say(f"results     {next(filter(Path.is_dir, folder.iterdir()), folder)}")
        with suppress(CheckpointError):  # the run has not saved a checkpoint
            checkpoint = find_checkpoint(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if checkpoint is not None:
        say(f"checkpoint  {checkpoint}")
        best = next((path.parent for path in folder.glob(f"*/{BEST}/manifest.json")), checkpoint)
        if best != checkpoint:
            say(f"best        {best}")
        say(f"next        {_next_step(best, experiment)}")
    elif stopped:
        say(
            f"stopped{'. No checkpoint' if exists else ' before the first result. Nothing'} "
            "was saved"
        )


def _report_sweep(folder: Path, progress: Progress, failed: bool) -> None:
    """Prints the returns of a sweep, beginning with the best. All seeds of a config share one
    line. If the sweep has ended without a result and has not failed, this function removes the
    folder. The folder of a failed sweep has Tune's error files."""
    trials = [trial for trial in progress.trials.values() if trial.row]
    groups: dict[str, list[SweepTrial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.label):
        groups.setdefault(trial.group, []).append(trial)
    ranked = sorted(groups.items(), key=lambda group: _mean(group[1]), reverse=True)
    for label, members in ranked[:_MOST_SHOWN]:
        returns = ", ".join(f"{trial.mean_return:.1f}" for trial in members)
        mean = f"{_mean(members):.1f} ({returns})" if len(members) > 1 else returns
        say(f"return      {label or 'all seeds'}: {mean}")
    if len(ranked) > _MOST_SHOWN:
        say(f"            and {len(ranked) - _MOST_SHOWN} more")
    if not trials and not failed:
        shutil.rmtree(folder, ignore_errors=True)
        say("stopped before the first result. Nothing was saved")
        return
    say(f"results     {folder}")
    if not trials:
        return
    best = max(ranked[0][1], key=lambda trial: _mean([trial]))  # a seed of the best config
    with suppress(CheckpointError):  # raised if the trial has no checkpoint
        say(f"best        {find_checkpoint(folder / best.folder)} ({best.label})")
    say(f"next        {shlex.join([*program(), 'dashboard', str(folder)])}")


def _mean(trials: Sequence[SweepTrial]) -> float:
    """Returns the mean of the trials' last returns. Returns minus infinity if a trial has no
    return."""
    mean = sum(trial.mean_return for trial in trials) / len(trials)
    return -math.inf if math.isnan(mean) else mean


def _next_step(checkpoint: Path, experiment: Experiment) -> str:
    """Returns a command that evaluates a checkpoint. The user has to run the command in the current
    directory. If the checkpoint cannot contain the environment, the policy, the network or values
    of `env_config`, the command has arguments for them. If no command can evaluate the checkpoint,
    returns a sentence that says why."""
    command = [*program(), "evaluate", str(checkpoint)]
    network = getattr(getattr(experiment.policy, "model", None), "custom", None)
    env = experiment.trainer.evaluation_config.env or experiment.rollout.env
    policy = "" if POLICIES.is_installed(experiment.policy_class) else experiment.policy_class
    for option, value in (("--env", env), ("--policy", policy), ("--network", network or "")):
        name = name_on_command_line(value)
        if name is None:
            return (
                f"polopt evaluate needs {option}, but the command line cannot name the value in "
                "this run"
            )
        command += [option, name] if name else []
    unsaved: dict[str, str] = {}
    encode(experiment.to_dict(), unsaved)
    missing = unsaved_in({"unsaved": unsaved}, "env_config")
    return " ".join([shlex.join(command), *(f"{argument_for(key)}=VALUE" for key in missing)])


def program() -> list[str]:
    """Returns the words of a command that starts this `polopt` again. This is `polopt` if a shell
    finds this program under that name. Otherwise, it is the path that started the program, or
    `python -m polopt`."""
    started, found = Path(sys.argv[0]), shutil.which("polopt")
    if found and Path(found).parent in (started.absolute().parent, Path(sys.executable).parent):
        return ["polopt"]
    if started.stem == "polopt":
        return [str(started)]
    return [sys.executable, "-m", "polopt"]


def start_ray(planned: Plan, verbose: bool = False) -> None:
    """Connects to the cluster at `RAY_ADDRESS`. If this variable is not set, starts a new Ray on
    this machine.

    A new Ray gets at least as many logical CPUs as one trial reserves. In a sweep, this is the
    trial that reserves most. On a small machine, several processes then share a CPU. With
    fewer logical CPUs, some processes would wait forever for a CPU.
    """
    options: dict[str, Any] = {
        "address": ray_address(),
        "log_to_driver": verbose,
        "logging_level": logging.INFO if verbose else logging.CRITICAL,
    }
    if ray_address() == "local":
        needed = math.ceil(
            max(one.trainer.num_cpus_for_driver + one.remote_cpus for one in planned.experiments)
        )
        options |= {"num_cpus": max(os.cpu_count() or 1, needed), "include_dashboard": False}
        warn_if_crowded(max(one.num_remote_processes for one in planned.experiments))
    if planned.folder not in (None, Path.cwd()):  # Ray itself adds the current directory
        paths = [str(planned.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    ray.init(**options)
