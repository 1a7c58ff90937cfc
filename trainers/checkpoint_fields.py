"""Reads the state that a trainer saved in a checkpoint, and checks the fields of this state."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.policies.networks.model_config import ModelConfig
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint

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
    if runs_of(state) != state.get("runs", []):
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


def runs_of(state: Mapping[str, Any]) -> list[str]:
    """Returns the identifiers of a checkpoint's runs. The last identifier belongs to the run that
    wrote the checkpoint. The others belong to earlier runs from which that run was restored.
    Returns an empty list if the checkpoint does not name its runs."""
    runs = state.get("runs")
    return [run for run in runs if isinstance(run, str)] if isinstance(runs, list) else []
