"""`PolicyOptimizerTrainer`: a Tune trainable that trains a policy with one policy optimizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import ray
from pyarrow import fs
from ray import tune

from polopt.common.add_ons import RunListener, add_ons
from polopt.common.config import ConfigError, shown
from polopt.common.ray_names import storage_folder
from polopt.common.tested_versions import warn_of_untested_versions
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.env_sources import OwnCopies, env_name, refuse_made_env, resolve_env
from polopt.rollouts.envs.env_state import saved_statistics, set_evaluation_statistics
from polopt.rollouts.ray_session import warn_if_larger
from polopt.rollouts.seeds import kept_global_generators
from polopt.rollouts.workers.callbacks import CallbackCaller
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.evaluation import Evaluation
from polopt.trainers.experiment import Experiment, checked_plan
from polopt.trainers.find_checkpoint import (
    SavedCheckpoint,
    check_directory,
    checkpoint_path,
    find_checkpoint,
    read_or_fall_back,
    read_whole,
)
from polopt.trainers.flat_config import with_keywords
from polopt.trainers.play_episodes import EvaluationResult, check_episodes, environment, play
from polopt.trainers.preset_help import PresetDoc, PresetSignature
from polopt.trainers.result_files import ResultFiles
from polopt.trainers.results import make_result
from polopt.trainers.run import Iteration, Run
from polopt.trainers.run_state import RunState, with_present_options
from polopt.trainers.saved_experiment import config_of
from polopt.trainers.saved_policy import misfit, state_of_policy
from polopt.trainers.stop_when import StopWhen
from polopt.trainers.tune_callbacks import ProgressMetrics
from polopt.trainers.tune_trial import (
    RunContext,
    bundles,
    directory_before_tune,
    explain_missing_file,
    finish_despite_sigterm,
    following,
    next_checkpoint,
    results_folder,
)

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("polopt")


def _checked(request: Callable[..., tune.PlacementGroupFactory]) -> Any:
    """Wraps `default_resource_request`. The wrapper first checks the config. If this process is
    connected to Ray, the wrapper also warns if Ray has fewer resources than the run requests."""

    def checked(cls: type[PolicyOptimizerTrainer], config: dict[str, Any]) -> Any:
        cls.parse_config(config)
        factory = request(cls, config)
        if ray.is_initialized():
            warn_if_larger(cls.__name__, factory.required_resources)
        return factory

    return classmethod(checked)


class PolicyOptimizerTrainer(tune.Trainable):
    """Trains a policy with a policy optimizer. The config names the policy and the optimizer.

        tune.Tuner(
            PolicyOptimizerTrainer,
            param_space={
                "env": "CartPole-v1",
                "policy": "ppo",
                "optimizer": tune.grid_search(["sync_samples", "decentralized_allreduce"]),
            },
        ).fit()

    The trainer also works without Tune. It starts Ray only if the run needs processes besides the
    driver. The following run needs only the driver, because `num_workers` is 0:

        trainer = PolicyOptimizerTrainer(env="CartPole-v1", policy="ppo", num_workers=0)
        result = trainer.train()
        trainer.stop()

    Options may be given as a dict, as keyword arguments, or as both.

    A checkpoint holds the weights, the state of the torch optimizer, the schedules, the counters
    and the states of the random generators. It can be restored in a trainer with another policy
    optimizer. `SyncSamples.worker_states` says when a resumed run continues bit for bit.

    The class attribute `preset` holds options that differ from the defaults of the config classes.

    Attributes:
        experiment: the parsed config.
        workers: the WorkerSet. Its local worker holds the policy that checkpoints contain.
        optimizer: the policy optimizer. It is None after `stop`.
        logdir: directory of the trial. Without Tune and without `log_dir`, this is a directory
            below `~/ray_results`. It is created when the first file is written.
        evaluation: plays evaluation episodes. It is None without the option `evaluation_interval`,
            and after `stop`.
        stop_when: decides after each result whether the run ends. `polopt.train` sets this
            attribute. Otherwise, it is None. Under Tune, Tune itself ends the run.

    Raises:
        ConfigError: the config is wrong. This error is raised before any worker starts.
    """

    preset: ClassVar[dict[str, Any]] = {}
    __signature__ = PresetSignature()
    #: Result keys that Tune prints. Without this list, Tune would print about 150 lines, one for
    #: each key.
    _progress_metrics = ProgressMetrics(
        "episode_return_mean",
        "num_env_steps_sampled_lifetime",
        "num_env_steps_sampled_per_second",
        "fault_tolerance/num_healthy_workers",
        "optimizer/policy_lag/mean",
    )
    stop_when: StopWhen | None = None
    _run: Run
    _run_state: RunState
    _command: RunContext | None = None
    _files: ResultFiles | None = None
    _stop_reason = ""
    _log_handler: logging.Handler | None = None
    #: During `restart`, the path to which Tune will move the checkpoint that is restored.
    _restored_as: Path | None = None

    @classmethod
    def parse_config(cls, config: dict[str, Any]) -> Experiment:
        """Parses a config for this class. A subclass whose options have other names translates them
        here.

        Raises:
            ConfigError: the config is wrong. See `Experiment.parse`.
        """
        return Experiment.parse(config, cls.preset)

    # ---- what Tune calls -------------------------------------------------------------------------

    @_checked
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Returns the resources that the run needs to start: one bundle for the driver, and one for
        each other process. See `bundles`. Warns if a running Ray has fewer resources than these.

        Raises:
            ConfigError: the config is wrong. See `Experiment.parse`.
        """
        return bundles(cls.parse_config(config))

    def setup(self, config: dict[str, Any], run: RunContext | None = None) -> None:
        """Creates the workers and the optimizer.

        Args:
            config: a flat config dict. See `Experiment.parse`.
            run: set by the command line.
        """
        # Tune first writes each checkpoint to Python's temporary directory. Python chooses this
        # directory at the first use. If the disk is full at that time, the error does not mention
        # the disk. Therefore, the directory is chosen here, before training.
        tempfile.gettempdir()
        warn_of_untested_versions()
        if run is not None:
            self._command = run
            self._log_handler = run.enter()
        self._run = Run(self.parse_config(config), self._users_directory)
        if self._files is not None:  # up to Ray 2.54, Tune has set another directory
            self._logdir = str(self._files.folder)  # type: ignore[assignment]
        followed = [add_on.follow(self) for add_on in add_ons()]
        self._run.listeners = [listener for listener in followed if listener is not None]
        self._begin()
        if self._files is not None:
            try:
                self._files.begin(self.config)
            except BaseException:  # the disk is full
                self.cleanup()
                raise
        if run is not None and run.restore is not None:
            self.load_checkpoint(run.restore)

    def step(self) -> dict[str, Any]:
        """Runs one training iteration, and returns its result.

        Calls `optimizer.step()` until the iteration has at least
        `min_sample_timesteps_per_iteration` environment steps and has lasted for at least
        `min_time_s_per_iteration`. A request to stop ends the iteration earlier. If an evaluation
        is due, the driver then plays the episodes of this evaluation, or begins the evaluation in
        the evaluation workers.
        """
        self._check_runs("train")
        with explain_missing_file(self._users_directory), self._run.own_generators():
            counts = self._run.iterate(self._is_stopped)
            iteration = self.iteration + 1
            state_of = functools.partial(self._state_with, iteration)
            before = functools.partial(self._run.callbacks.call, "on_evaluate_start", trainer=self)
            self._run.evaluate(iteration, state_of, self._is_stopped, before)
            self._warn_without_return()
            return self._result(counts)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes a checkpoint of tensors and JSON. See `polopt.trainers.checkpoints`.

        Raises:
            RuntimeError: the trainer has been stopped.
            CheckpointError, CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError,
            FunctionError: see `save`.
        """
        self._check_runs("save_checkpoint")
        self._run.tell(RunListener.saving)
        state = self._state_with(self.iteration, self.optimizer.get_state())
        self._run_state.write(self._run, state, checkpoint_dir)
        self._run.tell(RunListener.saved, checkpoint_dir)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Restores a checkpoint. The trainer that wrote the checkpoint may have used another policy
        optimizer. The saved policy must have the same network as the policy of this trainer. If the
        checkpoint is damaged, this method restores an older checkpoint of the same run, if there is
        one. A warning then names both checkpoints.

        Args:
            checkpoint: directory of the checkpoint.

        Raises:
            CheckpointError: the checkpoint does not exist, has another format, or was not written
                by a polopt trainer. Also raised if it does not fit the network or replay buffer of
                this trainer, or if it is damaged and no older checkpoint can be read.
            RuntimeError: the trainer has been stopped.
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError: a
                call to a worker has failed, before or during the restore. See `polopt.Calls`.
        """
        self._check_runs("restore")
        found, state = read_or_fall_back(checkpoint)
        self._run.tell(RunListener.restoring, str(self._restored_as or found))
        self._run_state.restore(self._run, state, found, int(super().iteration), self._counted_s())
        self._run.tell(RunListener.restored)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Rebuilds this trainer with `new_config`. Reuses the worker processes if they fit the new
        config.

        Raises:
            RuntimeError: the trainer has been stopped.
        """
        self._check_runs("reset_config")
        self._run.experiment = self.parse_config(new_config)
        self._run_state = RunState()
        self._begin()
        return True

    def cleanup(self) -> None:
        """Stops the workers, and releases the handles of their actors before Ray shuts down."""
        finish_despite_sigterm()
        try:
            if self.optimizer is not None:
                self._run.stop_optimizer()
                self._run.tell(RunListener.end)
        finally:
            if self.workers is not None:
                self.workers.stop()
            if self._files is not None:
                self._files.close()
            if self._log_handler is not None:
                logging.getLogger("polopt").removeHandler(self._log_handler)
                self._log_handler.close()

    def _begin(self) -> None:
        self._run.begin(results_folder(self._storage_of_trial, self.logdir))

    def _result(self, counts: Iteration) -> dict[str, Any]:
        """Returns the result of an iteration, after listeners and callbacks have seen it."""
        run = self._run
        result = make_result(run.optimizer, *counts)
        if run.evaluation is not None:
            result["evaluation"] = run.evaluation.report()
        # `Trainable.train` does not overwrite these two keys.
        result["training_iteration"] = self.iteration + 1
        result["timesteps_total"] = run.optimizer.metrics.num_env_steps_sampled
        # `tune.Result.from_path` uses `checkpoint_dir_name` to find the metrics of a checkpoint. If
        # several results have the same name, the last one belongs to the checkpoint, because the
        # checkpoint was saved after that result.
        checkpoint = next_checkpoint(self)
        if checkpoint is None and self._files is not None:
            checkpoint = following(self.logdir)
        result["checkpoint_dir_name"] = None if checkpoint is None else checkpoint.name
        result["stop_reason"] = None
        run.tell(RunListener.extend, result)
        if run.evaluation is not None and result["evaluation"]["env_runners"]["num_episodes"]:
            call = functools.partial(run.callbacks.call, trainer=self)
            call("on_evaluate_end", evaluation=result["evaluation"])
        run.callbacks.call("on_train_result", trainer=self, result=result)
        run.tell(RunListener.result, result)
        if self._stop_reason:
            result |= {"done": True, "stop_reason": self._stop_reason}
            self._stop_reason = ""
        return result

    def _is_stopped(self) -> bool:
        if self._stop_reason:
            return True
        return self._command is not None and self._command.stop_file.exists()

    def _state_with(self, iterations: int, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        seconds = self._counted_s() + self._run_state.seconds_before
        trainer = type(self).__name__
        return self._run_state.state(self._run, optimizer_state, trainer, iterations, seconds)

    def _check_runs(self, method: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} has been stopped: {method}() needs workers and "
                "environments, but they are closed. To continue from a checkpoint, make a new "
                "trainer and call its restore(). get_policy() and compute_single_action() still "
                "work"
            )

    def _warn_without_return(self) -> None:
        """Warns if no episode has ended in the first iteration of a Tune trial. Does not warn in
        trials of `polopt train`."""
        metrics = self.optimizer.metrics
        in_sweep = self._storage_of_trial is not None and self._command is None
        if in_sweep and self.iteration == 0 and not metrics.episodes.lifetime:
            logger.warning(
                "no episode has ended in the first %d environment steps. Therefore, "
                "episode_return_mean is NaN, and schedulers of Tune cannot rank this trial. "
                "MedianStoppingRule even stops such a trial. Raise "
                "min_sample_timesteps_per_iteration to the number of environments times the steps "
                "of the longest episode, or limit the length of episodes with max_frames_per_traj",
                metrics.num_env_steps_sampled,
            )

    # ---- for programs without Tune ---------------------------------------------------------------

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *more: Any,
        log_dir: str | os.PathLike[str] | ResultFiles | None = None,
        storage: Any = None,
        **options: Any,
    ) -> None:
        """Checks the config, and starts the workers.

        Args:
            config: a dict of options.
            more: must be empty. A second positional argument raises a ConfigError.
            log_dir: directory to which each `train()` writes its result. The files are the same as
                in a Tune trial, for example `result.json` and TensorBoard events. `save()`
                makes its checkpoints in this directory, too. `None` means that no results are
                written. `save()` then makes its checkpoints in `logdir`. It may also
                be a `ResultFiles`, which continues or overwrites an earlier run.
            storage: set by Tune.
            options: further options, as keyword arguments.

        Raises:
            ConfigError: an option is wrong, or `log_dir` cannot be created or holds the results of
                another run.
        """
        self._storage_of_trial = storage
        self._users_directory = directory_before_tune(storage)
        self._run_state = RunState()
        # Up to Ray 2.54, Tune also passes the argument `logger_creator`.
        others = {name: options.pop(name) for name in ("logger_creator",) if name in options}
        config = with_keywords({} if config is None else config, options)
        if more:
            raise ConfigError(
                f"{type(self).__name__} takes one positional argument, the dict of options; got "
                f"another one, {shown(more[0])}. Give options as keyword arguments: env=..."
            )
        refuse_made_env(config.get("env"))  # copying a made environment may even damage it
        if isinstance(log_dir, ResultFiles):
            self._files = log_dir
        elif log_dir is not None:
            self.parse_config(config)  # raises before the directory is created
            self._files = ResultFiles(log_dir)
        super().__init__(OwnCopies(config), storage=storage, **others)

    def __repr__(self) -> str:
        """Returns one line with the class, environment, optimizer, policy, number of workers, and
        progress of training. Under Tune, returns only the name of the class."""
        name = type(self).__name__
        if self._storage_of_trial is not None:
            return name  # Ray reads this text only once, and prints it before each line of the log
        run, optimizer = self.experiment, self.optimizer
        parts = [env_name(run.rollout.env), run.optimizer_name, run.policy_name]
        parts.append(f"{run.rollout.num_workers} workers")
        if optimizer is None:
            parts.append("stopped")
        else:
            steps = optimizer.metrics.num_env_steps_sampled
            parts += [f"iteration {self.iteration}", f"{steps:,} env steps"]
        return f"{name}({', '.join(parts)})"

    def train(self) -> dict[str, Any]:
        """Runs one training iteration.

        Returns:
            the result of the iteration. `docs/results.md` lists its keys. With `log_dir`, this
            method also writes the result to that directory.

        Raises:
            RuntimeError: the trainer has been stopped.
            CheckpointError: the checkpoint of the best evaluation cannot be written.
            OSError: the result cannot be written to `log_dir`.
            EnvironmentFailedError: an environment in the driver's process fails repeatedly, or an
                environment breaks Gymnasium's API.
            CallbackError, WorkersFailedError, NonFiniteError, FunctionError: see `polopt.Calls` and
                `polopt.Callbacks`.
        """
        result: dict[str, Any] = super().train()  # type: ignore[no-untyped-call]
        return result

    def request_stop(self, reason: str) -> None:
        """Requests that the current iteration ends early, and that the run ends after it.

        The result of the iteration has `done=True`, and the reason as `stop_reason`. `polopt train`
        and `polopt.train` then save a checkpoint and end the run. A `tune.Tuner` of your own also
        ends the trial, but saves a checkpoint at the end only with `checkpoint_at_end=True`.
        Callbacks and signal handlers may call this method.

        Raises:
            ValueError: the reason is empty.
        """
        if not reason:
            raise ValueError("request_stop: got an empty reason. Give a text")
        self._stop_reason = reason

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Saves a checkpoint.

        Under Tune, the checkpoint is first written to `checkpoint_dir` or to a temporary directory.
        Tune then copies it to the trial's directory.

        Args:
            checkpoint_dir: directory of the checkpoint. Without Tune, `None` means a new
                `checkpoint_*` directory in `logdir`.

        Returns:
            without Tune, a `SavedCheckpoint`. Under Tune, the return value of Tune's own method.

        Raises:
            CheckpointError: the checkpoint cannot be written or copied. The message names the
                directory and the reason.
            RuntimeError: the trainer has been stopped.
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError: a
                pending call has failed. See `polopt.Calls`.
        """
        self._check_runs("save")
        if self._storage_of_trial is None:
            checkpoint_dir = str(checkpoint_dir or following(self.logdir))
        target = next_checkpoint(self) or checkpoint_dir
        try:
            saved = super().save(checkpoint_dir)
        except OSError as error:  # `error.filename` is None if Tune could not copy the checkpoint
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CheckpointError(
                f"checkpoint {error.filename or target} cannot be written: {reason}"
            ) from error
        if self._storage_of_trial is not None:
            return saved
        # Ray's types say that the result has the base class.
        checkpoint = cast(tune.Checkpoint, tune.Checkpoint.from_directory(str(checkpoint_dir)))
        return SavedCheckpoint(checkpoint, saved.metrics, self.iteration)

    def restore(self, checkpoint_path: Any) -> None:
        """Restores a checkpoint. The counts of iterations, steps and seconds continue from the
        values in the checkpoint.

        Args:
            checkpoint_path: a directory, a Tune checkpoint, or the return value of `save`.

        Raises:
            CheckpointError: the checkpoint cannot be restored (see `load_checkpoint`), or the
                directory contains a file `_dict_checkpoint.pkl`, which Tune would unpickle.
            RuntimeError: the trainer has been stopped.
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError:
                see `load_checkpoint`.
        """
        if isinstance(checkpoint_path, str | Path):
            checkpoint_path = str(Path(checkpoint_path).expanduser())
        check_directory(checkpoint_path)
        if isinstance(checkpoint_path, SavedCheckpoint):
            checkpoint_path = checkpoint_path.checkpoint
        super().restore(checkpoint_path)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Any, *, log_dir: str | os.PathLike[str] | None = None, **changes: Any
    ) -> Self:
        """Makes a trainer with the config of a checkpoint, and restores the checkpoint.

            trainer = polopt.SyncPPO.from_checkpoint("runs/a", lr=1e-4, log_dir="runs/a")

        Args:
            checkpoint: the directory of a checkpoint, or the return value of `save` or
                `polopt.train`. For a directory that contains checkpoints, the newest checkpoint is
                used.
            log_dir: see the constructor. If this is the directory of the checkpoint's run, the new
                results are added to the files of that run.
            changes: options that replace the saved options. If the class is a preset, the preset's
                optimizer and policy replace the saved optimizer and policy.
                `PolicyOptimizerTrainer` keeps the saved ones, unless `changes` name others.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or does not fit the policy. Also
                raised if a value of its config could not be saved and is not in `changes`. The
                message names the option. Pass this option in `changes`.
            ConfigError: an option is wrong, or `log_dir` holds the results of another run. Also
                raised if the checkpoint names a module that `changes` do not name. Such a module is
                not imported, because importing it would execute code.
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError:
                see `load_checkpoint`.
        """
        found, state = read_or_fall_back(find_checkpoint(checkpoint_path(checkpoint)))
        config = config_of(state, f"checkpoint {found}", changes, cls.preset)
        cls.parse_config(config)  # raises before the directory is created
        files = None if log_dir is None else ResultFiles.after_restore(log_dir, found)
        trainer = cls(config, log_dir=files)
        try:
            trainer.restore(found)
        except BaseException:
            trainer.stop()
            raise
        return trainer

    def evaluate(
        self,
        episodes: int | None = None,
        *,
        stochastic: bool | None = None,
        seed: int | None = None,
    ) -> EvaluationResult:
        """Plays whole episodes with the current policy in this process. The environment is made
        with the options of `evaluation_config`. The episodes do not affect training.

        Args:
            episodes: number of episodes. `None` means the value of `evaluation_duration`, which is
                10 by default.
            stochastic: True samples actions. False takes the mode of the policy's distribution.
                `None` means the value of `explore` in `evaluation_config`, which is False by
                default.
            seed: seed of the environment and of the actions. `None` draws a seed.

        Raises:
            ConfigError: `episodes` is wrong, or the environment cannot be made or evaluated.
            ValueError: the wrappers of the environment do not fit the statistics from training.
            RuntimeError: the trainer has been stopped.
            Exception: the environment raised this exception in an episode.
        """
        self._check_runs("evaluate")
        training, config = self.experiment.rollout, self.experiment.trainer
        if episodes is None:
            episodes = config.evaluation_duration
        if stochastic is None:
            stochastic = config.evaluation_config.explore
        check_episodes(episodes)
        rollout = training.model_copy(update=config.evaluation_config.changes(training))
        rollout = rollout.model_copy(update={"env": resolve_env(rollout.env)})
        statistics = saved_statistics(self.optimizer.get_driver_state()["workers"].values())
        with kept_global_generators(), environment(rollout) as env:
            if statistics:
                set_evaluation_statistics(env, statistics)
            played = play(self.get_policy(), env, episodes, stochastic, seed, rollout=rollout)
            return EvaluationResult(played)

    def get_policy(self, name: str | None = None) -> Policy:
        """Returns the policy that this trainer trains.

        Args:
            name: the name of one of several policies. `None` means the policy of a run with one
                policy, or the `PolicyGroup` of all policies.

        Raises:
            ValueError: the run has no policy of this name.
        """
        policy = self._run.policy
        if name is None:
            return policy
        members = policy.policies if isinstance(policy, PolicyGroup) else {}
        if name not in members:
            allowed = ", ".join(map(repr, members)) or "none, because the run has one policy"
            raise ValueError(f"the run has no policy {name!r}. Allowed: {allowed}")
        return members[name]

    def restore_policy(self, name: str, checkpoint: Any, from_policy: str | None = None) -> None:
        """Restores one of several policies from a checkpoint, also from a run with one policy. The
        other policies and the counters of the run stay as they are. All environments begin new
        episodes.

        Args:
            name: the name of the policy in this run.
            checkpoint: a value that `restore` accepts.
            from_policy: the name of the policy in the checkpoint, if it has several policies.
                `None` means `name`.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, has no such policy, or its
                network differs.
            ValueError: the run has no policy of this name.
        """
        self.get_policy(name)
        directory = find_checkpoint(checkpoint_path(checkpoint))
        whole = read_whole(directory)
        several = "policies" in whole["optimizer"]["policy"]
        one = state_of_policy(
            whole, f"checkpoint {directory}", (from_policy or name) if several else from_policy
        )
        if problem := misfit(one, self.get_policy(name)):
            raise CheckpointError(f"checkpoint {directory} does not fit policy {name!r}: {problem}")
        state = self.optimizer.get_state()
        members = {**state["policy"]["policies"], name: one["optimizer"]["policy"]}
        self.optimizer.set_state({**state, "policy": {**state["policy"], "policies": members}})

    def add_policy(
        self,
        name: str,
        copy_of: str,
        trainable: bool = False,
        policy_mapping_fn: Any = None,
    ) -> None:
        """Adds a policy to a run with several policies, for example a former version of a policy as
        an opponent. Workers begin new episodes, and replay buffers are emptied.

        Args:
            name: the name of the new policy.
            copy_of: the policy whose weights, state and options the new policy gets.
            trainable: whether the new policy learns.
            policy_mapping_fn: replaces the option of the same name. `None` keeps it. A function
                that takes `rng`, `episode` or `worker` may return the new policy for every agent
                with the same spaces.

        Raises:
            ConfigError: the run has no named policies, has no policy `copy_of`, has a policy `name`
                already, or the mapping does not fit. The run then goes on unchanged.
        """
        self._check_runs("add_policy")
        experiment, members = self._named_policies(copy_of)
        if name in members:
            raise ConfigError(f"add_policy: the run has a policy {name!r} already")
        policies = {**members, name: dict(members[copy_of])}
        trained = [*self._run.policy.trained, *([name] if trainable else [])]  # type: ignore[attr-defined]
        self._change_policies(experiment, policies, trained, policy_mapping_fn, {name: copy_of})

    def remove_policy(self, name: str, policy_mapping_fn: Any = None) -> None:
        """Removes one of several policies. Workers begin new episodes, and replay buffers are
        emptied.

        Args:
            name: the name of the policy.
            policy_mapping_fn: replaces the option of the same name. `None` keeps it.

        Raises:
            ConfigError: the run has no such policy, no policy that learns would be left, or the
                mapping does not fit. The run then goes on unchanged.
        """
        self._check_runs("remove_policy")
        experiment, members = self._named_policies(name)
        policies = {other: options for other, options in members.items() if other != name}
        trained = [one for one in self._run.policy.trained if one != name]  # type: ignore[attr-defined]
        if not trained:
            raise ConfigError(f"remove_policy: without {name!r}, no policy learns")
        self._change_policies(experiment, policies, trained, policy_mapping_fn, {})

    def _named_policies(self, name: str) -> tuple[Experiment, dict[str, dict[str, Any]]]:
        """Returns the experiment with the present options, and the options of each policy."""
        run = self._run
        experiment = with_present_options(run.experiment, run.policy.config)
        members = experiment.rollout.policies
        if members is None:
            raise ConfigError(
                "the run has no named policies. Give the option 'policies', such as {'main': {}}"
            )
        if name not in members:
            raise ConfigError(
                f"the run has no policy {name!r}. Allowed: {', '.join(map(repr, members))}"
            )
        return experiment, members

    def _change_policies(
        self,
        experiment: Experiment,
        policies: dict[str, dict[str, Any]],
        trained: list[str],
        mapping: Any,
        copies: dict[str, str],
    ) -> None:
        """Goes on with other policies. `copies` maps the names of new policies to the policies
        whose state they get."""
        run = self._run
        update = {"policies": policies, "policies_to_train": trained}
        if mapping is not None:
            update["policy_mapping_fn"] = mapping
        changed = dataclasses.replace(
            experiment, rollout=experiment.rollout.model_copy(update=update)
        )
        checked_plan(changed)  # raises before anything changes
        with run.own_generators():
            state = run.optimizer.get_state()
        evaluation = None if run.evaluation is None else run.evaluation.get_state()
        saved = state["policy"]["policies"]
        members = {name: saved[copies.get(name, name)] for name in policies}
        run.experiment, callbacks = changed, run.callbacks
        self._begin()
        run.callbacks = callbacks  # the user's object in the driver may count policies
        with run.own_generators():
            run.optimizer.set_state({**state, "policy": {**state["policy"], "policies": members}})
        run.optimizer.metrics.episodes.keep_policies(members)
        if run.evaluation is not None and evaluation is not None:
            run.evaluation.set_state(evaluation)

    def compute_single_action(
        self, observation: Any, explore: bool = False, policy_name: str | None = None
    ) -> Any:
        """Returns the action for one observation. The observation is from the environment's
        observation space. `env.step` accepts the action.

        Args:
            observation: the observation.
            explore: True samples the action. False takes the mode of the distribution.
            policy_name: the name of the policy that acts, if the run has several.

        Raises:
            ValueError: the policy has memory. This method cannot keep the policy's state from one
                call to the next. Also raised if the run has several policies and none is named.
        """
        policy = self.get_policy(policy_name)
        if isinstance(policy, PolicyGroup):
            raise ValueError(
                f"the run has several policies. Give policy_name: one of {list(policy.policies)}"
            )
        if policy.state_size:
            raise ValueError(
                f"{type(policy).__name__} has memory. Use get_policy().predict(observation, state),"
                " which also returns the state for the next call"
            )
        action, _ = policy.predict(observation, deterministic=not explore)
        return action

    def stop(self) -> None:
        """Stops the workers and closes the environments. The policy can still be used."""
        super().stop()  # type: ignore[no-untyped-call]

    # ---- the run, for callbacks and add-ons ------------------------------------------------------

    @property
    def experiment(self) -> Experiment:
        """The parsed config."""
        return self._run.experiment

    @property
    def workers(self) -> Any:
        """The WorkerSet. Its local worker holds the policy that checkpoints contain."""
        return self._run.workers

    @property
    def optimizer(self) -> Any:
        """The policy optimizer. None after `stop`."""
        return self._run.optimizer

    @property
    def evaluation(self) -> Evaluation | None:
        """Plays evaluation episodes. None without the option `evaluation_interval`, and after
        `stop`."""
        return self._run.evaluation

    @property
    def callbacks(self) -> CallbackCaller:
        """Calls the user's callbacks in the driver."""
        return self._run.callbacks

    @property
    def results_folder(self) -> tuple[fs.FileSystem, str] | None:
        """The file system and the directory in which this run writes its results. Under Tune, the
        directory may be in cloud storage. None if the run writes no results."""
        if self._storage_of_trial is None and self._files is None:
            return None
        return results_folder(self._storage_of_trial, self.logdir)

    def restart(self, checkpoint_dir: str) -> None:
        """Goes on as if this trainer had been restored from a checkpoint that it has just written:
        makes new workers, and restores the checkpoint."""
        self._begin()
        self._restored_as = next_checkpoint(self)
        try:
            self.load_checkpoint(checkpoint_dir)
        finally:
            self._restored_as = None

    @property
    def iteration(self) -> int:
        """The number of iterations so far, including the iterations before a restore."""
        return int(super().iteration) + self._run_state.iterations_before

    @property
    def training_iteration(self) -> int:
        """The same number as `iteration`."""
        return self.iteration

    # ---- methods of Tune's class that behave differently here ------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Before Tune starts an actor, it calls only `default_resource_request`. Therefore, that
        # method has to check the config. `tune.with_resources` makes a subclass that overrides it,
        # so the override is wrapped to check the config, too.
        super().__init_subclass__(**kwargs)
        text = cls.__dict__.get("__doc__")
        if isinstance(text, str):
            cls.__doc__ = PresetDoc(text)  # type: ignore[assignment]
        request = cls.__dict__.get("default_resource_request")
        if request is not None:
            cls.default_resource_request = _checked(request.__func__)  # type: ignore[method-assign]

    def _setup_logdir(self) -> None:
        """Sets `logdir`. Without Tune, this method does not create the directory. Tune's own method
        would create a directory for each trainer, and most of these directories would stay
        empty."""
        if self._storage_of_trial is not None:
            super()._setup_logdir()  # type: ignore[no-untyped-call]
            return
        if self._files is not None:
            self._logdir = str(self._files.folder)  # type: ignore[assignment]
            return
        name = f"{type(self).__name__}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}"
        self._logdir = f"{storage_folder()}/{name}"  # type: ignore[assignment]

    def reset(self, new_config: dict[str, Any], storage: Any = None, **others: Any) -> bool:
        """Prepares this trainer for another trial. Tune calls this method when it reuses actors."""
        self._storage_of_trial = storage
        return bool(super().reset(new_config, storage=storage, **others))  # type: ignore[no-untyped-call]

    def log_result(self, result: dict[str, Any]) -> None:
        """Writes a result to `log_dir` if this directory was given. If `stop_when` ends the run
        after this result, first marks the result as the last one. `train` calls this method with
        each result."""
        super().log_result(result)
        stop = self.stop_when
        if stop is not None and not result["done"] and stop(self.trial_id, result):
            result |= {"done": True, "stop_reason": stop.reason}
        if self._files is not None:
            self._files.add(result)

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns Tune's own metrics. `time_total_s` includes the seconds before a restore."""
        metrics: dict[str, Any] = super().get_auto_filled_metrics(*args, **kwargs)
        if "time_total_s" in metrics:
            metrics["time_total_s"] += self._run_state.seconds_before
        return metrics

    def _counted_s(self) -> float:
        state: dict[str, Any] = super().get_state()  # type: ignore[no-untyped-call]
        return float(state["time_total"])
