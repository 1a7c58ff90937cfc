"""`RowStore`: a ring buffer of rows, with arrays in memory or in memory-mapped files."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polopt.common.config import ConfigError
from polopt.common.files import open_regular
from polopt.common.plain_data import describe_dtype, read_dtype
from polopt.metrics.memory import memory

#: Approximate size of a file of rows. If one row of a file changes, `save` writes the whole file
#: again.
_FILE_BYTES = 8 << 20


class RowFilesError(RuntimeError):
    """Files of rows are missing or damaged, or belong to another buffer."""


class ColumnSpec(NamedTuple):
    """The shape and dtype of one row of a column."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def readable_bytes(nbytes: float) -> str:
    """Formats a number of bytes, such as `1.5 GB`. One GB is 1,000 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"


def check_size(nbytes: int, key: str, capacity: int, directory: Path | None = None) -> None:
    """Checks that a full buffer fits into memory or onto the disk.

    Args:
        nbytes: bytes of the full buffer.
        key: the option that sets the size of the buffer, for the error message.
        capacity: number of rows of the full buffer.
        directory: directory of the files of the buffer. `None` means that the buffer is in memory.

    Raises:
        ConfigError: the buffer does not fit. The message names its size, the free space and the
            capacity that would fit.
    """
    if directory is None:
        free, where = memory().own, "memory"
    else:
        free, where = shutil.disk_usage(directory).free, f"the disk of {directory}"
    if nbytes > free:
        fits = int(capacity * (free / nbytes))
        raise ConfigError(
            f"key {key!r}: got {capacity:,}; the full buffer needs {readable_bytes(nbytes)} "
            f"({nbytes / capacity:,.0f} bytes a row), and {readable_bytes(free)} of {where} are "
            f"free. Allowed: up to about {fits:,}"
        )


class RowStore:
    """A ring buffer of rows, with one array `[capacity, ...]` for each column.

    Each row has a serial number. Serial numbers count up from 0, and are never used again. The row
    `serial` is at place `serial % capacity` of the arrays.

    The operating system allocates memory only as the ring buffer fills. With a directory, the
    arrays are mapped from files, so the operating system can write pages to the disk when it needs
    memory. These files have no names, so the operating system removes them when the process ends.

    Args:
        capacity: number of rows.
        specs: shape and dtype of one row of each column, by name of the column.
        directory: directory of the files. `None` keeps the arrays in memory.

    Attributes:
        arrays: arrays `[capacity, ...]`, by name of the column.
    """

    def __init__(
        self, capacity: int, specs: Mapping[str, ColumnSpec], directory: Path | None = None
    ) -> None:
        self.capacity = capacity
        self.specs = dict(specs)
        self.arrays = {name: _array(capacity, spec, directory) for name, spec in specs.items()}
        self._part = max(1, _FILE_BYTES // max(1, self.row_nbytes(specs)))  # rows per file
        parts = -(-capacity // self._part)
        self._changed = np.ones(parts, dtype=bool)  # one bool per file: changed since the last save
        self._saved: dict[int, tuple[Path, dict[str, Any]]] = {}

    @staticmethod
    def row_nbytes(specs: Mapping[str, ColumnSpec]) -> int:
        """Bytes of one row of all columns."""
        return sum(spec.nbytes for spec in specs.values())

    def write(self, name: str, serial: int, rows: np.ndarray) -> None:
        """Writes rows of a column at consecutive serial numbers.

        Args:
            name: name of the column.
            serial: serial number of the first row.
            rows: `[K, ...]`, at most `capacity` rows.
        """
        array, start = self.arrays[name], serial % self.capacity
        first = self.capacity - start
        array[start : start + len(rows)] = rows[:first]
        self._changed[start // self._part : -(-(start + len(rows)) // self._part)] = True
        if len(rows) > first:
            array[: len(rows) - first] = rows[first:]
            self._changed[: -(-(len(rows) - first) // self._part)] = True

    def put(self, name: str, serials: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows `[K, ...]` of a column at serial numbers `[K]`, which may be in any order."""
        places = serials % self.capacity
        self.arrays[name][places] = rows
        self._changed[places // self._part] = True

    def read(self, name: str, serial: int, count: int) -> np.ndarray:
        """Returns `[count, ...]`, the rows of a column at consecutive serial numbers. The result
        may be a view."""
        array, start = self.arrays[name], serial % self.capacity
        if start + count <= self.capacity:
            return array[start : start + count]
        return np.concatenate([array[start:], array[: start + count - self.capacity]])

    def save(self, directory: Path, filled: int) -> dict[str, Any]:
        """Writes the rows to files of about 8 MB. If the rows of a file have not changed since the
        last save or load, this method only creates a hard link to the old file. This costs almost
        nothing.

        This method never writes into a complete file. It writes a new file, and then replaces a
        file of the same name. So the files of earlier checkpoints keep their contents, even if
        the checkpoints share files.

        Args:
            directory: directory for the files.
            filled: number of rows in use, from place 0.

        Returns:
            The state that `load` needs in addition to the files: the columns, and the number of
            rows and the SHA-256 of each file.

        Raises:
            OSError: a file cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = []
        for part, start in enumerate(range(0, filled, self._part)):
            stop = min(filled, start + self._part)
            path = directory / _name(part)
            saved_path, entry = self._saved.get(part, (path, {}))
            unchanged = not self._changed[part] and entry.get("rows") == stop - start
            if not (unchanged and _link(saved_path, path)):
                arrays = [array[start:stop] for array in self.arrays.values()]
                entry = {"rows": stop - start, "sha256": write_arrays(path, arrays)}
            self._saved[part] = path, entry
            self._changed[part] = False
            files.append(entry)
        columns = {
            n: [list(spec.shape), describe_dtype(spec.dtype)] for n, spec in self.specs.items()
        }
        return {"columns": columns, "rows_per_file": self._part, "files": files}

    @staticmethod
    def checksums(saved: Mapping[str, Any]) -> dict[str, str]:
        """The SHA-256 of each file that `save` wrote, by the name of the file.

        Args:
            saved: the state that `save` returned.
        """
        return {_name(part): entry["sha256"] for part, entry in enumerate(saved["files"])}

    def load(self, directory: Path, saved: Mapping[str, Any]) -> int:
        """Reads the files of a `save` into the arrays, without a copy in memory.

        Args:
            directory: directory of the files.
            saved: the state that `save` returned.

        Returns:
            The number of rows.

        Raises:
            RowFilesError: a file is missing or damaged, or `saved` has a wrong number of rows for a
                file, or more rows than `capacity`.
        """
        self._part = int(saved["rows_per_file"])
        self._changed = np.zeros(max(1, -(-self.capacity // max(1, self._part))), dtype=bool)
        self._saved.clear()
        start = 0
        for part, entry in enumerate(saved["files"]):
            path, rows = directory / _name(part), int(entry["rows"])
            if not (start == part * self._part and 0 < rows <= self._part):
                raise RowFilesError(
                    f"{path}: wrong number of rows; got {rows} rows, starting at row {start}"
                )
            if start + rows > self.capacity:
                raise RowFilesError(
                    f"{path}: the files have more rows than the buffer, which has {self.capacity:,}"
                )
            arrays = [array[start : start + rows] for array in self.arrays.values()]
            read_arrays(path, arrays, entry["sha256"])
            self._saved[part] = path, dict(entry)
            start += rows
        return start


def _name(part: int) -> str:
    return f"rows-{part:06d}.bin"


def saved_specs(saved: Mapping[str, Any]) -> dict[str, ColumnSpec]:
    """The shape and dtype of each column that `RowStore.save` wrote.

    Raises:
        RowFilesError: a dtype is neither a number nor a bool nor a structure of these, or a shape
            is invalid.
    """
    specs = {}
    for name, (shape, dtype) in saved["columns"].items():
        try:
            specs[name] = ColumnSpec(_shape(shape), read_dtype(dtype, "biuf"))
        except (TypeError, ValueError, RecursionError):
            raise RowFilesError(
                f"column {name!r:.80}: invalid; got shape {shape!r:.80}, dtype {dtype!r:.80}"
            ) from None
    return specs


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(sizes)
    return tuple(sizes)


def write_arrays(path: Path, arrays: Sequence[np.ndarray]) -> str:
    """Writes the bytes of arrays to one file. Contiguous arrays are not copied in memory.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: the file cannot be written. The function removes an incomplete file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb", buffering=0) as file:
            for array in arrays:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                digest.update(data)
                while len(data):
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


def read_arrays(path: Path, arrays: Sequence[np.ndarray], sha256: str) -> None:
    """Reads a file of `write_arrays` into contiguous arrays.

    Raises:
        RowFilesError: the file cannot be read, its size is not the size of the arrays, or its
            SHA-256 is not `sha256`.
    """
    size = sum(array.nbytes for array in arrays)
    digest = hashlib.sha256()
    try:
        with open_regular(path, size) as file:
            whole = os.fstat(file.fileno()).st_size == size
            for array in arrays:
                data = array.reshape(-1).view(np.uint8).data
                whole = whole and file.readinto(data) == len(data)
                digest.update(data)
    except OSError as error:
        raise RowFilesError(f"{path} cannot be read: {error.strerror or error}") from None
    if not whole or digest.hexdigest() != sha256:
        raise RowFilesError(f"{path} is damaged: its size or SHA-256 differs")


def _link(written: Path, path: Path) -> bool:
    """Creates the hard link `path` to the older file `written`, unless both paths are equal.
    Returns whether `path` is the older file now."""
    if written == path:
        return path.exists()
    try:
        path.unlink(missing_ok=True)
        os.link(written, path)
    except OSError:  # the old file is gone or on another disk, or the disk has no hard links
        return False
    return True


def _array(capacity: int, spec: ColumnSpec, directory: Path | None) -> np.ndarray:
    shape = (capacity, *spec.shape)
    if directory is None:
        return np.zeros(shape, dtype=spec.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".replay-", dir=directory)
    os.unlink(name)
    with os.fdopen(descriptor, "r+b") as file:
        file.truncate(max(1, capacity * spec.nbytes))
        return np.memmap(file, dtype=spec.dtype, mode="r+", shape=shape)
