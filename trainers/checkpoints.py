"""Checkpoints: a directory of tensors and JSON. Loading one executes nothing that it contains.

tensors.pt     a flat dict of tensors, read with `torch.load(..., weights_only=True)`
state.json     everything else; `{"__tensor__": name}` stands for a tensor
manifest.json  SHA-256 of both and of itself; written last, so a directory without one is incomplete
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Incremented by each change that older code cannot read.
FORMAT = 1
_FILES = ("tensors.pt", "state.json")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, damaged, of another format, or cannot be written. The
    message names the file and the reason."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete or was changed after it was written; an older one can replace
    it."""


def write_checkpoint(directory: str | Path, state: Mapping[str, Any]) -> None:
    """Writes `state` (tensors, arrays, numbers, strings, None, lists and dicts of those).

    Each file is written under a temporary name and renamed, the manifest last: a kill at any moment
    leaves a complete checkpoint or a directory without a manifest.

    Raises:
        TypeError: `state` holds anything else.
        CheckpointError: a file cannot be written; no temporary file is left.
    """
    directory = Path(directory)
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors, "")
    packed = io.BytesIO()  # torch reports a full disk without the reason
    torch.save(tensors, packed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Until the new manifest exists, the directory counts as incomplete.
        (directory / "manifest.json").unlink(missing_ok=True)
        _write(directory / "tensors.pt", packed.getbuffer())
        _write(directory / "state.json", json.dumps(tree, indent=1).encode())
        sums = {name: _sha256(directory / name) for name in _FILES}
        manifest = {"format": FORMAT, "sha256": sums, "seal": _seal(FORMAT, sums)}
        _write(directory / "manifest.json", json.dumps(manifest).encode())
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be written: {error.strerror or error}"
        ) from error


def read_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Reads what `write_checkpoint` wrote.

    Raises:
        CheckpointError: names the file and the reason.
    """
    directory = Path(directory)
    _check_manifest(directory)
    try:
        tensors = torch.load(directory / "tensors.pt", weights_only=True, map_location="cpu")
    except Exception as error:  # a file of arbitrary bytes can raise anything
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {directory}: tensors.pt does not hold plain tensors: {first_line}"
        ) from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"checkpoint {directory}: tensors.pt does not hold a dict of tensors")
    for name, tensor in tensors.items():
        _check_tensor(directory, name, tensor)
    tree = _read_json(directory / "state.json")
    try:
        state: dict[str, Any] = _decode(tree, tensors)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"checkpoint {directory}: state.json names tensors that tensors.pt does not hold"
        ) from None
    except RecursionError:
        raise CheckpointError(f"checkpoint {directory}: state.json is nested too deeply") from None
    return state


def _check_manifest(directory: Path) -> None:
    manifest = _read_json(directory / "manifest.json")
    seal = _seal(manifest.get("format"), manifest.get("sha256"))
    if manifest.get("seal", seal) != seal:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: the SHA-256 of manifest.json differs"
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
                f"checkpoint {directory} is damaged: the SHA-256 of {name} differs from the "
                "manifest's"
            )


def _check_tensor(directory: Path, name: Any, tensor: Any) -> None:
    """Refuses what `write_checkpoint` does not write."""
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
        return
    problem = "a sparse tensor" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
    raise CheckpointError(
        f"checkpoint {directory}: tensors.pt: field {name!r}: got {problem}. "
        "Allowed: a dense tensor"
    )


def _write(path: Path, data: bytes | memoryview) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise DamagedCheckpoint(
            f"{path.parent} is not a complete checkpoint: {path.name} is missing"
        ) from None
    except RecursionError:
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name} is nested too deeply"
        ) from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name}: {error}"
        ) from None
    if not isinstance(read, dict):
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is damaged: {path.name} is not a mapping"
        )
    return read


def _seal(*parts: Any) -> str:
    """SHA-256 of the manifest's content: a flipped bit must not pass for another format."""
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
