"""`polopt evaluate`: plays episodes with the policy of a checkpoint, without Ray."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polopt.common.config import ConfigError
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.examples import Example, apply_changes
from polopt.trainers.command_line.names import import_from, named
from polopt.trainers.experiment import EvaluationConfig, Experiment, merged_options
from polopt.trainers.saved_config import argument_for, described, unsaved_in
from polopt.trainers.saved_policy import read_whole

#: Options of the environment, which an argument can change.
_KEYS = ("env_config", "max_frames_per_traj")


def load(
    checkpoint: Path, env: Any = None, changes: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[dict[str, Any], Experiment]:
    """Returns state and experiment of a checkpoint, with the environment of its evaluation. The
    experiment's environment is what `resolve_env` returned: it is not resolved again, which would
    allow imports.

    Args:
        checkpoint: its directory.
        env: replaces the environment of the checkpoint: what the option `env` takes. It is required
            if the checkpoint's is a callable, or in a module, which is imported only if the user
            names it.
        changes: options of the environment, by key or as `key=value` arguments.

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
    given = dict(changes) if isinstance(changes, Mapping) else _changes(changes)
    evaluation = EvaluationConfig.parse(config.get("evaluation_config", {}))
    _check_is_whole(checkpoint, state, given, evaluation.env_config)
    rollout = RolloutConfig.parse({key: config[key] for key in _KEYS if key in config})
    config = {**config, "env_config": rollout.env_config, **evaluation.changes(rollout)}
    options = merged_options(config["env_config"], given.get("env_config", {}))
    config |= {**given, "env_config": options}
    if env is not None:
        is_name = isinstance(env, str) and ":" in env
        if is_name:  # else the current directory may hold modules of another user
            import_from(Path.cwd())
        config["env"] = named(env, "--env") if is_name and ".py:" in env else env
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


def summary(values: Sequence[float]) -> str:
    """Returns mean, standard deviation and range in one line."""
    return (
        f"mean {np.mean(values):.2f}  std {np.std(values):.2f}  "
        f"min {np.min(values):.2f}  max {np.max(values):.2f}"
    )
