"""Checkpoints of trainers: reads them, checks their fields, and finds an older one where the newest
cannot be read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polopt.policies.policy import Policy
from polopt.rollouts.envs.errors import EnvironmentFailedError
from polopt.rollouts.sampling.data_fault_log import NonFiniteError
from polopt.rollouts.workers.failures import WorkersFailedError
from polopt.trainers.checkpoints import CheckpointError, DamagedCheckpoint, read_checkpoint

logger = logging.getLogger("polopt")

State = dict[str, Any]

_PICKLE = "_dict_checkpoint.pkl"
_COUNTS = ("num_env_steps_sampled", "num_env_steps_trained", "num_updates", "restore_count", "life")
_LARGEST_COUNT = 2**62
#: Errors of `set_state` for a state of another policy, or one that was changed.
_MISFITS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError)


def read_trainer_state(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote: `trainer`, `config` and `optimizer`.

    Raises:
        CheckpointError: names the file and the field.
    """
    state = read_checkpoint(directory)
    optimizer = state.get("optimizer")
    if (
        not isinstance(state.get("config"), dict)
        or not isinstance(optimizer, dict)
        or "policy" not in optimizer
    ):
        raise CheckpointError(f"checkpoint {directory} is not one of a polopt trainer")
    for field, value, allowed in _problems(state, optimizer):
        got = f"{value!r:.80}" if not isinstance(value, Tensor) else _shown(value)
        raise CheckpointError(
            f"checkpoint {directory}: field {field!r}: got {got}. Allowed: {allowed}"
        )
    return state


def _problems(
    state: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Yields `(field, value, what is allowed)` of each field that cannot be restored."""
    counts = [("training_iteration", state), *((key, optimizer) for key in _COUNTS)]
    for key, owner in counts:
        value = owner.get(key, 0)
        if not _is_int(value) or not 0 <= value <= _LARGEST_COUNT:
            yield key, value, "an integer from 0 to 2**62"
    seconds = state.get("time_total_s", 0.0)
    if not _is_number(seconds) or seconds < 0:
        yield "time_total_s", seconds, "seconds, 0 or more"
    policy = optimizer["policy"]
    if not isinstance(policy, Mapping):
        yield "optimizer/policy", policy, "a mapping"
        return
    params = policy.get("params")
    if not isinstance(params, Tensor) or params.dtype != torch.float32 or params.ndim != 1:
        yield "optimizer/policy/params", params, "a float32 tensor [P]"
        return
    for field, value in _leaves(optimizer, "optimizer"):
        if isinstance(value, Tensor):
            if value.shape == params.shape and value.dtype != torch.float32:
                yield field, value, "a float32 tensor"
            elif value.is_complex() or not bool(torch.isfinite(value).all()):
                yield field, value, "a tensor of finite real numbers"
        elif isinstance(value, int | float) and not _is_number(value):
            yield field, value, "a finite number of at most 64 bits"


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields fields and values, except the state of random generators, which holds 128-bit
    integers, and of environments, which may hold any numbers."""
    if isinstance(tree, Mapping):
        if "bit_generator" not in tree:
            for key, value in tree.items():
                if f"{path}/{key}" != "optimizer/workers":
                    yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 2**64


def _shown(tensor: Tensor) -> str:
    finite = bool(torch.isfinite(tensor).all())
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return f"a tensor of {kind}" + " with NaN or infinite numbers" * (not finite)


def misfit(
    state: Mapping[str, Any], policy: Policy, restore: Callable[[], None] | None = None
) -> str:
    """Returns why a checkpoint does not fit a policy, or an empty string if it fits.

    Args:
        state: of the checkpoint, from `read_trainer_state`.
        policy: the policy that is to be restored.
        restore: restores it, if its network is the checkpoint's; None: only networks are compared.

    Raises:
        WorkersFailedError, NonFiniteError, EnvironmentFailedError: from `restore`, which also waits
            for workers and begins episodes; the checkpoint is not the cause.
    """
    problem = _other_network(state, policy)
    if not problem and restore is not None:
        try:
            restore()
        except (WorkersFailedError, NonFiniteError, EnvironmentFailedError):
            raise
        except _MISFITS as error:
            return f"{type(error).__name__}: {error}"
    return problem


def _other_network(state: Mapping[str, Any], policy: Policy) -> str:
    saved = state["optimizer"]["policy"]
    try:
        policy.model.check_description(str(saved.get("network")))
    except ValueError:
        pass
    else:
        return ""
    saved_policy = state["config"].get("policy")
    saved_model = saved_policy.get("model") if isinstance(saved_policy, Mapping) else None
    if not isinstance(saved_model, Mapping):
        saved_model = {}
    different = [
        f"{key}: checkpoint {saved_model[key]!r:.60}, config {value!r:.60}"
        for key, value in policy.config.model.to_dict().items()
        if key in saved_model and _plain(saved_model[key]) != _plain(value)
    ]
    why = "; ".join(different) or "other observation or action space"
    env = state["config"].get("env")
    return f"it is of another network, trained on {env!r:.80} ({why})"


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def refuse_pickled(checkpoint: Any) -> None:
    """Refuses a checkpoint with the file that Tune would unpickle before it calls the trainer.
    polopt writes no such file, and unpickling executes code.

    Args:
        checkpoint: a path, a Tune checkpoint, or what `Trainable.save` returned.

    Raises:
        CheckpointError: the file exists.
    """
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    if isinstance(checkpoint, str | Path):
        found = Path(checkpoint, _PICKLE).exists()
    else:
        info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{_PICKLE}")
        found = info.type.name != "NotFound"
    if found:
        raise CheckpointError(
            f"checkpoint {getattr(checkpoint, 'path', checkpoint)} holds {_PICKLE}, a pickle, "
            "which is not loaded because unpickling executes code; polopt did not write it"
        )


def find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a checkpoint, else the newest complete one below it (of a trial's or
    an experiment's directory), with a warning for each damaged one that is newer.

    Raises:
        CheckpointError: there is none.
    """
    if (path / "manifest.json").is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"no such directory: {path}")
    # An interrupted save leaves no manifest.
    manifests = list(path.glob("**/manifest.json"))
    manifests.sort(key=lambda manifest: (manifest.stat().st_mtime_ns, str(manifest)), reverse=True)
    for manifest in manifests:
        try:
            read_checkpoint(manifest.parent)
        except CheckpointError as error:
            logger.warning("%s; using the one before", error)
        else:
            return manifest.parent
    raise CheckpointError(f"no complete checkpoint in or below {path}")


def read_or_fall_back(directory: str | Path) -> tuple[Path, State]:
    """Reads a trainer's checkpoint, or, if it is damaged, incomplete or missing, the newest
    complete one before it in the same folder, with a warning that names both.

    Returns:
        the directory that was read, and its state.

    Raises:
        CheckpointError: there is none before it; or the checkpoint is complete, but of another
            format or not of a trainer: the message names the one before, which is not read.
    """
    directory = Path(directory)
    try:
        return directory, read_trainer_state(directory)
    except DamagedCheckpoint as error:
        previous = _previous(directory)
        if previous is None:
            raise
        logger.warning("%s; restoring the one before, %s", error, previous[0])
        return previous
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def name_previous(directory: str | Path, fits: Callable[[State], bool] | None = None) -> str:
    """Returns `"; the one before, DIRECTORY, can be read"`, or an empty string if none can.

    Args:
        directory: of the checkpoint that cannot be used.
        fits: whether the state of another one can be used.
    """
    previous = _previous(Path(directory), fits)
    return "" if previous is None else f"; the one before, {previous[0]}, can be read"


def _previous(
    directory: Path, fits: Callable[[State], bool] | None = None
) -> tuple[Path, State] | None:
    for candidate in _older(directory):
        try:
            state = read_trainer_state(candidate)
        except CheckpointError:
            continue
        if fits is None or fits(state):
            return candidate, state
    return None


def _older(directory: Path) -> Iterator[Path]:
    """Yields the checkpoints in the same folder that were written before, the newest first.
    Numbers at the end of names, as Tune assigns them, give the order; without numbers, the
    modification time of the manifest does."""
    stem, number = _numbered(directory.name)
    if not directory.parent.is_dir():
        return
    others = [d for d in directory.parent.iterdir() if d.is_dir() and d.name != directory.name]
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
