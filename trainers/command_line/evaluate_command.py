"""`polopt evaluate`: plays episodes with the policy of a checkpoint, without Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward

from polopt.common.config import ConfigError
from polopt.common.episodes import Episode
from polopt.policies.policy import Policy
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.creators import EnvContext, make_env
from polopt.rollouts.envs.env_api import reward_of, same_encoding
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.missing_packages import missing_package
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeds import seeds_from
from polopt.rollouts.sampling.whole_episodes import WholeEpisodes
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.examples import Example, apply_changes
from polopt.trainers.command_line.names import import_from, named
from polopt.trainers.experiment import EvaluationConfig, Experiment, merged_options
from polopt.trainers.saved_config import argument_for, described, unsaved_in
from polopt.trainers.saved_policy import read_whole

#: Options of the environment, which an argument can change.
_KEYS = ("env_config", "max_frames_per_traj")
#: Seconds of one episode after which a line says so.
_LONG_S = 10.0


def load(
    checkpoint: Path, env: str | None = None, changes: Sequence[str] = ()
) -> tuple[dict[str, Any], Experiment]:
    """Returns state and experiment of a checkpoint, with the environment of its evaluation. The
    experiment's environment is what `resolve_env` returned: it is not resolved again, which would
    allow imports.

    Args:
        checkpoint: its directory.
        env: replaces the environment of the checkpoint; required if that is a callable, or in a
            module, which is imported only if the user names it.
        changes: `key=value` arguments for options of the environment.

    Raises:
        CheckpointError: missing, incomplete, damaged, not one of a trainer, or without a value of
            `env_config`, which `changes` do not give.
        ConfigError: unknown environment or plugin, wrong arguments, or `env` is required.
    """
    state = read_whole(checkpoint)
    # The optimizer has no effect on evaluation, and may not be installed here. The policy is made
    # by `polopt.trainers.saved_policy`.
    plugins = ("optimizer", "policy")
    config = {key: value for key, value in state["config"].items() if key not in plugins}
    given = _changes(changes)
    evaluation = EvaluationConfig.parse(config.get("evaluation_config", {}))
    _check_is_whole(checkpoint, state, given, evaluation.env_config)
    rollout = RolloutConfig.parse({key: config[key] for key in _KEYS if key in config})
    config = {**config, "env_config": rollout.env_config, **evaluation.changes(rollout)}
    options = merged_options(config["env_config"], given.get("env_config", {}))
    config |= {**given, "env_config": options}
    if env is not None:
        if ":" in env:  # else the current directory may hold modules of another user
            import_from(Path.cwd())
        config["env"] = named(env, "--env") if ".py:" in env else env
    elif "evaluation_config.env" in state.get("unsaved", {}):
        config["env"] = None
    if config.get("env") is None:
        raise ConfigError(
            f"checkpoint {checkpoint} is of a callable environment, which it cannot hold; name it "
            "with --env module:callable"
        )
    try:
        source = resolve_env(config["env"], allow_import=env is not None)
    except ConfigError as error:
        hint = f"; to import it: --env {shlex.quote(str(config['env']))}"
        raise ConfigError(f"{error}{hint * (env is None and ':' in str(config['env']))}") from None
    return state, Experiment.parse({**config, "env": source}, {})


def _changes(arguments: Sequence[str]) -> dict[str, Any]:
    for argument in arguments:
        if argument.partition("=")[0].partition(".")[0] not in _KEYS:
            raise ConfigError(
                f"argument {argument!r} has no effect on evaluation. Allowed: "
                "env_config.KEY=VALUE, max_frames_per_traj=STEPS"
            )
    return apply_changes(Example(run=""), arguments)[1]


def _check_is_whole(
    checkpoint: Path,
    state: dict[str, Any],
    given: dict[str, Any],
    of_evaluation: dict[str, Any],
) -> None:
    """Refuses a checkpoint without some options of the environment, unless they are given.

    Args:
        checkpoint: its directory, for messages.
        state: its state.
        given: options, as `key=value` arguments gave them.
        of_evaluation: its `env_config` of evaluation, which replaces options of the training.
    """
    unsaved = unsaved_in(state, "env_config", "evaluation_config")
    unsaved.pop("evaluation_config.env", None)
    if "env_config" not in state["config"]:  # of an earlier version
        unsaved["env_config"] = "a dict, which an earlier version could not save"
    missing, arguments = {}, []
    for path, kind in unsaved.items():
        ours = path.removeprefix("evaluation_config.")
        keys = argument_for(ours)
        replaced = ours == path and "." in keys and _has({"env_config": of_evaluation}, keys)
        if not replaced and not _has(given, keys):
            missing[ours] = kind
            arguments.append(f"{keys}=VALUE" if "." in keys else f"{keys}={{KEY: VALUE}}")
    if missing:
        raise CheckpointError(
            f"checkpoint {checkpoint} does not hold {described(missing)}, because a value of such "
            "a type cannot be saved, and without it the environment may be another one. Give it: "
            f"polopt evaluate ... {' '.join(dict.fromkeys(arguments))}; a value that only Python "
            "can make: null here, and --env FILE.py:callable that makes the environment with it"
        )


def _has(options: Mapping[str, Any], keys: str) -> bool:
    """Whether options hold a value at `keys`, dotted, or one in the place of a dict above it."""
    found: Any = options
    for key in keys.split("."):
        if not isinstance(found, Mapping):
            return True
        if key not in found:
            return False
        found = found[key]
    return True


def check_spaces(policy: Policy, env: Any) -> None:
    """Refuses an environment whose observations or actions are not those of the policy.

    Raises:
        CheckpointError: other spaces than those of the checkpoint.
    """
    same = same_encoding(env.observation_space, policy.encoder.space)
    if not same or env.action_space != policy.action_space:
        raise CheckpointError(
            f"the checkpoint's policy does not fit observation space {env.observation_space!s:.200}"
            f" and action space {env.action_space!s:.200}: it is of {policy.encoder.space!s:.200} "
            f"and {policy.action_space!s:.200}"
        )


@contextmanager
def environment(experiment: Experiment, video: Path | None = None) -> Iterator[Any]:
    """Makes one environment that is not vectorised, and closes it at the end.

    Args:
        experiment: of `load`.
        video: directory in which every episode is recorded.

    Raises:
        ConfigError: it cannot be made, or cannot be recorded.
    """
    source, options = experiment.rollout.env, dict(experiment.rollout.env_config)
    name = env_name(source)
    if video is not None:
        options["render_mode"] = "rgb_array"
        if importlib.util.find_spec("moviepy") is None:
            raise ConfigError("--video needs moviepy, which is not installed: pip install moviepy")
        # pygame needs neither a window nor a sound card.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    try:
        if callable(source):
            index = experiment.rollout.last_worker_index + 1
            env = make_env(source, EnvContext(options, index, 0, 0, in_evaluation=True))
        else:
            env = gymnasium.make(source, **options)
    except Exception as error:  # an environment may raise anything
        problem = f"environment {name!r} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"{name!r} makes a vector environment; evaluation takes a single one: give --env"
        )
    if limit := experiment.rollout.max_frames_per_traj:
        env = TimeLimit(env, limit)
    try:
        if video is not None:
            if env.render_mode not in ("rgb_array", "rgb_array_list"):
                raise ConfigError(
                    "--video needs an environment with render_mode 'rgb_array'; "
                    f"got {env.render_mode!r}"
                )
            env = gymnasium.wrappers.RecordVideo(env, str(video), episode_trigger=lambda _: True)
        yield env
    except gymnasium.error.Error as error:  # rendering may fail at the first frame
        problem = f"environment {name!r}: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    finally:
        close_env(env, name)


def play(
    policy: Policy,
    env: Any,
    episodes: int,
    stochastic: bool = False,
    seed: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Episode]:
    """Plays complete episodes, as evaluation during training does.

    Args:
        policy: of the checkpoint.
        env: not vectorised; not closed.
        episodes: number of episodes.
        stochastic: sample actions; else the mode of the policy's distribution.
        seed: of the environment and of the actions; None draws one.
        say: gets a line for each episode as it ends, and one when an episode has gone on for
            10 s, 20 s, 40 s and so on.

    Raises:
        ConfigError: the environment returned values that are not finite.
    """
    # Reset by the step after an end, and stepped one by one: no episode begins that is not played,
    # which a video would show.
    single = TransformReward(env, reward_of)
    vector = SyncVectorEnv([lambda: single], copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    seeds = seeds_from([secrets.randbits(31) if seed is None else seed], 0)
    playing = WholeEpisodes(VectorSampler(vector, policy, 1, seeds), episodes, explore=stochastic)
    num_ended, steps, begun_s, wait_s = 0, 0, time.monotonic(), _LONG_S
    try:
        while not playing.done:
            problem = playing.play().non_finite
            if problem:
                raise ConfigError(f"the environment cannot be evaluated: {problem}")
            steps, number = steps + 1, len(playing.episodes)
            if number > num_ended:
                last = playing.episodes[-1]
                say(
                    f"episode {number:<4}return {last.episode_return:.2f}  "
                    f"length {last.episode_len}"
                )
                num_ended, steps, begun_s, wait_s = number, 0, time.monotonic(), _LONG_S
            elif (elapsed_s := time.monotonic() - begun_s) >= wait_s:
                wait_s *= 2
                say(
                    f"episode {number + 1:<4}has not ended after {steps:,} steps ({elapsed_s:.0f} "
                    "s); max_frames_per_traj=STEPS bounds the length of episodes"
                )
    finally:
        vector.closed = True  # its finalizer would close the environment
    return playing.episodes


def summary(values: Sequence[float]) -> str:
    """Returns mean, standard deviation and range in one line."""
    return (
        f"mean {np.mean(values):.2f}  std {np.std(values):.2f}  "
        f"min {np.min(values):.2f}  max {np.max(values):.2f}"
    )
