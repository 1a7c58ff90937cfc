"""Playing episodes with the policy of a checkpoint; Ray is not started."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from polopt.common.config import ConfigError
from polopt.policies.policy import Policy
from polopt.rollouts.envs.creators import EnvContext, call_creator
from polopt.rollouts.envs.resolving import resolve_env
from polopt.trainers.checkpoint_fallback import name_previous
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, read_trainer_state
from polopt.trainers.config import Experiment

logger = logging.getLogger("polopt")


@dataclass(frozen=True)
class Episodes:
    """What was played.

    Attributes:
        returns: undiscounted sum of rewards of each episode.
        lengths: environment steps of each episode.
    """

    returns: list[float]
    lengths: list[int]


def find_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest whole one below it (a trial's or an
    experiment's directory); damaged ones that are newer are warned of.

    Raises:
        CheckpointError: there is none.
    """
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"no such directory: {path}")
    # One whose saving was cut off has no manifest.
    manifests = list(path.glob("**/manifest.json"))
    manifests.sort(key=lambda manifest: (manifest.stat().st_mtime_ns, str(manifest)), reverse=True)
    for manifest in manifests:
        try:
            read_checkpoint(manifest.parent)
        except CheckpointError as error:
            logger.warning("%s; taking the one before", error)
        else:
            return manifest.parent
    raise CheckpointError(f"no complete checkpoint in or below {path}")


def load(checkpoint: Path, env: str | None = None) -> tuple[dict[str, Any], Experiment]:
    """State and experiment of a checkpoint.

    Args:
        checkpoint: its directory.
        env: in place of the environment it was trained on; required if that was a callable.

    Raises:
        CheckpointError: missing, incomplete, damaged, or not one of a trainer.
        ConfigError: its environment or a plugin is not known here.
    """
    try:
        state = read_trainer_state(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(checkpoint)}") from None
    # What optimized it does not matter any more, and may not be installed here.
    config = {key: value for key, value in state["config"].items() if key != "optimizer"}
    if env is not None:
        config["env"] = _named_env(env)
    if config.get("env") is None:
        raise ConfigError(
            f"checkpoint {checkpoint} was trained on a callable environment, which it can not "
            "hold; name it with --env module:callable"
        )
    return state, Experiment.parse(config, {})


def make_policy(experiment: Experiment, state: dict[str, Any], env: Any) -> Policy:
    """The policy of a checkpoint, for an environment.

    Raises:
        ConfigError: the environment's spaces are not supported.
        CheckpointError: the checkpoint's network is not made for them.
    """
    spaces = env.observation_space, env.action_space
    policy: Policy = experiment.policy_class(*spaces, experiment.policy)
    try:
        policy.set_state(state["optimizer"]["policy"])
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint's policy does not fit observation space {spaces[0]} and action "
            f"space {spaces[1]}: {error}"
        ) from None
    return policy


@contextmanager
def environment(experiment: Experiment, video: Path | None = None) -> Iterator[Any]:
    """One environment, not vectorised, closed at the end; with `video` it records every episode
    there.

    Raises:
        ConfigError: it can not be made, or can not be recorded.
    """
    if video is not None and importlib.util.find_spec("moviepy") is None:
        raise ConfigError("--video needs moviepy, which is not installed: pip install moviepy")
    source = resolve_env(experiment.rollout.env)
    try:
        env = _make(source, dict(experiment.rollout.env_config), video)
        try:
            yield env
        finally:
            env.close()
    except gymnasium.error.Error as error:  # also of what drawing needs, which shows late
        raise ConfigError(f"environment {experiment.rollout.env!r}: {error}") from error


def _make(source: Any, env_config: dict[str, Any], video: Path | None) -> Any:
    if video is not None:
        env_config["render_mode"] = "rgb_array"
    try:
        if callable(source):
            env = call_creator(source, EnvContext(env_config, 0, 0, 0))
        else:
            env = gymnasium.make(source, **env_config)
    except (TypeError, ImportError) as error:
        raise ConfigError(f"environment {source!r} can not be made: {error}") from error
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"{source!r} makes a vector environment; evaluation takes a single one: give --env"
        )
    return env if video is None else _recorded(env, video)


def play(
    policy: Policy, env: Any, episodes: int, stochastic: bool = False, seed: int | None = None
) -> Episodes:
    """Plays whole episodes.

    Args:
        policy: acts.
        env: not vectorised.
        episodes: how many.
        stochastic: draw actions; else the mode of the policy's distribution.
        seed: of the environment and of the actions.
    """
    rng = np.random.default_rng(seed)
    returns, lengths = [], []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        total, length, over = 0.0, 0, False
        while not over:
            encoded = policy.encoder.encode_one(observation)[None]
            actions, _, _ = policy.compute_actions(encoded, explore=stochastic, rng=rng)
            observation, reward, terminated, truncated, _ = env.step(actions[0])
            total, length = total + float(reward), length + 1
            over = terminated or truncated
        returns.append(total)
        lengths.append(length)
    return Episodes(returns, lengths)


def summary(values: Sequence[float]) -> str:
    """Mean, standard deviation and range in one line."""
    return (
        f"mean {np.mean(values):.2f}  std {np.std(values):.2f}  "
        f"min {np.min(values):.2f}  max {np.max(values):.2f}"
    )


def _recorded(env: Any, video: Path) -> Any:
    if env.render_mode not in ("rgb_array", "rgb_array_list"):
        raise ConfigError(
            f"--video needs an environment with render_mode 'rgb_array'; got {env.render_mode!r}"
        )
    # No window and no sound card for environments that draw with pygame.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    return gymnasium.wrappers.RecordVideo(env, str(video), episode_trigger=lambda _: True)


def _named_env(name: str) -> Any:
    """`module:attribute` gives the attribute if it is callable; everything else is an id."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return name
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look where it is called
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"--env {name}: {error}") from None
    found = getattr(module, attribute, None)
    return found if callable(found) else name
