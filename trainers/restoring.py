"""Restores what a trainer saved: finds a checkpoint, reads it, checks its fields, and restores the
policy. If a checkpoint cannot be read, finds an older one of the same run."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from polopt.common.config import ConfigError, shown
from polopt.common.files import printable
from polopt.common.plain_data import DecodeError, described
from polopt.policies.networks.model_config import NETWORKS, ModelConfig
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.policies.policy_registry import POLICIES
from polopt.replay.row_store import RowFilesError
from polopt.trainers.checkpoints import (
    FILES,
    CheckpointError,
    DamagedCheckpoint,
    check_further_files,
    read_checkpoint,
    read_state_file,
)
from polopt.trainers.saved_spaces import space_of

if TYPE_CHECKING:
    from ray.tune import Checkpoint

logger = logging.getLogger("polopt")

State = dict[str, Any]

#: Name of the directory, in the trial's directory, for the checkpoint with the best evaluation.
BEST = "best_checkpoint"
_PICKLE = "_dict_checkpoint.pkl"
_COUNTS = (
    "num_env_steps_sampled",
    "num_agent_steps_sampled",
    "num_env_steps_trained",
    "num_updates",
    "restore_count",
)
_LARGEST_COUNT = 2**62
_A_COUNT = "an integer from 0 to 2**62"
_NO_MODULE = "a registered name, because a checkpoint cannot make polopt import a module"
#: Errors that `set_state` raises if the state is from another policy, or was edited.
_MISFITS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
#: Tune's names for checkpoint directories. Directories with such names in one folder are from the
#: same trial.
_TUNE_NAME = re.compile(r"checkpoint_\d{6,}")


# ---- the state of a trainer ----------------------------------------------------------------------


def read_trainer_state(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote. The main keys of the result are `trainer`, `config`
    and `optimizer`.

    Raises:
        CheckpointError: the checkpoint cannot be read, was not written by a trainer, or has a field
            whose value cannot be restored. The message names the file and the field.
    """
    state = read_checkpoint(directory)
    optimizer = state.get("optimizer")
    if (
        not isinstance(state.get("config"), dict)
        or not isinstance(optimizer, dict)
        or "policy" not in optimizer
    ):
        raise CheckpointError(f"checkpoint {directory} was not written by a polopt trainer")
    try:
        for field, value, allowed in _problems(state, optimizer):
            got = f"{value!r:.80}" if not isinstance(value, Tensor) else _shown(value)
            raise CheckpointError(
                f"checkpoint {directory}: field {field!r:.200}: got {got}. Allowed: {allowed}"
            )
    except RecursionError:
        raise CheckpointError(f"checkpoint {directory}: state.json is nested too deeply") from None
    return state


def plugin_places() -> Iterator[tuple[str, ...]]:
    """Yields the places of a config that name a preset, an optimizer, a policy or a network, as
    paths of keys."""
    for plugin in ("optimizer", "policy", "preset"):
        yield from ((plugin,), (plugin, "name"))
    other_names = (name for name, key in ModelConfig.other_names().items() if key == "custom")
    for name in ("custom", *other_names):
        yield from (("model", name), ("policy", "model", name))


def _problems(
    state: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Yields `(field, value, what is allowed)` for each field that cannot be restored."""
    counts = [("training_iteration", state), *((key, optimizer) for key in _COUNTS)]
    for key, owner in counts:
        value = owner.get(key, 0)
        if not _is_count(value):
            yield key, value, _A_COUNT
    seconds = state.get("time_total_s", 0.0)
    if not _is_number(seconds) or seconds < 0:
        yield "time_total_s", seconds, "seconds, 0 or more"
    for keys in plugin_places():
        name = value_at(state["config"], keys)
        if isinstance(name, str) and ":" in name:
            yield "/".join(("config", *keys)), name, _NO_MODULE
    yield from _named_modules(state["config"].get("policies"))
    yield from _evaluation_problems(state)
    if _runs(state) != state.get("runs", []):
        yield "runs", state["runs"], "a list of strings"
    unsaved = state.get("unsaved", {})
    if not isinstance(unsaved, Mapping) or not all(isinstance(v, str) for v in unsaved.values()):
        yield "unsaved", unsaved, "a mapping of keys to types"
    policy = optimizer["policy"]
    if not isinstance(policy, Mapping):
        yield "optimizer/policy", policy, "a mapping"
        return
    members = policy.get("policies", {"": policy})
    if not _has_mappings(members):
        yield "optimizer/policy/policies", members, "a mapping of names to mappings"
        return
    shapes = []
    for name, member in members.items():
        params = member.get("params")
        if not isinstance(params, Tensor) or params.dtype != torch.float32 or params.ndim != 1:
            field = (
                f"optimizer/policy/policies/{name}/params" if name else "optimizer/policy/params"
            )
            yield field, params, "a float32 tensor [P]"
            return
        shapes.append(params.shape)
    for field, value in _leaves(optimizer, "optimizer"):
        if isinstance(value, Tensor):
            if value.shape in shapes and value.dtype != torch.float32:
                yield field, value, "a float32 tensor"
            elif value.is_complex() or not _is_finite(value):
                yield field, value, "a tensor of finite real numbers"
        elif isinstance(value, int | float) and not _is_number(value):
            yield field, value, "a finite number of at most 64 bits"


def _named_modules(policies: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields the options of named policies that name a module."""
    if policies is None:
        return
    if not _has_mappings(policies):
        yield "config/policies", policies, "a mapping of names to mappings"
        return
    for name, options in policies.items():
        for keys in (("policy",), ("model", "custom")):
            value = value_at(options, keys)
            if isinstance(value, str) and ":" in value:
                yield "/".join(("config/policies", name, *keys)), value, _NO_MODULE


def _evaluation_problems(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    counts = state.get("evaluation", {})
    if not isinstance(counts, Mapping):
        yield "evaluation", counts, "a mapping"
        return
    for key in ("num_begun", "num_evaluations"):
        value = counts.get(key, 0)
        if not _is_count(value):
            yield f"evaluation/{key}", value, _A_COUNT
    best = state.get("best")
    if best is not None and not is_score(best):
        yield "best", best, "null, or a number, a version and a directory"


def is_score(saved: Any) -> bool:
    """Returns whether a value from JSON has the keys and types of a `Score`, which `BestCheckpoint`
    saves."""
    keys = ("episode_return_mean", "policy_version", "directory")
    if not isinstance(saved, Mapping) or set(saved) != set(keys):
        return False
    mean, version, directory = (saved[key] for key in keys)
    return _is_number(mean) and _is_int(version) and isinstance(directory, str)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields each field of a nested state and its value, except for two kinds of fields. The states
    of random generators are left out because they have 128-bit integers. The states of environments
    are left out because they may have any numbers."""
    if isinstance(tree, Mapping):
        if "bit_generator" not in tree:
            for key, value in tree.items():
                if f"{path}/{key}" != "optimizer/workers":
                    yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple | set | frozenset):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, tree.item() if isinstance(tree, np.generic) else tree


def value_at(options: Any, keys: Iterable[str]) -> Any:
    """Returns the value at a path of keys in nested dicts, or None if there is no such value."""
    for key in keys:
        options = options.get(key) if isinstance(options, Mapping) else None
    return options


def _has_mappings(value: Any) -> bool:
    """Returns whether a value is a mapping whose values are mappings, too."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(inner, Mapping) for inner in value.values())


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _LARGEST_COUNT


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 2**64


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch cannot check numbers of 8 bits
    return bool(torch.isfinite(tensor).all())


def _shown(tensor: Tensor) -> str:
    finite = _is_finite(tensor)
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return f"a tensor of {kind}" + " with NaN or infinite numbers" * (not finite)


def unsaved_in(state: Mapping[str, Any], *keys: str) -> dict[str, str]:
    """Returns which values of some options are missing in the checkpoint. The result maps the path
    of each missing value to its type.

    Args:
        state: the state of the checkpoint.
        keys: keys of the options in the config.
    """
    unsaved = state.get("unsaved", {})  # checkpoints of earlier versions lack this key
    return {path: kind for path, kind in unsaved.items() if re.split(r"[.\[]", path)[0] in keys}


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
    except (*_MISFITS, RuntimeError) as error:  # torch raises RuntimeError if a shape differs
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
        except (*_MISFITS, RowFilesError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def restore_env_statistics(state: Mapping[str, Any], env: Any) -> None:
    """Copies the running statistics of the training environments from a checkpoint to the wrappers
    of an environment. See `set_evaluation_statistics`.

    Args:
        state: the state of the checkpoint, from `read_trainer_state`.
        env: an environment for evaluation.

    Raises:
        CheckpointError: the wrappers of the environment differ from the wrappers in training.
    """
    # Imported here, because `polopt.load` imports this module but needs no environment.
    from polopt.rollouts.envs.env_state import saved_statistics, set_evaluation_statistics

    try:
        parts = saved_statistics(state["optimizer"].get("workers", {}).values())
        if parts:
            set_evaluation_statistics(env, parts)
    except _MISFITS as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            "the running statistics in the checkpoint do not fit the wrappers of the environment. "
            "As `env` (on the command line: --env), give an environment with the same wrappers as "
            f"in training ({why})"
        ) from error


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


# ---- a policy without a trainer ------------------------------------------------------------------


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
    except _MISFITS as error:
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


# ---- which checkpoint ----------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SavedCheckpoint:
    """A saved checkpoint: the return value of a trainer's `save` without Tune. `restore` and
    `polopt.load` accept this object.

    Attributes:
        checkpoint: Tune's object for the checkpoint. Its attribute `path` is the directory.
        metrics: the trainer's last result before the checkpoint. It is empty before this
            trainer's first result, even if a checkpoint was restored.
        iteration: number of iterations of the run, including those before a restored checkpoint.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    iteration: int

    def __repr__(self) -> str:
        """Returns one line without the metrics. Notebooks show this text, and the metrics would
        have thousands of characters."""
        return f"<checkpoint after iteration {self.iteration} in {self.checkpoint.path}>"


def checkpoint_path(checkpoint: Any) -> Path:
    """Returns the path of a checkpoint. The argument is a path, a checkpoint or a result of Tune,
    or the return value of a trainer's `save`.

    Raises:
        CheckpointError: the argument is None, or a result without a checkpoint.
    """
    checkpoint = _checkpoint_in(checkpoint)
    return Path(getattr(checkpoint, "path", checkpoint)).expanduser()


def _checkpoint_in(given: Any) -> Any:
    found = getattr(given, "checkpoint", given)
    if found is None:
        what = "got None" if given is None else "the result has no checkpoint"
        raise CheckpointError(
            f"{what}. Tune saves the checkpoint of a trial at its end with "
            "RunConfig(checkpoint_config=CheckpointConfig(checkpoint_at_end=True))"
        )
    return found


def check_directory(checkpoint: Any) -> None:
    """Checks the directory of a checkpoint before Tune opens it.

    If the directory contains a file `_dict_checkpoint.pkl`, Tune unpickles this file and only then
    calls `load_checkpoint`. Unpickling executes code, and polopt never writes this file.

    Args:
        checkpoint: a path, a Tune checkpoint, or the return value of `Trainable.save`.

    Raises:
        CheckpointError: the argument is None, a result without a checkpoint, or a path that does
            not exist. Also raised if the directory contains a file that Tune would unpickle.
    """
    checkpoint = _checkpoint_in(checkpoint)
    if isinstance(checkpoint, str | Path):
        _check_exists(Path(checkpoint))
        found = Path(checkpoint, _PICKLE).exists()
    else:
        info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{_PICKLE}")
        found = info.type.name != "NotFound"
    if found:
        raise CheckpointError(
            f"checkpoint {getattr(checkpoint, 'path', checkpoint)} contains the pickle {_PICKLE}. "
            "This file is not loaded, because unpickling executes code, and polopt did not write "
            "the file. If the other files are a checkpoint of polopt, delete this file"
        )


def find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a checkpoint. If `path` is the directory of a trial or an experiment,
    returns the newest checkpoint below this directory.

    If the newest checkpoint cannot be read, this function returns the newest readable checkpoint of
    the same run. It logs a warning for each newer checkpoint that cannot be read. The checkpoint of
    the best evaluation is tried last.

    Raises:
        CheckpointError: `path` does not exist, or no such checkpoint was found below it.
    """
    if os.path.lexists(path / "manifest.json"):
        return path
    _check_exists(path)
    # An interrupted save leaves no manifest, so directories without a manifest are skipped. Other
    # programs also write files with the name manifest.json, so another file of a checkpoint is
    # required, too.
    found = [
        (
            not manifest.parent.name.startswith(BEST),
            manifest.stat().st_mtime_ns,
            str(manifest.parent),
            manifest.parent,
        )
        for manifest in path.glob("**/manifest.json")
        if manifest.is_file() and any(manifest.with_name(name).exists() for name in FILES)
    ]
    unusable: Path | None = None
    for *_, directory in sorted(found, reverse=True):
        try:
            state = read_checkpoint(directory)
        except CheckpointError as error:
            logger.warning("%s. Looking for an older checkpoint of the same run", error)
            unusable = unusable or directory
        else:
            if unusable is None or _is_of_run(unusable, directory, state):
                return directory
    raise CheckpointError(f"no complete checkpoint in or below {path}")


def read_or_fall_back(directory: str | Path) -> tuple[Path, State]:
    """Reads a trainer's checkpoint, and checks the files of its replay buffer.

    If the checkpoint is damaged or incomplete, this function reads an older checkpoint of the same
    run in the same folder instead. It chooses the newest one that can be read. A warning then names
    both checkpoints.

    Returns:
        the directory of the checkpoint that was read, and its state.

    Raises:
        CheckpointError: in one of three cases:
            - The directory does not exist.
            - The checkpoint is damaged, and no older checkpoint can be read.
            - The checkpoint is complete, but cannot be read, has another format or a wrong value,
              or was not written by a trainer.
            The message names an older checkpoint that can be read, if there is one.
    """
    directory = Path(directory)
    _check_exists(directory)
    try:
        state = read_trainer_state(directory)
        check_further_files(directory)
        return directory, state
    except DamagedCheckpoint as error:
        previous = _previous(directory)
        if previous is None:
            raise
        logger.warning(
            "%s. Restoring the previous checkpoint %s instead", error, printable(str(previous[0]))
        )
        return previous
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def _check_exists(directory: Path) -> None:
    if directory.is_file():
        raise CheckpointError(
            f"{directory} is a file, but a checkpoint of polopt is a directory. polopt cannot read "
            "models of other libraries"
        )
    if not directory.is_dir():
        raise CheckpointError(f"no such directory: {directory}{name_previous(directory)}")


def name_previous(directory: str | Path) -> str:
    """Returns a sentence for the end of an error message. The sentence names the newest older
    checkpoint of the same run that can be read. Returns an empty string if no older checkpoint can
    be read.

    Args:
        directory: directory of the checkpoint that cannot be used.
    """
    previous = _previous(Path(directory))
    return "" if previous is None else f". The previous checkpoint {previous[0]} can be read"


def _previous(directory: Path) -> tuple[Path, State] | None:
    for candidate in _older(directory):
        try:
            state = read_trainer_state(candidate)
            check_further_files(candidate)
        except CheckpointError:
            continue
        if _is_of_run(directory, candidate, state):
            return candidate, state
    return None


def _is_of_run(directory: Path, candidate: Path, state: State) -> bool:
    """Returns whether `candidate` is a checkpoint of the run that wrote `directory`, or of an
    earlier run from which that run was restored.

    Args:
        directory: directory of a checkpoint, which may be damaged or missing.
        candidate: directory of another checkpoint.
        state: the state of `candidate`.
    """
    try:
        runs = _runs(read_state_file(directory))
    except CheckpointError:
        runs = []
    theirs = _runs(state)
    if runs and theirs:
        return theirs[-1] in runs
    # If a checkpoint does not name its runs, the names of the directories decide. Two checkpoints
    # with Tune's names in one folder are from the same trial.
    alike = all(_TUNE_NAME.fullmatch(path.name) for path in (directory, candidate))
    return alike and directory.parent == candidate.parent


def _runs(state: Mapping[str, Any]) -> list[str]:
    """Returns the identifiers of a checkpoint's runs. The last identifier belongs to the run that
    wrote the checkpoint. The others belong to earlier runs from which that run was restored.
    Returns an empty list if the checkpoint does not name its runs."""
    runs = state.get("runs")
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []


def _older(directory: Path) -> Iterator[Path]:
    """Yields the checkpoints in the same folder that are older than `directory`, beginning with the
    newest. Tune writes a number at the end of each name, and these numbers decide the order. If the
    name of `directory` has no number, the modification times decide."""
    stem, number = _numbered(directory.name)
    try:
        others = [d for d in directory.parent.iterdir() if d.is_dir() and d.name != directory.name]
    except OSError:  # the folder is missing or cannot be read
        return
    if number is not None:
        named = [(_numbered(d.name), d) for d in others]
        alike = [(n, d) for (s, n), d in named if s == stem and n is not None and n < number]
        yield from (d for _, d in sorted(alike, reverse=True))
        return
    manifests = [d / "manifest.json" for d in others if (d / "manifest.json").is_file()]
    written_ns = directory.stat().st_mtime_ns if directory.is_dir() else None
    times = [(m.stat().st_mtime_ns, m.parent) for m in manifests]
    yield from (d for t, d in sorted(times, reverse=True) if written_ns is None or t <= written_ns)


def _numbered(name: str) -> tuple[str, int | None]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :]) if len(stem) < len(name) else None
