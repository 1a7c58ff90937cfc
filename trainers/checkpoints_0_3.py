"""Reads what is different in the files of checkpoints of polopt 0.3 (format 2).

`tensors.pt` holds the tensors as `torch.save` writes a dict of tensors. Rows of Dict and Tuple
observations are arrays of bytes, and not structured arrays. The numbers of NumPy that are not in
the config are numbers of Python, tuples are lists, and the keys of dicts are strings.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.common.plain_data import DecodeError
from polopt.policies.spaces import ObservationEncoder
from polopt.trainers.saved_spaces import space_of

#: Name of the file with the tensors.
TENSORS = "tensors.pt"
#: Maximum size of the pickle inside `tensors.pt` in bytes. It is enough for the names and shapes of
#: about 150,000 tensors.
_MOST_PICKLE_BYTES = 16 << 20
#: Names of the entries of the ZIP file that `torch.save` writes, without the top-level folder that
#: all entries share.
_ENTRY = re.compile(
    r"data\.pkl|data/[0-9]+|version|byteorder"
    r"|\.format_version|\.storage_alignment|\.data/serialization_id"
)


def load_tensors(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors in the content of `tensors.pt`. The memory for the tensors is at most a
    few times the size of `data`. Nothing in `data` is executed.

    Raises:
        ValueError: `data` holds something that `torch.save` does not write for a dict of dense
            tensors.
        Exception: `zipfile`, `pickletools` or torch cannot read `data`.
    """
    tensors = torch.load(_stored(data), weights_only=True, map_location="cpu")
    if not isinstance(tensors, dict):
        raise ValueError("it does not hold a dict of tensors")
    total = 0
    for name, tensor in tensors.items():
        if problem := _problem(name, tensor):
            raise ValueError(f"field {name!r:.200}: got {problem}. Allowed: a dense tensor")
        total += tensor.nbytes
        if total > len(data):
            raise ValueError(
                f"the tensors up to field {name!r:.200} need more bytes than the file has"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _problem(name: Any, tensor: Any) -> str:
    """Returns why polopt cannot have written this entry. Returns an empty string if the entry is
    valid."""
    if not isinstance(name, str):
        return f"a name of type {type(name).__name__}"
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    if not tensor.is_contiguous():
        return f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}"
    return ""


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
    if len(data) > _MOST_PICKLE_BYTES:
        raise ValueError(f"its pickle has {len(data):,} bytes. Allowed: {_MOST_PICKLE_BYTES:,}")
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


def convert(state: Mapping[str, Any]) -> None:
    """Changes the state of a checkpoint, in place, to what the current version saves: rows of Dict
    and Tuple observations become structured arrays. A state that does not describe its spaces stays
    unchanged, because such a checkpoint has no structured rows."""
    try:
        space = space_of(state["spaces"]["observation"], "spaces/observation")
        dtype = ObservationEncoder(space).row_dtype
    except (DecodeError, ValueError, TypeError, LookupError, ArithmeticError):
        return  # `polopt.load` raises an error that names the problem
    if dtype.names is None:
        return
    for owner, key in _owners_of_rows(state.get("optimizer")):
        rows = _in(owner, key)
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
            continue
        if rows.shape[-1:] == (dtype.itemsize,):
            owner[key] = rows.view(dtype)[..., 0]


def _owners_of_rows(optimizer: Any) -> Iterator[tuple[Any, str]]:
    """Yields each dict that has rows of observations, with the key of the rows."""
    workers = _in(optimizer, "workers")
    for worker in workers.values() if isinstance(workers, Mapping) else ():
        yield _in(worker, "sampler"), "obs"
    tails = _in(_in(_in(optimizer, "files"), "rows"), "tails")
    for tail in tails if isinstance(tails, list) else ():
        yield tail, "next_obs"


def _in(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None
