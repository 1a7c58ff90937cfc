"""`load`: the policy of a checkpoint, without Ray, a trainer, workers or an environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.network_registry import NETWORKS
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.saved_config import described, unsaved_in
from polopt.trainers.saved_spaces import space_of
from polopt.trainers.saved_trainer import (
    checkpoint_path,
    find_checkpoint,
    name_previous,
    read_trainer_state,
    restore_state,
)


def load(
    checkpoint: Any,
    policy_class: type[Policy] | None = None,
    device: str = "cpu",
    network: type[nn.Module] | None = None,
) -> Policy:
    """Returns the policy of a checkpoint, which acts as in training: `policy.predict(observation)`.

    Starts nothing, and needs neither Ray nor the environment. Nothing that the checkpoint names is
    imported, except policies and networks that are installed as entry points.

    Args:
        checkpoint: a directory that a trainer saved, or one above it, of which the newest is taken.
            Or what `trainer.save()` returned, or the `checkpoint` of a Tune result.
        policy_class: the class of the policy, where it is neither built in nor registered.
        device: torch device of the network.
        network: the class of a custom network, where it is not registered.

    Raises:
        CheckpointError: missing, incomplete, damaged, of another network, without spaces, or
            without an option of the policy that could not be saved.
        ConfigError: the class of the policy or of the network is not known. The message names it.
    """
    directory = find_checkpoint(checkpoint_path(checkpoint))
    return policy_of(read_whole(directory), directory, policy_class, network, device)


def read_whole(directory: Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote. The message of an error also names the one before.

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
    network: type[nn.Module] | None = None,
    device: str = "cpu",
) -> Policy:
    """Returns the policy of a checkpoint that was read.

    Args:
        state: from `read_whole`.
        directory: of the checkpoint, for messages.
        policy_class: see `load`.
        network: see `load`.
        device: see `load`.

    Raises:
        CheckpointError, ConfigError: see `load`.
    """
    where = f"checkpoint {directory}"
    if unsaved := unsaved_in(state, "policy"):
        raise CheckpointError(
            f"{where} does not hold {described(unsaved)}, because a value of such a type cannot "
            "be saved. Restore it in a trainer whose config has the value, and use "
            "trainer.get_policy()"
        )
    cls, options = _policy_class(state["config"], where, policy_class)
    options = _with_network(options, where, network)
    try:
        config = cls.config_class.parse(cls.config_class.of_checkpoint(options), "policy")
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


def _with_network(
    options: dict[str, Any], where: str, given: type[nn.Module] | None
) -> dict[str, Any]:
    """The options of the policy with the class of its custom network, if it has one."""
    model = options.get("model")
    saved = model.get("custom") if isinstance(model, Mapping) else None
    if given is not None:
        if saved is None:
            raise ConfigError(f"{where} has no custom network: network={given.__name__} is not its")
        return {**options, "model": {**model, "custom": given}}  # type: ignore[dict-item]
    if saved is None:
        return options
    try:
        NETWORKS.get(saved if isinstance(saved, str) else repr(saved))
    except ConfigError as error:
        raise ConfigError(
            f"{where} is of network {saved!r:.80}, which is not known here: {error}. Give its "
            "class: polopt.load(checkpoint, network=...), --network module:Class"
        ) from None
    return options


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
