"""One experiment through Ray Tune, for the command line: checked first, shown while it runs, and
ended with a checkpoint."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before Ray is imported, which reads them then.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # and the notice about it
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a FutureWarning for each actor
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # whose banner even verbose=0 lets through
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune's ends a run without a checkpoint

import ray
from ray import tune
from ray.tune.execution import class_cache
from rich.console import Console

from polopt.policies.config import ConfigError, canonical, nearest
from polopt.trainers.checkpoint_fallback import read_or_fall_back
from polopt.trainers.config import Experiment, aliases_for
from polopt.trainers.evaluation import find_checkpoint
from polopt.trainers.examples import Example, apply_changes, load_example, merge
from polopt.trainers.preparation import prepare
from polopt.trainers.presets import PRESETS
from polopt.trainers.progress import Progress
from polopt.trainers.stopping import OnInterrupt, StopWhen

#: Imported by each process that Ray starts, before there is anything for it to do.
PRELOADED = ["polopt.rollouts.worker"]
# Tune gives trials an environment variable for PyTorch Lightning, with which none of the processes
# fits them that Ray has started, and that have imported all this, meanwhile.
class_cache.DEFAULT_ENV_VARS.clear()


@dataclass(frozen=True)
class RunOptions:
    """What the command line says besides the experiment.

    Attributes:
        results_dir: where results and checkpoints go.
        checkpoint_every: iterations between checkpoints; 0: only at the end.
        verbose: show what Ray, Tune and workers print.
    """

    results_dir: Path
    checkpoint_every: int = 0
    verbose: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        results: directory of the trial's results.
        checkpoint: the last; None if there is none.
        interrupted: by Ctrl-C.
        error: what ended it early; empty if nothing did.
    """

    results: Path | None
    checkpoint: Path | None
    interrupted: bool
    error: str = ""


@dataclass(frozen=True)
class Plan:
    """A run with nothing left to be wrong about it but what only running shows."""

    example: Example
    config: dict[str, Any]
    experiment: Experiment
    stop: StopWhen
    restore: Path | None


def plan(example_or_config: str, changes: Sequence[str], restore: Path | None = None) -> Plan:
    """Reads, changes and checks an experiment; starts nothing.

    Raises:
        ConfigError: whatever is wrong with it.
        CheckpointError: `restore` is no complete checkpoint.
    """
    loaded = load_example(example_or_config, list(PRESETS))
    example, config_changes = apply_changes(loaded, changes)
    if example.run not in PRESETS:
        raise ConfigError(
            f"key 'run': got {example.run!r}{nearest(example.run, PRESETS) or '.'} "
            f"Allowed: {', '.join(PRESETS)}"
        )
    preset = PRESETS[example.run].preset
    aliases = aliases_for(merge(example.config, config_changes), preset)
    config = merge(canonical(example.config, aliases), canonical(config_changes, aliases))
    experiment = Experiment.parse(config, preset)
    stop = StopWhen(example.stop)
    prepare(experiment)
    if restore is not None:
        restore, _ = read_or_fall_back(find_checkpoint(restore))
    return Plan(example, config, experiment, stop, restore)


def run(planned: Plan, options: RunOptions, console: Console) -> Outcome:
    """Trains until a limit is reached, Ctrl-C is pressed, or something fails."""
    example = planned.example
    title = f"{example.name}: {example.run} on {_env_name(planned.experiment)}"
    if not options.verbose:
        _quiet()
    with Progress(console, title) as progress:

        def interrupt() -> None:
            planned.stop.interrupt()
            progress.say("stopping after this iteration, with a checkpoint; Ctrl-C again: at once")

        with OnInterrupt(interrupt):
            start_ray(planned.experiment, options.verbose)
            progress.say("starting workers")
            return _tune(planned, options, progress)


def _tune(planned: Plan, options: RunOptions, progress: Progress) -> Outcome:
    example = planned.example
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    failed = ""
    try:
        analysis = tune.run(
            PRESETS[example.run],
            name=f"{example.name}_{stamp}",
            config=planned.config,
            stop=planned.stop,
            storage_path=str(options.results_dir.expanduser().resolve()),
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=3,
                checkpoint_frequency=options.checkpoint_every,
                checkpoint_at_end=True,
            ),
            restore=None if planned.restore is None else str(planned.restore.resolve()),
            trial_dirname_creator=lambda trial: f"{example.run}_{trial.trial_id}",
            callbacks=[progress],
            verbose=3 if options.verbose else 0,
            raise_on_failed_trial=False,
        )
    except tune.TuneError as error:
        return Outcome(None, None, planned.stop.interrupted, str(error))
    trial: Any = analysis.trials[0]
    if trial.error_file:
        cause = _root_cause(Path(trial.error_file).read_text())
        failed = f"{cause} (traceback: {trial.error_file})"
    return Outcome(
        Path(trial.path),
        Path(trial.checkpoint.path) if trial.checkpoint else None,
        planned.stop.interrupted,
        failed,
    )


def start_ray(experiment: Experiment, verbose: bool = False) -> None:
    """Starts Ray here, or attaches to the cluster that `RAY_ADDRESS` names.

    Logical CPUs are as many as the experiment needs, if that is more than there are: on a small
    machine workers take turns instead of waiting for ever for CPUs that do not come.
    """
    rollout, driver = experiment.rollout, experiment.trainer
    num_workers = rollout.num_workers * (1 + rollout.num_workers_below)
    needed = math.ceil(driver.num_cpus_for_driver + num_workers * rollout.num_cpus_per_worker)
    cores = os.cpu_count() or 1
    num_cpus = max(cores, needed)
    here: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        # Ray starts a process for each CPU ahead, which is too many where few are needed.
        "_system_config": {
            "preload_python_modules": PRELOADED,
            "prestart_worker_first_driver": num_cpus <= 2 * needed,
            # All of them at once, but not so many that one takes a minute and is given up.
            "worker_maximum_startup_concurrency": max(cores, min(needed, 4 * cores)),
            # Else those are ended again as soon as the trial has reserved their CPUs.
            "num_workers_soft_limit": needed,
        },
    }
    ray.init(
        **({} if "RAY_ADDRESS" in os.environ else here),
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
    )


def _quiet() -> None:
    """Ray and Tune talk about themselves; what matters to the user is shown otherwise."""
    warnings.filterwarnings("ignore", module=r"(ray|tensorboardX)(\..*)?")
    for name in ("ray", "ray.tune", "ray.train", "ray.air", "ray.data"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _env_name(experiment: Experiment) -> str:
    env = experiment.rollout.env
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def _root_cause(traceback: str) -> str:
    """The line of a worker's traceback that says what happened, without Ray's around it."""
    lines = [line.strip() for line in traceback.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "unknown"
