"""Restores the policy of a checkpoint: in the policy of a trainer, or with `load` in a policy that
this module makes from the config of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gymnasium import spaces
from torch import nn

from polopt.common.config import ConfigError, shown
from polopt.common.plain_data import DecodeError, described
from polopt.policies.networks.model_config import NETWORKS
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.policies.policy_registry import POLICIES
from polopt.replay.row_store import RowFilesError
from polopt.trainers.checkpoint_fields import unsaved_in, value_at
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.find_checkpoint import checkpoint_path, find_checkpoint, read_whole
from polopt.trainers.saved_spaces import space_of

logger = logging.getLogger("polopt")

#: Errors that `set_state` raises if the state is from another policy, or was edited.
MISFITS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


def misfit(state: Mapping[str, Any], policy: Policy) -> str:
    """Returns how the network of a checkpoint differs from the network of a policy. Returns an
    empty string if the networks are the same.

    Args:
        state: the state of the checkpoint, from `read_trainer_state`.
        policy: the policy that will be restored.
    """
    saved = state["optimizer"]["policy"]
    if "policies" in saved and not isinstance(policy, PolicyGroup):
        return (
            f"it has the policies {shown(list(saved['policies']))}, and this run has one policy. "
            "polopt.load(checkpoint, policy=NAME) loads one of them"
        )
    if "policies" not in saved and isinstance(policy, PolicyGroup):
        return (
            f"it has one policy, and this run has the policies {shown(list(policy.policies))}. "
            "trainer.restore_policy(NAME, checkpoint) restores one of them"
        )
    try:
        policy.check_network(str(saved.get("network")))
    except ValueError:
        return _other_network(state, policy)
    return ""


def restore_state(
    state: Mapping[str, Any], policy: Policy, rest: Callable[[], None] | None = None
) -> str:
    """Restores a policy whose network is the same as in the checkpoint.

    Warns if the action space is a Box, and the policy has other values of `normalize_actions` or
    `clip_actions` than the checkpoint. The policy then uses the values in the checkpoint.

    Args:
        state: the state of the checkpoint, from `read_trainer_state`.
        policy: the policy to restore.
        rest: a function that restores everything else. It is called after the policy is restored.
            `None` means that only the policy is restored.

    Returns:
        the reason why the checkpoint does not fit, or an empty string if it fits.

    Raises:
        RuntimeError: `rest` raised this error, for example because workers failed or episodes could
            not begin. The checkpoint is not the cause. For a `RowFilesError`, the reason is
            returned instead.
    """
    before = policy.acting
    try:
        policy.set_state(state["optimizer"]["policy"])
    except (*MISFITS, RuntimeError) as error:  # torch raises RuntimeError if a shape differs
        return f"{type(error).__name__}: {error}"
    if isinstance(policy.action_space, spaces.Box) and policy.acting[:2] != before[:2]:
        logger.warning(
            "the policy scales actions as in its checkpoint, with normalize_actions=%s and "
            "clip_actions=%s. The values in the config, %s and %s, are ignored",
            *policy.acting[:2],
            *before[:2],
        )
    if rest is not None:
        try:
            rest()
        except (*MISFITS, RowFilesError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _other_network(state: Mapping[str, Any], policy: Policy) -> str:
    saved_model = value_at(state["config"], ("policy", "model"))
    if not isinstance(saved_model, Mapping):
        saved_model = {}
    different = [
        f"{key}: checkpoint {saved_model[key]!r:.60}, config {value!r:.60}"
        for key, value in policy.config.model.named().items()
        if key in saved_model and _plain(saved_model[key]) != _plain(value)
    ]
    why = "; ".join(different) or "another observation or action space"
    env = state["config"].get("env")
    where = "a callable environment" if env is None else f"{env!r:.80}"
    return f"its network is different, and was trained on {where} ({why})"


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def load(
    checkpoint: Any,
    policy_class: type[Policy] | None = None,
    device: str = "cpu",
    network: type[nn.Module] | None = None,
    *,
    policy: str | None = None,
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
        policy: the name of the policy, if the run had several policies.

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
    state = state_of_policy(read_whole(directory), f"checkpoint {directory}", policy)
    return policy_of(state, directory, policy_class, network, device)


def state_of_policy(state: Mapping[str, Any], where: str, name: str | None) -> dict[str, Any]:
    """Returns the state of a checkpoint as if the run had only the policy `name`.

    Args:
        state: the state of the checkpoint, from `read_whole`.
        where: name of the checkpoint, for messages.
        name: the name of a policy. None for a checkpoint with a single policy.

    Raises:
        CheckpointError: the checkpoint has no policy of this name, or several policies although
            `name` is None.
    """
    optimizer, config = state["optimizer"], state["config"]
    members = optimizer["policy"].get("policies")
    if members is None:
        if name is None:
            return dict(state)
        raise CheckpointError(f"{where} has one policy without a name. Leave out policy={name!r}")
    if name not in members:
        given = "no name was given" if name is None else f"got {name!r}"
        allowed = ", ".join(f"policy={one!r}" for one in members)
        raise CheckpointError(f"{where} has several policies, and {given}. Allowed: {allowed}")
    try:
        options = dict((config.get("policies") or {}).get(name, {}))
        of_run = dict(config["policy"])
        if "policy" in options:
            of_run = {"name": options.pop("policy")}
        spaces_of = {kind: dict(one["spaces"])[name] for kind, one in state["spaces"].items()}
    except MISFITS as error:
        raise CheckpointError(
            f"{where}: the options or the spaces of policy {name!r} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None
    return {
        **state,
        "config": {**config, "policy": {**of_run, **options}},
        "optimizer": {**optimizer, "policy": members[name]},
        "spaces": spaces_of,
    }


def policy_of(
    state: Mapping[str, Any],
    directory: Path,
    policy_class: type[Policy] | None = None,
    network: type[nn.Module] | None = None,
    device: str = "cpu",
) -> Policy:
    """Returns the policy of a checkpoint that was already read. If the run had several policies,
    returns a `PolicyGroup`.

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
    if "policies" in state["optimizer"]["policy"]:
        return PolicyGroup.of(
            {
                name: policy_of(
                    state_of_policy(state, where, name), directory, policy_class, network, device
                )
                for name in state["optimizer"]["policy"]["policies"]
            }
        )
    if unsaved := unsaved_in(state, "policy"):
        raise CheckpointError(
            f"{where} does not contain {described(unsaved)}, because such values cannot be saved. "
            "Restore the checkpoint in a trainer whose config has these values, and use "
            "trainer.get_policy()"
        )
    cls, options = _policy_class(state["config"], where, policy_class)
    options = _with_network(options, where, network)
    try:
        config = cls.config_class.parse(options, "policy")
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
    saved = value_at(options, ("model", "custom"))
    if given is not None:
        if saved is None:
            raise ConfigError(f"{where} has no custom network. Leave out network={given.__name__}")
        return {**options, "model": {**options["model"], "custom": given}}
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
