"""`load`: the policy of a checkpoint, without Ray, a trainer, workers or an environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.policies.policy import Policy
from polopt.policies.registry import POLICIES
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.restoring import (
    find_checkpoint,
    name_previous,
    read_trainer_state,
    restore_state,
)
from polopt.trainers.saved_spaces import space_of


def load(checkpoint: Any, policy_class: type[Policy] | None = None, device: str = "cpu") -> Policy:
    """Returns the policy of a checkpoint, which acts as in training: `policy.predict(observation)`.

    Starts nothing, and needs neither Ray nor the environment. Nothing that the checkpoint names is
    imported, except policies that are installed as entry points.

    Args:
        checkpoint: a directory that a trainer saved, or one above it, of which the newest is taken;
            or what `trainer.save()` returned, or the `checkpoint` of a Tune result.
        policy_class: the class of the policy, where it is neither built in nor registered.
        device: torch device of the network.

    Raises:
        CheckpointError: missing, incomplete, damaged, of another network, or without spaces.
        ConfigError: the policy's class is not known; the message names it.
    """
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    directory = find_checkpoint(Path(getattr(checkpoint, "path", checkpoint)).expanduser())
    return policy_of(read_whole(directory), directory, policy_class, device)


def read_whole(directory: Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote; the message of an error also names the one before.

    Raises:
        CheckpointError: missing, incomplete, damaged, or not one of a trainer.
    """
    try:
        return read_trainer_state(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def policy_of(
    state: Mapping[str, Any],
    directory: Path,
    policy_class: type[Policy] | None = None,
    device: str = "cpu",
) -> Policy:
    """Returns the policy of a checkpoint that was read.

    Args:
        state: from `read_whole`.
        directory: of the checkpoint, for messages.
        policy_class: see `load`.
        device: see `load`.

    Raises:
        CheckpointError, ConfigError: see `load`.
    """
    where = f"checkpoint {directory}"
    cls, options = _policy_class(state["config"], where, policy_class)
    try:
        config = cls.config_class.parse(options, "policy")
        found = _spaces(state)
        trained = cls.count_parameters(*found, config)
        saved = len(state["optimizer"]["policy"]["params"])
        if trained is not None and trained > saved:
            # Before memory is allocated: the sizes are the checkpoint's, which may be anybody's.
            raise CheckpointError(
                f"it holds {saved:,} parameters, and its config and spaces describe a network of "
                f"{trained:,}"
            )
        policy = cls(*found, config, device=device)
        problem = restore_state(state, policy)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if problem:
        raise CheckpointError(f"{where} does not fit policy {cls.__name__}: {problem}")
    return policy


def _policy_class(
    config: Mapping[str, Any], where: str, given: type[Policy] | None
) -> tuple[type[Policy], dict[str, Any]]:
    saved = config.get("policy")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("name"), str):
        raise CheckpointError(f"{where}: field 'config/policy' has no name")
    options = {key: value for key, value in saved.items() if key != "name"}
    if given is not None:
        return POLICIES.get(given), options
    try:
        return POLICIES.get(saved["name"]), options
    except ConfigError as error:
        raise ConfigError(
            f"{where} is of policy {saved['name']!r:.80}, which is not known here: {error}. Give "
            "its class: polopt.load(checkpoint, policy_class=...), --policy module:Class"
        ) from None


def _spaces(state: Mapping[str, Any]) -> tuple[Any, Any]:
    saved = state.get("spaces")
    if not isinstance(saved, Mapping) or not {"observation", "action"} <= set(saved):
        raise CheckpointError(
            "it holds no spaces, as those of older versions: restore it in a trainer, and save"
        )
    return (
        space_of(saved["observation"], "spaces/observation"),
        space_of(saved["action"], "spaces/action"),
    )
