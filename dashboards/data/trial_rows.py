"""Rows of one trial: the cached part of its result file, and the part that is newer."""

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
#: Rows that are kept in memory before the cache file is rewritten: at least this many, and a
#: tenth of those in the file, so that a growing run is rewritten a few dozen times in all.
_LEAST_NEW_ROWS = 256
_MOST_NEW_ROWS = 20_000
_COLUMNS_IN_MEMORY = 64


class TrialRows:
    """Rows of one trial as columns, read incrementally.

    Args:
        folder: the trial's directory.
        cache_folder: where cache files are.

    Attributes:
        problems: sentences about what could not be read.
        config: config that the first row carries, or None.
        config_changes: of each later change the keys with their old and new values.
        half_line: whether the file ends in a line without its newline.
        version: changes whenever rows do.
    """

    def __init__(self, folder: Path, cache_folder: Path) -> None:
        self._cache = TrialCache(cache_folder, folder)
        self._lock = threading.RLock()
        self._header = self._cache.open()
        self._tail = RowColumns()
        self._seen: tuple[Path, int, int] | None = None  # path, bytes and mtime of the last look
        self._loaded: OrderedDict[str, np.ndarray[Any, Any]] = OrderedDict()
        self._unreadable = ""
        self._line_too_long = False
        self.half_line = False
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self._tail = RowColumns()
        self._parser = LineParser(copy.deepcopy(self._header.notes))
        self._offset, self._fingerprint = self._header.offset, self._header.fingerprint
        self._forget_columns()

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
                f"result.json: line {line} has more than {most:,} bytes; the rest is left out"
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
        """Rows in the file so far, repeated ones included."""
        return self._header.num_rows + self._tail.num_rows

    def refresh(self, file: Path, progress: Callable[[int], None]) -> None:
        """Reads what was appended to `file` since the last call.

        Args:
            file: the trial's result file. Another file with the same beginning may take its place.
            progress: receives the number of bytes after each block that was read.
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
        with contextlib.suppress(OSError):  # no space or no permission: the rows stay in memory
            self._cache.write(header, columns)
            self._header, self._tail = header, RowColumns()

    def names(self) -> set[str]:
        """Names of all columns."""
        with self._lock:
            if self._names is None:
                self._names = self._cache.names() | self._tail.names() if self.num_rows else set()
            return self._names

    def column(self, name: str) -> np.ndarray[Any, Any] | None:
        """One column of shape `[rows in effect]`. None if no row has it."""
        return self.columns([name]).get(name)

    def columns(self, wanted: list[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Columns by name, each of shape `[rows in effect]`. Names that no row has are left out."""
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
        """Columns with all rows, cached ones first."""
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
    if head.dtype == object and tail.dtype != object:  # no new row has this column of strings
        tail = np.full(len(tail), "", dtype=object)
    elif head.dtype != object and tail.dtype == object:  # the key changed its type
        tail = np.full(len(tail), np.nan)
    return np.concatenate([head, tail])


def _fingerprint(stream: Any, offset: int) -> str:
    start = max(0, offset - _FINGERPRINT_BYTES)
    stream.seek(start)
    return hashlib.sha256(stream.read(offset - start)).hexdigest()
