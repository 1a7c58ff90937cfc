"""`TrialRows`: the rows of one trial, from its cache file and the newer part of `result.json`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polopt.common.files import open_regular
from polopt.dashboards.data.cache import CacheHeader, TrialCache
from polopt.dashboards.data.rows import ITERATION, LineParser, RowColumns, rows_in_effect

_BLOCK_BYTES = 1 << 22
_FINGERPRINT_BYTES = 1024
MOST_FILE_BYTES = 16 << 30
_MOST_LINE_BYTES = 16 << 20
#: After a refresh, the cache file is rewritten if there are at least this many new rows, and at
#: least a tenth as many as in the cache file. So the file of a growing run is rewritten only a few
#: dozen times in total.
_LEAST_NEW_ROWS = 256
#: During a refresh, the cache file is rewritten whenever this many new rows are in memory.
_MOST_NEW_ROWS = 20_000
_COLUMNS_IN_MEMORY = 64


class TrialRows:
    """Reads the rows of one trial incrementally, and returns them as columns. A row is one result,
    which is one line of `result.json`.

    Args:
        folder: directory of the trial.
        cache_folder: directory of the cache files.

    Attributes:
        problems: sentences about files and lines that could not be read.
        config: the config in the first row that contains a config, or None.
        config_changes: for each later change of the config, the changed keys with their old and new
            values.
        half_line: whether the file ends with a line without a newline.
        version: a number that increases whenever the rows change.
    """

    def __init__(self, folder: Path, cache_folder: Path) -> None:
        self._cache = TrialCache(cache_folder, folder)
        self._lock = threading.RLock()
        self._header = self._cache.open()
        self._tail = self._new_tail()
        self._seen: tuple[Path, int, int] | None = None  # path, size and mtime at the last refresh
        self._loaded: OrderedDict[str, np.ndarray[Any, Any]] = OrderedDict()
        self._unreadable = ""
        self._line_too_long = False
        self.half_line = False
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self._tail = self._new_tail()
        self._parser = LineParser(copy.deepcopy(self._header.notes))
        self._offset, self._fingerprint = self._header.offset, self._header.fingerprint
        self._forget_columns()

    def _new_tail(self) -> RowColumns:
        names = self._cache.names() if self._header.num_rows else ()
        return RowColumns(self._header.num_rows, len(names), self._header.offset)

    def _forget_columns(self) -> None:
        self._loaded.clear()
        self._mask: np.ndarray[Any, Any] | None = None
        self._names: set[str] | None = None
        self.version += 1

    @property
    def problems(self) -> list[str]:
        found = [f"result.json: {problem}" for problem in self._parser.notes.problems]
        if self._line_too_long:
            line, most = self._parser.notes.num_lines + 1, _MOST_LINE_BYTES
            found.append(
                f"result.json: line {line} is longer than {most:,} bytes. This line and all later"
                " lines are ignored"
            )
        return [self._unreadable, *found] if self._unreadable else found

    @property
    def config(self) -> dict[str, Any] | None:
        return self._parser.notes.config

    @property
    def config_changes(self) -> list[dict[str, list[str]]]:
        return self._parser.notes.config_changes

    @property
    def num_rows(self) -> int:
        """The number of rows read so far, including rows that a resumed run has replaced."""
        return self._header.num_rows + self._tail.num_rows

    def refresh(self, file: Path, progress: Callable[[int], None]) -> None:
        """Reads the rows that were appended to `file` since the last call.

        Args:
            file: the result file of the trial. A later call may pass another copy of the file. If
                the copy does not begin with the bytes that were read, all rows are read again.
            progress: called after each block with the number of bytes in the block.
        """
        with self._lock:
            try:
                status = file.stat()
                seen = (file, status.st_size, status.st_mtime_ns)
                if seen == self._seen:
                    return
                with open_regular(file, MOST_FILE_BYTES) as stream:
                    self._read(stream, status.st_size, progress)
            except OSError as error:
                self._unreadable = f"{file.name} cannot be read: {error.strerror}"
            else:
                self._unreadable, self._seen = "", seen

    def _read(self, stream: Any, size: int, progress: Callable[[int], None]) -> None:
        if size < self._offset or _fingerprint(stream, self._offset) != self._fingerprint:
            self._header = CacheHeader()
            self._begin()
        stream.seek(self._offset)
        begun_at, rest = self._offset, b""
        while self._offset + len(rest) < size:
            block = stream.read(min(_BLOCK_BYTES, size - self._offset - len(rest)))
            if not block:
                break
            progress(len(block))
            lines, newline, after = block.rpartition(b"\n")
            if not newline:
                rest += block
                if len(rest) > _MOST_LINE_BYTES:
                    break
                continue
            lines = rest + lines + newline
            self._parser.parse(lines, self._tail)
            self._offset += len(lines)
            rest = after
            if self._tail.num_rows >= _MOST_NEW_ROWS:
                self._write_cache(stream)
        self._line_too_long = len(rest) > _MOST_LINE_BYTES
        self.half_line = bool(rest.strip()) and not self._line_too_long
        if self._offset == begun_at:
            return
        self._fingerprint = _fingerprint(stream, self._offset)
        self._forget_columns()
        if self._tail.num_rows >= max(_LEAST_NEW_ROWS, self._header.num_rows // 10):
            self._write_cache(stream)

    def _write_cache(self, stream: Any) -> None:
        self._loaded.clear()
        names = self._cache.names() | self._tail.names()
        columns = self._wholes(sorted(names))
        header = CacheHeader(
            offset=self._offset,
            fingerprint=_fingerprint(stream, self._offset),
            notes=copy.deepcopy(self._parser.notes),
            num_rows=self.num_rows,
        )
        # If the disk is full or not writable, the rows stay in memory.
        with contextlib.suppress(OSError):
            self._cache.write(header, columns)
            self._header = header
            self._tail = self._new_tail()

    def names(self) -> set[str]:
        """Returns the names of all columns."""
        with self._lock:
            if self._names is None:
                self._names = self._cache.names() | self._tail.names() if self.num_rows else set()
            return self._names

    def column(self, name: str) -> np.ndarray[Any, Any] | None:
        """Returns a column of shape `[rows in effect]`, or None if no row has this column.

        `rows_in_effect` chooses the rows.
        """
        return self.columns([name]).get(name)

    def columns(self, wanted: list[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns columns by name, each of shape `[rows in effect]`.

        The result does not contain names that occur in no row.
        """
        with self._lock:
            names = self.names()
            if ITERATION in names and self._mask is None:
                self._mask = rows_in_effect(self._whole(ITERATION))
            missing = [name for name in wanted if name in names and name not in self._loaded]
            for name, values in self._wholes(missing).items():
                self._loaded[name] = values if self._mask is None else values[self._mask]
            found = {name: self._loaded[name] for name in wanted if name in self._loaded}
            for name in found:
                self._loaded.move_to_end(name)
            while len(self._loaded) > _COLUMNS_IN_MEMORY:
                self._loaded.popitem(last=False)
            return found

    def _whole(self, name: str) -> np.ndarray[Any, Any]:
        return self._wholes([name])[name]

    def _wholes(self, names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns columns with all rows: the rows of the cache file, followed by newer rows."""
        cached = self._cache.read(names) if self._header.num_rows and names else {}
        return {
            name: _joined(cached.get(name), self._header.num_rows, self._tail.column(name))
            for name in names
        }


def _joined(
    head: np.ndarray[Any, Any] | None, num_head: int, tail: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    if head is None:
        empty = "" if tail.dtype == object else np.nan
        head = np.full(num_head, empty, dtype=tail.dtype)
    if head.dtype == object and tail.dtype != object:  # the new rows lack this column of strings
        tail = np.full(len(tail), "", dtype=object)
    elif head.dtype != object and tail.dtype == object:  # the key changed its type
        tail = np.full(len(tail), np.nan)
    return np.concatenate([head, tail])


def _fingerprint(stream: Any, offset: int) -> str:
    start = max(0, offset - _FINGERPRINT_BYTES)
    stream.seek(start)
    return hashlib.sha256(stream.read(offset - start)).hexdigest()
