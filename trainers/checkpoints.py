"""Writes and reads checkpoints, which are directories of tensors and JSON. Loading a checkpoint
never executes code from the checkpoint.

tensors.pt     a flat dict of tensors, in the format of `torch.save`
state.json     the whole state, with `{"__tensor__": name}` in place of each tensor
replay/        the steps in a replay buffer, if the buffer is saved. These files may be large, and
               `read_checkpoint` does not read them
manifest.json  the SHA-256 of each other file and of the manifest's own content. This file is
               written last. A checkpoint without a manifest is incomplete

A checkpoint may come from an untrusted user. This module therefore reads only regular files of
limited size. The memory for the tensors is at most a few times the size of `tensors.pt`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickletools
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.common.files import open_regular, printable, read_regular

#: Version of the checkpoint format. Increment it with each change that older code cannot read.
FORMAT = 2
#: Versions that this code reads. In version 1, all values of the config are JSON values.
_READ_FORMATS = (1, FORMAT)
#: Files that every checkpoint has in addition to the manifest.
FILES = ("tensors.pt", "state.json")
#: Directory for the files of the replay buffer in a checkpoint.
REPLAY = "replay"
#: Names of the replay buffer's files in the manifest.
_FURTHER_FILE = re.compile(rf"{REPLAY}/\w[\w.-]{{0,99}}")
#: Maximum size of each file in bytes. `data.pkl` is the pickle inside `tensors.pt`. Its maximum is
#: enough for the names and shapes of about 150,000 tensors.
_MOST_BYTES = {
    "tensors.pt": 4 << 30,
    "data.pkl": 16 << 20,
    "state.json": 64 << 20,
    "manifest.json": 64 << 10,
}


#: The largest ratio of a file's size to its size on the disk. polopt writes files without holes,
#: but some file systems compress files.
_MOST_HOLES = 1000


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged, has another format, does not fit the
    trainer or policy that loads it, or cannot be written. The message gives the reason. Control
    characters in the message are escaped, because a terminal would interpret them."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete, or was changed after it was written. The caller
    may restore an older checkpoint instead."""


def write_checkpoint(
    directory: str | Path,
    state: Mapping[str, Any],
    add_files: Callable[[Path], Mapping[str, str]] = lambda _: {},
) -> None:
    """Writes a checkpoint.

    Each file is written under a temporary name and then renamed. The manifest is written last. If
    the process is killed at any moment, the directory has either a complete checkpoint or no
    manifest.

    Args:
        directory: directory of the checkpoint.
        state: the state. `read_checkpoint` will return it, with lists in place of tuples, and
            with strings as the keys of dicts. The values are tensors, arrays, numbers, strings,
            None, and lists, tuples and dicts of these.
        add_files: a function that writes data that is too large for `state`. Its argument is the
            path of a directory that does not exist yet. The function returns the SHA-256 of each
            file that it has written to this directory, by file name. It is called before `state` is
            written. Changes that it makes to `state` are saved if it returns at least one file.

    Raises:
        TypeError: `state` holds a value of another type.
        CheckpointError: a file is too large, or cannot be written. No temporary file is left.
    """
    directory = Path(directory)
    files = _files(directory, state)  # raises before anything is written
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Until the new manifest exists, the directory counts as incomplete.
        (directory / "manifest.json").unlink(missing_ok=True)
        if (directory / REPLAY).exists():  # from an older checkpoint in this directory
            shutil.rmtree(directory / REPLAY)
        further = add_files(directory / REPLAY)
        if further:
            files = _files(directory, state)
        for name, data in files.items():
            _write(directory / name, data)
        sums = {name: _sha256(data) for name, data in files.items()}
        sums |= {f"{REPLAY}/{name}": checksum for name, checksum in further.items()}
        manifest = {"format": FORMAT, "sha256": sums, "seal": _seal(FORMAT, sums)}
        _write(directory / "manifest.json", json.dumps(manifest).encode())
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be written: {error.strerror or error}"
        ) from error


def _files(directory: Path, state: Mapping[str, Any]) -> dict[str, bytes | memoryview]:
    """Returns the contents of the files that hold `state`, by file name."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, tensors, "")
    packed = io.BytesIO()  # in memory, because torch's error for a full disk lacks the reason
    torch.save(tensors, packed)
    files: dict[str, bytes | memoryview] = {
        "tensors.pt": packed.getbuffer(),
        "state.json": json.dumps(tree, indent=1).encode(),
    }
    sizes = {name: len(data) for name, data in files.items()}
    with zipfile.ZipFile(packed) as archive:
        sizes["data.pkl"] = archive.getinfo("archive/data.pkl").file_size
    for name, size in sizes.items():
        if size > _MOST_BYTES[name]:
            raise CheckpointError(
                f"checkpoint {directory} cannot be written: {name} would have {size:,} bytes. "
                f"Allowed: {_MOST_BYTES[name]:,}"
            )
    return files


def read_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint, and returns the state that was given to `write_checkpoint`.

    Raises:
        CheckpointError: the checkpoint cannot be read. The message names the file and the reason.
    """
    directory = Path(directory)
    sums = _read_manifest(directory)
    files = {}
    for name in FILES:
        files[name] = _read(directory / name)
        if _sha256(files[name]) != sums.get(name):
            raise DamagedCheckpoint(
                f"checkpoint {directory} is damaged: the SHA-256 of {name} differs from the "
                "SHA-256 in the manifest"
            )
    tensors = _load_tensors(directory, files["tensors.pt"])
    tree = _parse_json(directory / "state.json", files["state.json"])
    try:
        state: dict[str, Any] = _decode(tree, tensors)
    except RecursionError:
        raise CheckpointError(f"checkpoint {directory}: state.json is nested too deeply") from None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        # tensors.pt does not have the tensor, state.json names the tensor twice, or NumPy does not
        # support its dtype or dimensions.
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {directory}: state.json names a tensor that cannot be used: {reason:.200}"
        ) from None
    return state


def check_further_files(directory: str | Path) -> None:
    """Compares the SHA-256 of each file of the replay buffer with the manifest. `read_checkpoint`
    does not read these files, because they may have many gigabytes.

    Raises:
        CheckpointError: one of these files or the manifest is missing or damaged, or cannot be
            read.
    """
    directory = Path(directory)
    for name, expected in _read_manifest(directory).items():
        if name in FILES:
            continue
        if not _FURTHER_FILE.fullmatch(name):
            raise CheckpointError(
                f"checkpoint {directory}: manifest.json names an unknown file {name!r:.200}"
            )
        try:
            with open_regular(directory / name, most_bytes=2**60) as file:
                status = os.fstat(file.fileno())
                if status.st_size > _MOST_HOLES * max(status.st_blocks * 512, 1 << 20):
                    # For example 1 TB without content, for which hashing takes an hour.
                    raise OSError(
                        errno.EFBIG, f"{status.st_size:,} bytes, almost all of them holes"
                    )
                found = hashlib.sha256()
                while part := file.read(1 << 20):
                    found.update(part)
        except FileNotFoundError:
            raise DamagedCheckpoint(
                f"checkpoint {directory} is incomplete: {name} is missing"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {directory}: {name} cannot be read: {error.strerror}"
            ) from None
        if found.hexdigest() != expected:
            raise DamagedCheckpoint(
                f"checkpoint {directory} is damaged: the SHA-256 of {name} differs from the "
                "SHA-256 in the manifest"
            )


def read_state_file(directory: str | Path) -> dict[str, Any]:
    """Returns the content of `state.json` of a checkpoint, with `{"__tensor__": name}` in place of
    each tensor. The tensors and the replay files are not read. If the manifest is intact, this
    function checks `state.json` with the manifest. If the manifest is missing or damaged, there is
    no such check.

    Raises:
        CheckpointError: the file is missing, is not JSON, or does not match the manifest, or the
            manifest has another format.
    """
    path = Path(directory) / "state.json"
    data = _read(path)
    try:
        whole = _read_manifest(path.parent).get(path.name) == _sha256(data)
    except DamagedCheckpoint:
        # The manifest is missing or damaged. `state.json` is complete, because it is renamed only
        # after it is written.
        whole = True
    if not whole:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: {path.name} does not match the manifest"
        )
    return _parse_json(path, data)


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the SHA-256 sums in the manifest, by file name."""
    path = directory / "manifest.json"
    manifest = _parse_json(path, _read(path))
    try:
        seal = _seal(manifest.get("format"), manifest.get("sha256"))
    except RecursionError:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: manifest.json is nested too deeply"
        ) from None
    if manifest.get("seal", seal) != seal:
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: manifest.json does not match its own checksum"
        )
    if manifest.get("format") not in _READ_FORMATS:
        raise CheckpointError(
            f"checkpoint {directory} has format {manifest.get('format')!r:.80}, but "
            f"this version of polopt reads formats {', '.join(map(str, _READ_FORMATS))}"
        )
    sums = manifest.get("sha256")
    if not isinstance(sums, dict):
        raise DamagedCheckpoint(
            f"checkpoint {directory} is damaged: manifest.json has no SHA-256 of the files"
        )
    return sums


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES[path.name])
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"checkpoint {path.parent} is incomplete: {path.name} is missing"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} cannot be read: {error.strerror}"
        ) from None


def _load_tensors(directory: Path, data: bytes) -> dict[str, Tensor]:
    try:
        stored = _stored(data)
        tensors = torch.load(stored, weights_only=True, map_location="cpu")
    except Exception as error:  # a file of arbitrary bytes can raise anything
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {directory}: tensors.pt does not hold plain tensors: {first_line}"
        ) from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"checkpoint {directory}: tensors.pt does not hold a dict of tensors")
    total = 0
    for name, tensor in tensors.items():
        problem = _problem(name, tensor)
        if not problem:
            total += tensor.nbytes
            if total > len(data):
                raise CheckpointError(
                    f"checkpoint {directory}: tensors.pt: the tensors up to field {name!r:.200} "
                    "need more bytes than the file has"
                )
        else:
            raise CheckpointError(
                f"checkpoint {directory}: tensors.pt: field {name!r:.200}: got {problem}. "
                "Allowed: a dense tensor"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _problem(name: Any, tensor: Any) -> str:
    """Returns why `write_checkpoint` cannot have written this entry of `tensors.pt`. Returns an
    empty string if the entry is valid."""
    if not isinstance(name, str):
        return f"a name of type {type(name).__name__}"
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    if not tensor.is_contiguous():
        return f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
    return ""


#: Names of the entries of the ZIP file that `torch.save` writes, without the top-level folder that
#: all entries share.
_ENTRY = re.compile(
    r"data\.pkl|data/[0-9]+|version|byteorder"
    r"|\.format_version|\.storage_alignment|\.data/serialization_id"
)


def _stored(data: bytes) -> io.BytesIO:
    """Checks a file that `torch.save` wrote, and returns a copy of it.

    In the copy, no entry is compressed, and the pickle refers only to names that a dense tensor
    needs. Without these checks, a small file could take all memory: `torch.load` decompresses any
    amount of zeros, and `weights_only` allows constructors such as `bytearray(10**10)`.

    `torch.load` reads the copy instead of the original file. `zipfile` and the reader of torch may
    interpret a manipulated file differently, but they agree about the copy.

    Raises:
        ValueError: an entry of the file is not allowed, or the pickle refers to a name that a dense
            tensor does not need.
        Exception: `zipfile` or `pickletools` cannot read the file.
    """
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(copy, "w") as stored:
        folder = archive.namelist()[0].partition("/")[0]
        entries = {entry.filename: entry for entry in archive.infolist()}
        if sum(entry.file_size for entry in entries.values()) > len(data):
            raise ValueError("its entries are larger than the file")
        for name, entry in entries.items():
            inside = name.removeprefix(f"{folder}/")
            if not _ENTRY.fullmatch(inside):
                raise ValueError(f"it has an entry {name!r:.200}")
            content = archive.read(entry)
            if inside == "data.pkl":
                _check_pickle(content)
            stored.writestr(f"archive/{inside}", content)
    copy.seek(0)
    return copy


def _check_pickle(data: bytes) -> None:
    most = _MOST_BYTES["data.pkl"]
    if len(data) > most:
        raise ValueError(f"its pickle has {len(data):,} bytes. Allowed: {most:,}")
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "GLOBAL" and not _is_of_tensors(str(argument)):
            raise ValueError(f"its pickle refers to {argument!r:.200}")


def _is_of_tensors(name: str) -> bool:
    """Returns whether the pickle of a dense tensor may refer to `name`, for example
    `torch FloatStorage`. Such a name is a storage class, a dtype, a function that builds a tensor,
    or `OrderedDict`, which is an argument of these functions."""
    module, _, attribute = name.partition(" ")
    if module in ("torch", "torch.storage"):
        known = vars(torch).get(attribute)  # `getattr` would import what the file names
        return attribute.endswith("Storage") or isinstance(known, torch.dtype)
    return name in (
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "collections OrderedDict",
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


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    if not data:  # for example, the directory was copied to a full disk
        raise DamagedCheckpoint(f"checkpoint {path.parent} is incomplete: {path.name} is empty")
    try:
        read: dict[str, Any] = json.loads(data)
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
    """Returns the SHA-256 of the manifest's content. Without this checksum, a flipped bit in the
    version number would look like another format."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, Tensor):
        # The tensor is copied, because `torch.save` writes the whole storage of a view.
        tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
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
    raise TypeError(
        f"a checkpoint holds only tensors, arrays and JSON values. Got {type(value).__name__} at "
        f"{path!r}"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        # `_encode` names each tensor once. If a file could name a tensor many times, and each use
        # copies it, a small file could take all memory.
        if "__tensor__" in value:
            return tensors.pop(value["__tensor__"])
        if "__array__" in value:
            return tensors.pop(value["__array__"]).numpy()
        return {k: _decode(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    return value
