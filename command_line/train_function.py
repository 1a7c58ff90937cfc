"""`train`: does the same as the command `polopt train`, but in the calling process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ray.tune import Checkpoint
from rich.console import Console

from polopt.command_line.examples import Example, load_example
from polopt.command_line.output import RESULTS_DIR, say, say_findings
from polopt.command_line.plan import Plan, plan_of, plan_of_checkpoint
from polopt.command_line.progress_table import Progress
from polopt.common.config import ConfigError, shown
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_sources import env_name
from polopt.trainers.find_checkpoint import BEST
from polopt.trainers.flat_config import with_keywords
from polopt.trainers.result_files import ResultFiles
from polopt.trainers.stop_when import StopWhen
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Number of checkpoints that a run keeps. Older checkpoints are deleted.
_KEPT = 3
_INTERRUPTED = "interrupted (Ctrl-C)"


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The return value of `polopt.train`. `polopt.load` accepts this object.

    Attributes:
        metrics: the last result. `docs/results.md` lists its keys.
        path: directory of the results. `polopt dashboard` and `tune.Result.from_path` accept it.
        checkpoint: the last checkpoint. Its attribute `path` is the directory.
        best_checkpoint: the checkpoint with the best evaluation in `path`. It is None if no
            evaluation has ended.
        policy: the trained policy. `policy.predict(observation)` chooses its actions.
    """

    metrics: dict[str, Any]
    path: str
    checkpoint: Checkpoint
    best_checkpoint: Checkpoint | None
    policy: Policy

    @property
    def stop_reason(self) -> str:
        """The reason why the run ended."""
        return str(self.metrics["stop_reason"])

    def __repr__(self) -> str:
        """Returns one line without the metrics. Notebooks show this text, and the metrics would
        have thousands of characters."""
        mean = self.metrics["episode_return_mean"]
        steps = self.metrics["num_env_steps_sampled_lifetime"]
        return (
            f"<TrainingResult: episode_return_mean {mean:.1f} after {steps:,} env steps; "
            f"{self.stop_reason}; {self.path}>"
        )


def train(
    experiment: str | type[PolicyOptimizerTrainer] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 20,
    restore: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    verbose: int = 1,
    **options: Any,
) -> TrainingResult:
    """Trains until a result reaches a limit, and shows the progress.

        result = polopt.train(
            "SyncPPO", env="CartPole-v1", num_workers=0, stop={"episode_return_mean": 450}
        )
        action, _ = result.policy.predict(observation)

    Writes results and checkpoints like `polopt train`. The trainer runs in the calling process.
    Therefore, debuggers work as usual, and so do environments that are defined in a notebook.

    Ctrl-C ends the current iteration early. `train` then saves a checkpoint and returns the result.
    A second Ctrl-C raises KeyboardInterrupt at once. If training raises an error, the results
    before the error have already been written.

    Args:
        experiment: the name or class of a preset, a tuned example, or the path of a YAML or Python
            file. `None` means that the run continues with the config of the checkpoint `restore`.
        config: a dict of options.
        stop: maps each result key to the value at which the run ends. The run ends at the first
            limit that a result reaches. `None` means the limits of the example or file. Without
            limits, the run ends with Ctrl-C, or when a callback calls `trainer.request_stop`.
        log_dir: directory of results and checkpoints. `None` means a new directory in
            `~/ray_results/polopt`. If `restore` is a checkpoint in this directory, the new results
            are added to the files of that run.
        checkpoint_every: number of iterations between two checkpoints. With 0, a checkpoint is
            saved only at the end. The last three checkpoints are kept.
        restore: a checkpoint to start from, or a directory that contains checkpoints.
        overwrite: whether to delete the results and checkpoints of an earlier run in `log_dir`.
            Other files in this directory are kept.
        verbose: how much is shown. 0 shows no progress. 1 shows a table and a progress bar on a
            terminal, and in a notebook if `ipywidgets` is installed. Elsewhere, 1 shows lines of
            text. 2 always shows lines of text, one for each iteration.
        options: further options, such as `env`, as keyword arguments.

    Raises:
        ConfigError: an option, a stop key or `log_dir` is wrong, or the experiment is a sweep. Also
            raised if `log_dir` holds the results of another run, or if `overwrite` would delete the
            checkpoint to restore. This error is raised before any worker starts. A stop key such as
            `optimizer/...` is an exception, because it can be checked only with the first result.
        CheckpointError: the checkpoint `restore` cannot be restored, or a checkpoint cannot be
            written.
        CallbackError, WorkersFailedError, NonFiniteError, EnvironmentFailedError, FunctionError:
            see `PolicyOptimizerTrainer.train`.
        OSError: a result cannot be written.
    """
    if verbose not in (0, 1, 2):
        raise ConfigError(f"verbose: got {shown(verbose)}. Allowed: 0, 1 or 2")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 0:
        raise ConfigError(f"checkpoint_every: got {shown(checkpoint_every)}. Allowed: 0 or more")
    changes = with_keywords({} if config is None else config, options)
    planned = _plan(experiment, changes, stop, restore)
    if planned.is_sweep:
        raise ConfigError(
            "polopt.train runs a single trial, but the config has a grid, a distribution, seeds or "
            "num_samples. Use the command `polopt train`, or tune.Tuner(polopt.SyncPPO, "
            "param_space=...)"
        )
    name = f"{planned.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    folder = Path(_unused(RESULTS_DIR.expanduser() / name) if log_dir is None else log_dir)
    limits = planned.example.stop
    title = f"{planned.name}: {planned.example.run} on {env_name(planned.experiment.rollout.env)}"
    progress = None
    if verbose:
        console = Console(force_terminal=False, force_jupyter=False) if verbose == 2 else Console()
        progress = Progress(console, title, limits, folder / "polopt.log")
    with progress or nullcontext():
        result = _run(planned, folder, overwrite, StopWhen(limits), checkpoint_every, progress)
    if progress is not None:
        say_findings(progress.findings())
        say(f"ended       {result.stop_reason}")
        say(f"results     {result.path}")
        say(f"checkpoint  {result.checkpoint.path}")
        if result.best_checkpoint is not None:
            say(f"best        {result.best_checkpoint.path}")
    return result


def _plan(
    experiment: str | type[PolicyOptimizerTrainer] | None,
    changes: Mapping[str, Any],
    stop: Mapping[str, float] | None,
    restore: str | os.PathLike[str] | None,
) -> Plan:
    checkpoint = None if restore is None else Path(restore).expanduser()
    if experiment is None:
        if checkpoint is None:
            raise ConfigError(
                "nothing to train. Give the name or class of a preset, a tuned example, the path "
                "of a YAML or Python file, or a checkpoint to restore"
            )
        limits = Example.parse({"run": "", "stop": stop or {}}, "polopt.train")
        return plan_of_checkpoint(checkpoint, limits, changes)
    preset = experiment if isinstance(experiment, type) else None
    if preset is not None and issubclass(preset, PolicyOptimizerTrainer):
        name, example = preset.__name__, Example(run=preset.__name__)
    elif isinstance(experiment, str):
        name, example = Path(experiment).stem, load_example(experiment)
    else:
        raise ConfigError(
            f"experiment: got {shown(experiment)}. Allowed: the name or class of a preset, a tuned "
            "example, or the path of a YAML or Python file"
        )
    if example.callbacks:
        raise ConfigError(
            f"{experiment}: the key 'callbacks' has callbacks of Tune, but polopt.train does not "
            f"use Tune. Use the command `polopt train {experiment}`"
        )
    if stop is not None:
        example = Example.parse({**vars(example), "stop": stop}, "polopt.train")
    return plan_of(name, example, changes, checkpoint, preset=preset)


def _run(
    planned: Plan,
    folder: Path,
    overwrite: bool,
    stop: StopWhen,
    checkpoint_every: int,
    progress: Progress | None,
) -> TrainingResult:
    if progress is not None:
        progress.say("starting workers")
    files = ResultFiles.after_restore(folder, planned.restore, overwrite)
    trainer = planned.preset(planned.config, log_dir=files)
    trainer.stop_when = stop
    saved: list[str] = []

    def request() -> None:
        if progress is not None:
            progress.stopping = "saving a checkpoint and stopping; Ctrl-C again stops at once"
        trainer.request_stop(_INTERRUPTED)

    def save() -> Checkpoint:
        checkpoint: Checkpoint = trainer.save().checkpoint
        saved.append(checkpoint.path)
        for old in saved[:-_KEPT]:
            shutil.rmtree(old)
        del saved[:-_KEPT]
        return checkpoint

    try:
        if planned.restore is not None:
            trainer.restore(planned.restore)
        with _first_interrupt(request):
            if progress is not None:
                progress.on_trial_start(0, [], None)
            while True:
                result = trainer.train()
                if stop.error is not None:
                    raise stop.error
                if progress is not None:
                    progress.on_trial_result(0, [], None, result)
                    progress.on_step_begin(0, [])
                if result["done"]:
                    break
                if checkpoint_every and result["training_iteration"] % checkpoint_every == 0:
                    save()
            checkpoint, best = save(), Path(trainer.logdir, BEST)
    finally:
        trainer.stop()
    return TrainingResult(
        metrics=result,
        path=trainer.logdir,
        checkpoint=checkpoint,
        best_checkpoint=Checkpoint(best) if best.is_dir() else None,
        policy=trainer.get_policy(),
    )


def _unused(folder: Path) -> Path:
    while folder.exists():  # another run has started in the same second
        folder = folder.with_name(f"{folder.name}_1")
    return folder


@contextmanager
def _first_interrupt(request: Callable[[], None]) -> Iterator[None]:
    """Inside the block, the first SIGINT calls `request`, and the second SIGINT has its usual
    effect. In a thread that is not the main thread, this function does nothing, because Python
    handles signals only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        request()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
