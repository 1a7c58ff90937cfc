"""`polopt evaluate`: reads the state and the config of a checkpoint for playing episodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polopt.command_line.examples import Example, apply_changes
from polopt.command_line.names import import_from, named
from polopt.command_line.output import say
from polopt.common.config import ConfigError
from polopt.common.episodes import Episode
from polopt.common.plain_data import argument_for, described
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.checkpoint_fields import unsaved_in
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import read_whole
from polopt.trainers.saved_experiment import is_given
from polopt.trainers.trainer_config import EvaluationConfig, merged_options

#: Options of the environment that an argument can change.
_KEYS = ("env_config", "max_frames_per_traj")


def load(
    checkpoint: Path, env: Any = None, changes: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[dict[str, Any], Experiment]:
    """Returns the state of a checkpoint, and its config with the environment of evaluation.

    The environment in the returned config is a result of `resolve_env`. Do not call `resolve_env`
    again, because this could import a module that only the checkpoint names.

    Args:
        checkpoint: directory of the checkpoint.
        env: replaces the environment of the checkpoint. The option `env` accepts the same values.
            This argument is required if the environment of the checkpoint is a callable or in a
            module. A module is imported only if the user names it.
        changes: options of the environment, as a dict or as `key=value` arguments.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or was not written by a
            trainer. Also raised if a value of `env_config` is neither in the checkpoint nor in
            `changes`.
        ConfigError: the environment is unknown, an argument or an option in the checkpoint is
            wrong, or `env` is required but not given.
    """
    state = read_whole(checkpoint)
    # The optimizer has no effect on evaluation, and may not be installed here.
    # `polopt.trainers.saved_policy` makes the policy.
    plugins = ("optimizer", "policy")
    config = {key: value for key, value in state["config"].items() if key not in plugins}
    given = dict(changes) if isinstance(changes, Mapping) else _changes(changes)
    evaluation = EvaluationConfig.parse(config.get("evaluation_config", {}))
    _check_is_whole(checkpoint, state, given, evaluation.env_config)
    rollout = RolloutConfig.parse({key: config[key] for key in _KEYS if key in config})
    config = {**config, "env_config": rollout.env_config, **evaluation.changes(rollout)}
    options = merged_options(config["env_config"], given.get("env_config", {}))
    config |= {**given, "env_config": options}
    mapping = config.get("policy_mapping_fn")
    if isinstance(mapping, str):
        raise ConfigError(
            f"checkpoint {checkpoint}: policy_mapping_fn is {mapping!r:.80}. polopt does not "
            "import a module that only a saved config names. Restore the checkpoint in a trainer, "
            "and call its evaluate()"
        )
    if env is not None:
        is_name = isinstance(env, str) and ":" in env
        # Without a module in `env`, the current directory is not added to the path, because it may
        # contain modules of an untrusted user.
        if is_name:
            import_from(Path.cwd())
        config["env"] = named(env, "--env") if is_name and ".py:" in env else env
    elif "evaluation_config.env" in state.get("unsaved", {}):
        config["env"] = None
    if config.get("env") is None:
        raise ConfigError(
            f"the environment of checkpoint {checkpoint} is an object that a checkpoint cannot "
            "contain. Give the environment as `env` (on the command line: --env "
            "module:callable)"
        )
    try:
        source = resolve_env(config["env"], allow_import=env is not None)
    except ConfigError as error:
        name = str(config["env"])
        hint = f". To import it, give env={name!r} (on the command line: --env {shlex.quote(name)})"
        raise ConfigError(f"{error}{hint * (env is None and ':' in name)}") from None
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
    """Checks that all options of the environment are in the checkpoint or are given.

    Args:
        checkpoint: directory of the checkpoint, for messages.
        state: state of the checkpoint.
        given: options that the user gives.
        of_evaluation: `env_config` in the checkpoint's `evaluation_config`. It replaces options of
            training.

    Raises:
        CheckpointError: an option is missing.
    """
    unsaved = unsaved_in(state, "env_config", "evaluation_config")
    unsaved.pop("evaluation_config.env", None)
    missing, arguments = {}, []
    for path, kind in unsaved.items():
        ours = path.removeprefix("evaluation_config.")
        argument = argument_for(ours)
        keys = argument.split(".")
        inner = len(keys) > 1
        replaced = ours == path and inner and is_given({"env_config": of_evaluation}, keys)
        if not replaced and not is_given(given, keys):
            missing[ours] = kind
            arguments.append(f"{argument}=VALUE" if inner else f"{argument}={{KEY: VALUE}}")
    if missing:
        raise CheckpointError(
            f"checkpoint {checkpoint} does not contain {described(missing)}, because such values "
            "cannot be saved. Without them, the environment may be different. Give them with "
            "polopt.evaluate(..., env_config={KEY: VALUE}), or on the command line with polopt "
            f"evaluate ... {' '.join(dict.fromkeys(arguments))}. If only Python can make a value, "
            "give null on the command line, and use --env FILE.py:callable with a callable that "
            "makes the environment with this value"
        )


def say_policies(played: Sequence[Episode]) -> None:
    """Prints the returns of each policy, if there are several."""
    names = list(dict.fromkeys(name for episode in played for name in episode.policy_returns))
    for name in names if len(names) > 1 else ():
        own = [one.policy_returns[name] for one in played if name in one.policy_returns]
        say(f"  {name:<9} {summary(own)}  ({len(own)} episodes)")


def summary(values: Sequence[float]) -> str:
    """Returns mean, standard deviation and range in one line."""
    return (
        f"mean {np.mean(values):.2f}  std {np.std(values):.2f}  "
        f"min {np.min(values):.2f}  max {np.max(values):.2f}"
    )
