"""`polopt evaluate`: plays episodes with the policy of a checkpoint, without Ray."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformReward
from torch import nn

from polopt.common.config import ConfigError
from polopt.common.episodes import Episode
from polopt.policies.policy import Policy
from polopt.policies.spaces import ObservationEncoder
from polopt.rollouts.envs.checking import reward_of
from polopt.rollouts.envs.closing import close_env
from polopt.rollouts.envs.creators import EnvContext, make_env
from polopt.rollouts.envs.resolving import env_name, resolve_env
from polopt.rollouts.envs.saving import set_evaluation_statistics
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeding import seeds_from
from polopt.rollouts.sampling.whole_episodes import WholeEpisodes
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.config import Experiment
from polopt.trainers.loading import read_whole


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
    # by `polopt.trainers.loading`.
    plugins = ("optimizer", "policy")
    config = {key: value for key, value in state["config"].items() if key not in plugins}
    if env is not None:
        config["env"] = named(env, "--env")
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
        ConfigError: an observation or action space that no policy supports.
        CheckpointError: other spaces than those of the checkpoint.
    """
    encoder = ObservationEncoder(env.observation_space)
    same = (encoder.shape, encoder.dtype) == (policy.encoder.shape, policy.encoder.dtype)
    if not same or env.action_space != policy.action_space:
        raise CheckpointError(
            f"the checkpoint's policy does not fit observation space {env.observation_space!s:.200}"
            f" and action space {env.action_space!s:.200}: it is of {policy.encoder.space!s:.200} "
            f"and {policy.action_space!s:.200}"
        )


def restore_statistics(state: dict[str, Any], env: Any) -> None:
    """Gives an environment the running statistics with which the checkpoint's policy was trained;
    see `set_evaluation_statistics`.

    Raises:
        CheckpointError: the environment normalises observations in another way.
    """
    try:
        workers = state["optimizer"].get("workers", {}).values()
        parts = [one["statistics"] for one in workers if one.get("statistics")]
        if parts:
            set_evaluation_statistics(env, parts)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            "the checkpoint's running statistics of observations do not fit the environment; name "
            f"one with the wrappers of the training by --env ({why})"
        ) from error


@contextmanager
def environment(experiment: Experiment, video: Path | None = None) -> Iterator[Any]:
    """Makes one environment that is not vectorised, and closes it at the end.

    Args:
        experiment: of `load`.
        video: directory in which every episode is recorded.

    Raises:
        ConfigError: it cannot be made, or cannot be recorded.
    """
    if video is not None and importlib.util.find_spec("moviepy") is None:
        raise ConfigError("--video needs moviepy, which is not installed: pip install moviepy")
    source = experiment.rollout.env
    try:
        env = _make(source, dict(experiment.rollout.env_config), video)
        try:
            yield env
        finally:
            close_env(env, env_name(source))
    except gymnasium.error.Error as error:  # rendering may fail at the first frame
        raise ConfigError(f"environment {env_name(source)!r}: {error}") from error


def _make(source: Any, env_config: dict[str, Any], video: Path | None) -> Any:
    if video is not None:
        env_config["render_mode"] = "rgb_array"
    try:
        if callable(source):
            env = make_env(source, EnvContext(env_config, 0, 0, 0))
        else:
            env = gymnasium.make(source, **env_config)
    except (TypeError, ImportError) as error:
        raise ConfigError(f"environment {env_name(source)!r} cannot be made: {error}") from error
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"{env_name(source)!r} makes a vector environment; evaluation takes a single one: "
            "give --env"
        )
    return env if video is None else _recorded(env, video)


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


def _recorded(env: Any, video: Path) -> Any:
    if env.render_mode not in ("rgb_array", "rgb_array_list"):
        raise ConfigError(
            f"--video needs an environment with render_mode 'rgb_array'; got {env.render_mode!r}"
        )
    # pygame needs neither a window nor a sound card.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    return gymnasium.wrappers.RecordVideo(env, str(video), episode_trigger=lambda _: True)


def named(name: str, option: str) -> Any:
    """`module:name` and `FILE.py:name` give the callable of that name; all else is an id. Importing
    `module` may register it.

    Raises:
        ConfigError: the module cannot be imported, or the file does not define the name.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        return name
    try:
        if module_name.endswith(".py"):
            module = _module_of_file(Path(module_name))
        else:
            module = importlib.import_module(module_name)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{option} {name}: {error}") from None
    found = getattr(module, attribute, None)
    if callable(found):
        return found
    if module_name.endswith(".py"):
        raise ConfigError(f"{option} {name}: {module_name} defines no callable {attribute!r}")
    return name


def named_classes(
    policy: str | None, network: str | None
) -> tuple[type[Policy] | None, type[nn.Module] | None]:
    """Returns the classes that `--policy` and `--network` name, None without a name.

    Raises:
        ConfigError: there is no such class.
    """
    return (
        _named_class(policy, "--policy", Policy, "polopt.Policy"),
        _named_class(network, "--network", nn.Module, "torch.nn.Module"),
    )


def _named_class(name: str | None, option: str, base: Any, base_name: str) -> Any:
    found = None if name is None else named(name, option)
    if found is None or (isinstance(found, type) and issubclass(found, base)):
        return found
    if isinstance(found, str) and ":" in found:  # else `named` returns what the module has
        module_name, _, attribute = found.rpartition(":")
        raise ConfigError(f"{option} {name}: {module_name} defines no class {attribute!r}")
    raise ConfigError(
        f"{option} {name}: got {found!r:.100}. Allowed: module:Class or FILE.py:Class, a subclass "
        f"of {base_name}"
    )


def _module_of_file(path: Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"polopt_env_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_on_command_line(value: Any) -> str | None:
    """Returns the value of `--env` or `--network` with which `polopt evaluate` finds an environment
    or a network class; empty if the checkpoint is enough, None if there is no such value (a local
    function, class or a lambda)."""
    if isinstance(value, str):
        return value if ":" in value else ""
    name, module = getattr(value, "__qualname__", ""), inspect.getmodule(value)
    if not name.isidentifier() or getattr(module, name, None) is not value:
        return None
    file = Path(getattr(module, "__file__", None) or "")
    # The name is enough for installed modules and those of the current directory.
    if file.parent == Path.cwd() or "site-packages" in file.parts:
        return f"{_import_name(module)}:{name}"
    return f"{file}:{name}"


def _import_name(module: Any) -> str:
    name = str(module.__name__)
    return Path(module.__file__).stem if name.startswith("polopt_config_") else name
