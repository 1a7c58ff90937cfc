"""Writes and reads checkpoints, which are directories of tensors and JSON. Loading a checkpoint
never executes code from the checkpoint.

tensors.safetensors  all tensors and arrays of the state, in the format of the library safetensors
state.json           the whole state as `polopt.common.plain_data` encodes it. It names the tensors
replay/              the rows of a replay buffer, if the buffer is saved. These files may be large,
                     and `read_checkpoint` does not read them
manifest.json        the SHA-256 of each other file and of the manifest's own content. This file is
                     written last. A checkpoint without a manifest is incomplete

These classes and functions write the parts of the state of a trainer:

config, unsaved                    `Experiment.to_dict`. `unsaved` names the values that are no data
spaces                             `saved_spaces.describe_space`
trainer, training_iteration,       `RunState`
time_total_s, runs
evaluation                         `Evaluation.get_state`
best                               `BestCheckpoint`, only in the best checkpoint
optimizer                          `PolicyOptimizer.get_state`: counts, episodes, and what a
                                   strategy adds, such as the counts of a rate limiter
optimizer/policy                   `Policy.get_state`: parameters, torch optimizers, versions
optimizer/workers                  `RolloutWorker.get_state`: random generators, the current
                                   episodes, and what environments return as their state
optimizer/files, replay/           `BufferFiles.write`

A checkpoint may come from an untrusted user. This module therefore reads only regular files of
limited size. The memory for the tensors is at most a few times the size of the file of tensors.
`checkpoints_0_3.py` reads what is different in checkpoints of version 0.3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from polopt.common.files import open_regular, printable, read_regular
from polopt.common.plain_data import DecodeError, decode, encode
from polopt.replay.row_store import write_arrays
from polopt.trainers import checkpoints_0_3

#: Version of the checkpoint format. Increment it with each change that older code cannot read.
FORMAT = 3
#: Versions that this code reads.
_READ_FORMATS = (2, FORMAT)
TENSORS, STATE = "tensors.safetensors", "state.json"
#: Files of checkpoints, without the manifest and the files of the replay buffer. Every checkpoint
#: has `STATE` and one of the files of tensors.
FILES = (TENSORS, checkpoints_0_3.TENSORS, STATE)
#: Directory for the files of the replay buffer in a checkpoint.
REPLAY = "replay"
#: Names of the replay buffer's files in the manifest. With several policies, each has a folder with
#: a number.
_FURTHER_FILE = re.compile(rf"{REPLAY}/(\d{{1,9}}/)?\w[\w.-]{{0,99}}")
#: Maximum size of each file in bytes. `header` is the first part of `tensors.safetensors`. Its
#: maximum is enough for the names and shapes of about 150,000 tensors.
_MOST_BYTES = {
    TENSORS: 4 << 30,
    checkpoints_0_3.TENSORS: 4 << 30,
    "header": 16 << 20,
    STATE: 64 << 20,
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
        state: the state: plain data (see `polopt.common.plain_data`). `read_checkpoint` will
            return an equal state.
        add_files: a function that writes data that is too large for `state`. Its argument is the
            path of a directory that does not exist yet. The function returns the SHA-256 of each
            file that it has written to this directory, by file name. It is called before `state` is
            written. Changes that it makes to `state` are saved if it returns at least one file.

    Raises:
        TypeError: `state` holds a value that is not plain data.
        CheckpointError: a file is too large, or cannot be written. No temporary file is left.
    """
    directory = Path(directory)
    files = _files(directory, state)  # raises before anything is written
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Until the new manifest exists, the directory counts as incomplete.
        (directory / "manifest.json").unlink(missing_ok=True)
        # These may exist from an older checkpoint in this directory.
        (directory / checkpoints_0_3.TENSORS).unlink(missing_ok=True)
        if (directory / REPLAY).exists():
            shutil.rmtree(directory / REPLAY)
        further = add_files(directory / REPLAY)
        if further:
            files = _files(directory, state)
        sums = {name: _write(directory / name, data) for name, data in files.items()}
        sums |= {f"{REPLAY}/{name}": checksum for name, checksum in further.items()}
        manifest = {"format": FORMAT, "sha256": sums, "seal": _seal(FORMAT, sums)}
        _write(directory / "manifest.json", json.dumps(manifest).encode())
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be written: {error.strerror or error}"
        ) from error


def _files(directory: Path, state: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the contents of the files that hold `state`, by file name."""
    tree, tensors = encode(state)
    packed = safetensors.torch.save(tensors)
    files = {TENSORS: packed, STATE: json.dumps(tree, indent=1).encode()}
    sizes = {name: len(data) for name, data in files.items()}
    sizes["header"] = int.from_bytes(packed[:8], "little")
    for name, size in sizes.items():
        if size > _MOST_BYTES[name]:
            raise CheckpointError(
                f"checkpoint {directory} cannot be written: {name} would have {size:,} bytes. "
                f"Allowed: {_MOST_BYTES[name]:,}"
            )
    return files


def read_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint, and returns a state that equals the state that was given to
    `write_checkpoint`.

    Raises:
        CheckpointError: the checkpoint cannot be read. The message names the file and the reason.
    """
    directory = Path(directory)
    written, sums = _read_manifest(directory)
    tensors_file = TENSORS if written == FORMAT else checkpoints_0_3.TENSORS
    files = {}
    for name in (tensors_file, STATE):
        files[name] = _read(directory / name)
        if _sha256(files[name]) != sums.get(name):
            raise _other_sum(directory, name)
    load = _load_tensors if written == FORMAT else checkpoints_0_3.load_tensors
    try:
        tensors = load(files[tensors_file])
    except Exception as error:  # a file of arbitrary bytes can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {directory}: {tensors_file} does not hold plain tensors: {reason:.300}"
        ) from None
    tree = _parse_json(directory / STATE, files[STATE])
    try:
        state = decode(tree, tensors)
        if not isinstance(state, dict):
            raise DecodeError("the state is not a mapping")
        if written != FORMAT:
            checkpoints_0_3.convert(state)
    except RecursionError:
        raise CheckpointError(f"checkpoint {directory}: {STATE} is nested too deeply") from None
    except DecodeError as error:
        raise CheckpointError(f"checkpoint {directory}: {STATE}: {error}") from None
    return state


def check_further_files(directory: str | Path) -> None:
    """Compares the SHA-256 of each file of the replay buffer with the manifest. `read_checkpoint`
    does not read these files, because they may have many gigabytes.

    Raises:
        CheckpointError: one of these files or the manifest is missing or damaged, or cannot be
            read.
    """
    directory = Path(directory)
    for name, expected in _read_manifest(directory)[1].items():
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
            raise _other_sum(directory, name)


def read_state_file(directory: str | Path) -> dict[str, Any]:
    """Returns the content of `state.json` of a checkpoint, without decoding it. The tensors and the
    replay files are not read. If the manifest is intact, this function checks `state.json` with the
    manifest. If the manifest is missing or damaged, there is no such check.

    Raises:
        CheckpointError: the file is missing, is not JSON, or does not match the manifest, or the
            manifest has another format.
    """
    path = Path(directory) / STATE
    data = _read(path)
    try:
        whole = _read_manifest(path.parent)[1].get(path.name) == _sha256(data)
    except DamagedCheckpoint:
        # The manifest is missing or damaged. `state.json` is complete, because it is renamed only
        # after it is written.
        whole = True
    if not whole:
        raise _damaged(directory, f"{path.name} does not match the manifest")
    return _parse_json(path, data)


def _read_manifest(directory: Path) -> tuple[int, dict[str, Any]]:
    """Returns the version of the format, and the SHA-256 sums of the files by file name."""
    path = directory / "manifest.json"
    manifest = _parse_json(path, _read(path))
    try:
        seal = _seal(manifest.get("format"), manifest.get("sha256"))
    except RecursionError:
        raise _damaged(directory, "manifest.json is nested too deeply") from None
    if manifest.get("seal", seal) != seal:
        raise _damaged(directory, "manifest.json does not match its own checksum")
    if manifest.get("format") not in _READ_FORMATS:
        raise CheckpointError(
            f"checkpoint {directory} has format {manifest.get('format')!r:.80}, but "
            f"this version of polopt reads formats {', '.join(map(str, _READ_FORMATS))}"
        )
    sums = manifest.get("sha256")
    if not isinstance(sums, dict):
        raise _damaged(directory, "manifest.json has no SHA-256 of the files")
    return manifest["format"], sums


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


def _load_tensors(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors in the content of `tensors.safetensors`, as copies.

    Raises:
        Exception: the content is not valid. The tensors of a valid file cover its bytes without
            gaps and overlaps, so they need no more memory than the file.
    """
    header = int.from_bytes(data[:8], "little")
    if header > _MOST_BYTES["header"]:
        raise ValueError(f"its header has {header:,} bytes. Allowed: {_MOST_BYTES['header']:,}")
    # safetensors takes the last of several entries with the same name.
    json.loads(data[8 : 8 + header].decode(), object_pairs_hook=_without_duplicates)
    return safetensors.torch.load(data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header has two entries with the same name")
    return entries


def _write(path: Path, data: bytes) -> str:
    return write_arrays(path, [np.frombuffer(data, np.uint8)])


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    if not data:  # for example, the directory was copied to a full disk
        raise DamagedCheckpoint(f"checkpoint {path.parent} is incomplete: {path.name} is empty")
    try:
        read: dict[str, Any] = json.loads(data)
    except RecursionError:
        raise _damaged(path.parent, f"{path.name} is nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise _damaged(path.parent, f"{path.name}: {error}") from None
    if not isinstance(read, dict):
        raise _damaged(path.parent, f"{path.name} is not a mapping")
    return read


def _damaged(directory: str | Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint {directory} is damaged: {why}")


def _other_sum(directory: Path, name: str) -> DamagedCheckpoint:
    why = f"the SHA-256 of {name} differs from the SHA-256 in the manifest"
    return _damaged(directory, why)


def _seal(*parts: Any) -> str:
    """Returns the SHA-256 of the manifest's content. Without this checksum, a flipped bit in the
    version number would look like another format."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
