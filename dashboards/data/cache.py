"""The cache of result files: one Parquet file per trial in the user's cache directory.

The dashboards write nothing into the results directory, because this directory may belong to
another user. A cache file contains all rows of a result file up to a byte offset, in file order.
The header of the cache file contains the state for reading on from this offset.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polopt.dashboards.data.rows import FileNotes

_FORMAT = 2  # version of the layout. A cache file of another version is rebuilt
_KEY = b"polopt"
_UNUSED_S = 30 * 24 * 3600.0
_MOST_BYTES = 4 << 20  # limit for the columns of one file that stay in memory


@dataclass
class CacheHeader:
    """The header of a cache file, which describes the result file behind the cached rows.

    Attributes:
        offset: number of bytes of the result file that have been read.
        fingerprint: hash of the last bytes before `offset`. It reveals whether another file has
            replaced the result file.
        notes: the content of the lines up to `offset` that is not a column, such as the config.
        num_rows: number of rows in the cache file.
        format: version of the layout.
    """

    offset: int = 0
    fingerprint: str = ""
    notes: FileNotes = field(default_factory=FileNotes)
    num_rows: int = 0
    format: int = _FORMAT


def cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/polopt/dashboard`. The default of the variable is `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "polopt" / "dashboard"


def remove_unused(folder: Path) -> None:
    """Removes cache files that were not opened for 30 days."""
    for path in folder.glob("*.parquet"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


class TrialCache:
    """Reads and writes the cache file of one trial.

    Args:
        folder: directory of the cache files.
        source: directory of the trial. The name of the cache file is a hash of its absolute path.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:32]
        self._path = folder / f"{name}.parquet"
        # The file stays open. If another process replaces the cache file, this process continues
        # to read the old rows.
        self._file: pq.ParquetFile | None = None
        self._names: set[str] = set()
        # The columns that were read last.
        self._columns: OrderedDict[str, np.ndarray[Any, Any]] = OrderedDict()

    def open(self) -> CacheHeader:
        """Returns the header of the cache file, or an empty header if the file cannot be used."""
        try:
            file = pq.ParquetFile(self._path)
            schema = file.schema_arrow
            saved = json.loads(schema.metadata[_KEY])
            header = CacheHeader(**{**saved, "notes": FileNotes(**saved["notes"])})
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            return CacheHeader()
        if header.format != _FORMAT:
            return CacheHeader()
        self._file, self._names = file, set(schema.names)
        with contextlib.suppress(OSError):
            os.utime(self._path)  # `remove_unused` removes files by this time
        return header

    def names(self) -> set[str]:
        """Returns the names of the columns in the cache file."""
        return self._names

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns columns by name, each of shape `[num_rows]`. Ignores names without a column."""
        present = [name for name in names if name in self.names()]
        missing = [name for name in present if name not in self._columns]
        if missing and self._file is not None:
            # For the few columns of one call, threads cost more time than they save.
            table = self._file.read(columns=missing, use_threads=False)
            self._columns.update({name: _array(table[name]) for name in missing})
        found = {name: self._columns[name] for name in present}
        for name in present:
            self._columns.move_to_end(name)
        while sum(values.nbytes for values in self._columns.values()) > _MOST_BYTES:
            self._columns.popitem(last=False)
        return found

    def write(self, header: CacheHeader, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replaces the cache file.

        Raises:
            OSError: if the file cannot be written. Then the old file remains.
        """
        arrays = {
            name: pa.array(values, type=pa.string() if values.dtype == object else pa.float64())
            for name, values in columns.items()
        }
        table = pa.table(arrays).replace_schema_metadata({_KEY: json.dumps(asdict(header))})
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            pq.write_table(table, partial, compression="zstd", row_group_size=1 << 20)
            partial.replace(self._path)
            self._file, self._names = pq.ParquetFile(self._path), set(columns)
            self._columns.clear()
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def _array(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Converts a column to an array.

    This avoids `to_numpy`, which imports pandas. The import takes longer than reading the column.
    """
    if pa.types.is_string(column.type):
        return np.array(column.to_pylist(), dtype=object)
    return np.from_dlpack(column.combine_chunks())
