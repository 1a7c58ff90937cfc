"""Checkpoints: a directory of tensors and JSON. Nothing in one can execute.

tensors.pt     a flat dict of tensors, read with `torch.load(..., weights_only=True)`
state.json     everything else; `{"__tensor__": name}` stands where a tensor was
manifest.json  SHA-256 of both and of itself; written last, so that a directory without one is
               incomplete
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Raised with each change that older code could not read.
FORMAT = 1
_FILES = ("tensors.pt", "state.json")
_PICKLED = "_dict_checkpoint.pkl"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged or of another format; the message says which."""


class DamagedCheckpoint(CheckpointError):
    """It was whole once, or was to be, and is not: another one can take its place."""


def write_checkpoint(directory: str | Path, state: Mapping[str, Any]) -> None:
    """Writes `state` (tensors, arrays, numbers, strings, None, lists and dicts of those).

    Each file is written aside and renamed, the manifest last: a kill at any moment leaves a
    directory that is whole or plainly incomplete.

    Raises:
        TypeError: for anything in `state` that is not data.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors, "")
    # From here to the new manifest the directory is incomplete, and says so.
    (directory / "manifest.json").unlink(missing_ok=True)
    _write_aside(directory / "tensors.pt", lambda path: torch.save(tensors, path))
    text = json.dumps(tree, indent=1)
    _write_aside(directory / "state.json", lambda path: path.write_text(text))
    sums = {name: _sha256(directory / name) for name in _FILES}
    manifest = {"format": FORMAT, "sha256": sums, "seal": _seal(FORMAT, sums)}
    _write_aside(directory / "manifest.json", lambda path: path.write_text(json.dumps(manifest)))


def read_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Reads what `write_checkpoint` wrote.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    directory = Path(directory)
    manifest = _read_json(directory / "manifest.json")
    seal = _seal(manifest.get("format"), manifest.get("sha256"))
    if manifest.get("seal", seal) != seal:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: manifest.json is not what was written"
        )
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {directory} has format {manifest.get('format')!r}; "
            f"this version of polopt reads format {FORMAT}"
        )
    sums = manifest.get("sha256")
    if not isinstance(sums, dict):
        raise DamagedCheckpoint(f"checkpoint {directory} is damaged: manifest.json has no sums")
    for name in _FILES:
        path = directory / name
        if not path.is_file():
            raise DamagedCheckpoint(f"checkpoint {directory} is incomplete: {name} is missing")
        if _sha256(path) != sums.get(name):
            raise DamagedCheckpoint(
                f"checkpoint {directory} is damaged: {name} is not what was written "
                "(its SHA-256 differs from the manifest's)"
            )
    try:
        tensors = torch.load(directory / "tensors.pt", weights_only=True, map_location="cpu")
    except Exception as error:  # whatever comes of reading what may be anything
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {directory}: tensors.pt does not hold plain tensors: {first_line}"
        ) from None
    try:
        state: dict[str, Any] = _decode(_read_json(directory / "state.json"), tensors)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"checkpoint {directory}: state.json names tensors that tensors.pt does not hold"
        ) from None
    return state


def read_trainer_state(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote: `trainer`, `config` and `optimizer`.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    state = read_checkpoint(directory)
    if not isinstance(state.get("config"), dict) or "policy" not in state.get("optimizer", ()):
        raise CheckpointError(f"checkpoint {directory} is not one of a polopt trainer")
    return state


def refuse_pickled(checkpoint: Any) -> None:
    """Tune reads a file of a certain name in a checkpoint with pickle before it asks the trainer;
    polopt writes none, and who put it there could have it do anything.

    Args:
        checkpoint: a path, a Tune checkpoint, or what `Trainable.save` returned.

    Raises:
        CheckpointError: if the file is there.
    """
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)
    if isinstance(checkpoint, str | Path):
        found = Path(checkpoint, _PICKLED).exists()
    else:
        info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{_PICKLED}")
        found = info.type.name != "NotFound"
    if found:
        raise CheckpointError(
            f"checkpoint {getattr(checkpoint, 'path', checkpoint)} holds {_PICKLED}, a pickle, "
            "which is not read because it could execute anything; polopt did not write it"
        )


def _write_aside(path: Path, write: Any) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write(aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise DamagedCheckpoint(
            f"{path.parent} is not a complete checkpoint: {path.name} is missing"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name}: {error}"
        ) from None
    if not isinstance(read, dict):
        raise DamagedCheckpoint(f"checkpoint {path.parent} is damaged: {path.name} is no mapping")
    return read


def _seal(*parts: Any) -> str:
    """Of the manifest itself: a flipped bit in it must not pass for another version."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"__tensor__": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.tensor(value)
        return {"__array__": path}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(k): _encode(v, tensors, f"{path}/{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds plain data; got {type(value).__name__} at {path!r}")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__array__" in value:
            return tensors[value["__array__"]].numpy()
        return {k: _decode(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    return value
