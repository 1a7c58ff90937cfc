"""`load`: restores the policy of a checkpoint without Ray, a trainer, workers or an environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from polopt.common.config import ConfigError
from polopt.common.plain_data import DecodeError, described
from polopt.policies.networks.network_registry import NETWORKS
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.saved_spaces import space_of
from polopt.trainers.saved_trainer import (
    checkpoint_path,
    find_checkpoint,
    name_previous,
    read_trainer_state,
    restore_state,
    unsaved_in,
)


def load(
    checkpoint: Any,
    policy_class: type[Policy] | None = None,
    device: str = "cpu",
    network: type[nn.Module] | None = None,
) -> Policy:
    """Returns the policy of a checkpoint. `policy.predict(observation)` chooses its actions.

    This function does not start Ray and does not make an environment. It does not import a module
    that only the checkpoint names, except policies and networks that are installed as entry points.

    Args:
        checkpoint: the directory of a checkpoint, the return value of `trainer.save()`, or the
            `checkpoint` of a Tune result. For a directory that contains checkpoints, the newest
            checkpoint is used.
        policy_class: class of the policy. This argument is required if the policy is neither built
            in nor registered.
        device: torch device of the network.
        network: class of the custom network. This argument is required if the network is not
            registered.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or its network differs
            from the network of the policy class. Also raised if the checkpoint lacks its spaces, or
            an option of the policy that could not be saved.
        ConfigError: the class of the policy or of the network is unknown, or the class of the
            policy does not accept an option in the checkpoint. The message names the class or the
            option. Also raised if `network` is given, but the policy has no custom network.
        Exception: torch cannot use `device`.
    """
    directory = find_checkpoint(checkpoint_path(checkpoint))
    return policy_of(read_whole(directory), directory, policy_class, network, device)


def read_whole(directory: Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or was not written by a
            trainer. The message also names the previous checkpoint if there is one.
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
    """Returns the policy of a checkpoint that was already read.

    Args:
        state: the state of the checkpoint, from `read_whole`.
        directory: directory of the checkpoint, for messages.
        policy_class: see `load`.
        network: see `load`.
        device: see `load`.

    Raises:
        CheckpointError, ConfigError, Exception: see `load`.
    """
    where = f"checkpoint {directory}"
    if unsaved := unsaved_in(state, "policy"):
        raise CheckpointError(
            f"{where} does not contain {described(unsaved)}, because such values cannot be saved. "
            "Restore the checkpoint in a trainer whose config has these values, and use "
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
            # Checked before the network is made. Otherwise, the config of an untrusted checkpoint
            # could make polopt allocate any amount of memory.
            raise CheckpointError(
                f"it has {saved:,} parameters, but its config and spaces describe a network of "
                f"{trained:,} parameters"
            )
        own = getattr(getattr(config, "model", None), "custom", None)
        if trained is None and own is None and cls.__module__.startswith("polopt."):
            # The networks of polopt can always be counted, unless an option has an absurd value.
            raise CheckpointError("its config and spaces describe a network that cannot be made")
        policy = cls(*found, config, device=device)
        problem = restore_state(state, policy)
    except (CheckpointError, DecodeError) as error:
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
            f"{where} has the policy {saved['name']!r:.80}, which is not known here: {error}. Give "
            "its class with polopt.load(checkpoint, policy_class=...) or --policy module:Class"
        ) from None


def _with_network(
    options: dict[str, Any], where: str, given: type[nn.Module] | None
) -> dict[str, Any]:
    """Returns the options of the policy. The class of the custom network is inserted if it is
    given."""
    model = options.get("model")
    saved = model.get("custom") if isinstance(model, Mapping) else None
    if given is not None:
        if saved is None:
            raise ConfigError(f"{where} has no custom network. Leave out network={given.__name__}")
        return {**options, "model": {**model, "custom": given}}  # type: ignore[dict-item]
    if saved is None:
        return options
    try:
        NETWORKS.get(saved if isinstance(saved, str) else repr(saved))
    except ConfigError as error:
        raise ConfigError(
            f"{where} has the network {saved!r:.80}, which is not known here: {error}. Give its "
            "class with polopt.load(checkpoint, network=...) or --network module:Class"
        ) from None
    return options


def _spaces(state: Mapping[str, Any]) -> tuple[Any, Any]:
    saved = state.get("spaces")
    if not isinstance(saved, Mapping) or not {"observation", "action"} <= set(saved):
        raise CheckpointError(
            "it lacks the observation and action spaces, because an older version wrote it. "
            "Restore it in a trainer, and save it again"
        )
    return (
        space_of(saved["observation"], "spaces/observation"),
        space_of(saved["action"], "spaces/action"),
    )
