"""`polopt evaluate`: plays episodes with the policy of a checkpoint, without Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformReward

from polopt.common.config import ConfigError
from polopt.common.episodes import Episode
from polopt.policies.policy import Policy
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.creators import EnvContext, make_env
from polopt.rollouts.envs.env_api import reward_of, same_encoding
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.missing_packages import missing_package
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeds import seeds_from
from polopt.rollouts.sampling.whole_episodes import WholeEpisodes
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.names import import_from, named
from polopt.trainers.experiment import Experiment
from polopt.trainers.saved_policy import read_whole


def load(checkpoint: Path, env: str | None = None) -> tuple[dict[str, Any], Experiment]:
    """Returns state and experiment of a checkpoint. The experiment's environment is what
    `resolve_env` returned: it is not resolved again, which would allow imports.

    Args:
        checkpoint: its directory.
        env: replaces the environment of the checkpoint; required if that is a callable, or in a
            module, which is imported only if the user names it.

    Raises:
        CheckpointError: missing, incomplete, damaged, or not one of a trainer.
        ConfigError: unknown environment or plugin, or `env` is required.
    """
    state = read_whole(checkpoint)
    # The optimizer has no effect on evaluation, and may not be installed here. The policy is made
    # by `polopt.trainers.saved_policy`.
    plugins = ("optimizer", "policy")
    config = {key: value for key, value in state["config"].items() if key not in plugins}
    if env is not None:
        if ":" in env:  # else the current directory may hold modules of another user
            import_from(Path.cwd())
        config["env"] = named(env, "--env") if ".py:" in env else env
    if config.get("env") is None:
        raise ConfigError(
            f"checkpoint {checkpoint} was trained on a callable environment, which it cannot "
            "hold; name it with --env module:callable"
        )
    try:
        source = resolve_env(config["env"], allow_import=env is not None)
    except ConfigError as error:
        hint = f"; to import it: --env {shlex.quote(str(config['env']))}"
        raise ConfigError(f"{error}{hint * (env is None and ':' in str(config['env']))}") from None
    return state, Experiment.parse({**config, "env": source}, {})


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
            env = make_env(source, EnvContext(options, 0, 0, 0))
        else:
            env = gymnasium.make(source, **options)
    except (TypeError, ImportError, gymnasium.error.Error) as error:
        problem = f"environment {name!r} cannot be made: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"{name!r} makes a vector environment; evaluation takes a single one: give --env"
        )
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
    policy: Policy, env: Any, episodes: int, stochastic: bool = False, seed: int | None = None
) -> list[Episode]:
    """Plays complete episodes, as evaluation during training does.

    Args:
        policy: of the checkpoint.
        env: not vectorised; not closed.
        episodes: number of episodes.
        stochastic: sample actions; else the mode of the policy's distribution.
        seed: of the environment and of the actions; None draws one.

    Raises:
        ConfigError: the environment returned values that are not finite.
    """
    # Reset by the step after an end, and stepped one by one: no episode begins that is not played,
    # which a video would show.
    single = TransformReward(env, reward_of)
    vector = SyncVectorEnv([lambda: single], copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    seeds = seeds_from([secrets.randbits(31) if seed is None else seed], 0)
    playing = WholeEpisodes(VectorSampler(vector, policy, 1, seeds), episodes, explore=stochastic)
    try:
        while not playing.done:
            problem = playing.play().non_finite
            if problem:
                raise ConfigError(f"the environment cannot be evaluated: {problem}")
    finally:
        vector.closed = True  # its finalizer would close the environment
    return playing.episodes


def summary(values: Sequence[float]) -> str:
    """Returns mean, standard deviation and range in one line."""
    return (
        f"mean {np.mean(values):.2f}  std {np.std(values):.2f}  "
        f"min {np.min(values):.2f}  max {np.max(values):.2f}"
    )
