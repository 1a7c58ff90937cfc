"""The columnar cache of result files: one Parquet file per trial in the user's cache directory.

Nothing is written next to the results, which may belong to another user. A cache file holds all
rows of a result file up to a byte offset, in file order, and what is needed to go on from there.
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

_FORMAT = 2  # of the files. A file of another format is built anew
_KEY = b"polopt"
_UNUSED_S = 30 * 24 * 3600.0
_MOST_BYTES = 4 << 20  # of the columns of one file that are kept in memory


@dataclass
class CacheHeader:
    """What a cache file says about its source.

    Attributes:
        offset: bytes of the result file from which the rows were made.
        fingerprint: hash of the last bytes before `offset`, to recognise another file in its place.
        notes: what the lines up to `offset` say besides their numbers.
        num_rows: rows in the cache file.
        format: version of this layout.
    """

    offset: int = 0
    fingerprint: str = ""
    notes: FileNotes = field(default_factory=FileNotes)
    num_rows: int = 0
    format: int = _FORMAT


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/polopt/dashboard`, `~/.cache/polopt/dashboard` without that variable."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "polopt" / "dashboard"


def remove_unused(folder: Path) -> None:
    """Removes cache files that were not opened for 30 days."""
    for path in folder.glob("*.parquet"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


class TrialCache:
    """The cache file of one result file.

    Args:
        folder: where cache files are.
        source: the trial's directory. Its absolute path names the cache file.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:32]
        self._path = folder / f"{name}.parquet"
        # Stays open: another process may replace the file, and this one goes on with the old rows.
        self._file: pq.ParquetFile | None = None
        self._names: set[str] = set()
        self._columns: OrderedDict[str, np.ndarray[Any, Any]] = OrderedDict()  # the last ones read

    def open(self) -> CacheHeader:
        """The header of the cache file, or an empty header if the file cannot be used."""
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
            os.utime(self._path)  # `remove_unused` goes by it
        return header

    def names(self) -> set[str]:
        """Names of the columns in the cache file."""
        return self._names

    def read(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Columns by name, each of shape `[num_rows]`. Names that the file lacks are left out."""
        present = [name for name in names if name in self.names()]
        missing = [name for name in present if name not in self._columns]
        if missing and self._file is not None:
            # Threads take longer than the few columns that are read at once.
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
            OSError: if it cannot be written. The old file stays.
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
    """A column as an array. `to_numpy` would import pandas, which takes longer than reading."""
    if pa.types.is_string(column.type):
        return np.array(column.to_pylist(), dtype=object)
    return np.from_dlpack(column.combine_chunks())
