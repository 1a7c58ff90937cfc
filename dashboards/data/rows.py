"""Parses the JSON lines that Tune writes to `result.json`, and stores their values as columns."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

#: The column with the iteration of each row. It reveals the rows that a resumed run wrote again.
ITERATION = "training_iteration"
#: The column with the number of changes of the config since the first row (up to `_MAX_CHANGES`).
CONFIG_CHANGES = "config/num_changes"
#: The text for a key that a config does not contain.
NOT_SET = "not set"
# The keys of a row whose dicts become columns. Other dicts of a row repeat these dicts (`info`,
# `timers`) or rarely change (`config`).
_BLOCKS = frozenset({"optimizer", "env_runners", "learners", "fault_tolerance", "evaluation"})
_FREE_CELLS = 4_000_000  # number of values of a file of any size. They take 32 MB as numbers
_MAX_LIST = 64  # only the first entries of a list become columns
_MAX_PROBLEMS = 5
_MAX_CHANGES = 200  # maximum number of recorded changes of the config
_MAX_DEPTH = 8  # maximum depth of nested dicts. Deeper values are ignored

# Maps each key of a dict to its column of numbers, or to the node of the nested dict.
_Node = dict[str, Any]


class RowColumns:
    """Columns that grow row by row. Numbers become float64, and strings become objects.

    The name of a column is the nested keys, joined by `/`. An entry of a list has its index as the
    last part of the name. If a row does not have a key, its value is NaN or an empty string.

    A row, a list and a name of a column take memory in every other row or column. So a small file
    of odd rows could take all memory. Therefore, the number of columns times the number of rows is
    at most the number of bytes of the file, plus `_FREE_CELLS`.

    Args:
        num_rows_before: number of earlier rows of the file, which are stored elsewhere.
        num_columns_before: number of columns of these rows.
        num_bytes_before: number of bytes of these rows.

    Attributes:
        num_rows: number of rows appended so far.
    """

    def __init__(
        self, num_rows_before: int = 0, num_columns_before: int = 0, num_bytes_before: int = 0
    ) -> None:
        self.num_rows = 0
        self._before = num_rows_before
        self._num_columns = num_columns_before
        self._num_bytes = num_bytes_before
        self._root: _Node = {}
        self._numbers: dict[str, array[float]] = {}
        self._strings: dict[str, list[str]] = {}

    def append(self, row: Mapping[str, Any], num_bytes: int) -> bool:
        """Appends one decoded row: its numbers, and the values of its dicts in `_BLOCKS`.

        Args:
            row: the row.
            num_bytes: length of its line in the file.

        Returns:
            False if the row was not appended, or not all of its values, because the columns would
            take too much memory.
        """
        self._num_bytes += num_bytes
        most = (self._num_bytes + _FREE_CELLS) // (self._before + self.num_rows + 1)
        if self._num_columns > most:
            return False
        self._most_columns = most
        self._is_whole = True
        top = {key: value for key, value in row.items() if not isinstance(value, dict | str | list)}
        self._add(top, self._root, "", 0)
        for block in _BLOCKS & row.keys():
            if isinstance(row[block], dict):
                node = self._root.setdefault(f"{block}/", {})
                self._add(row[block], node, f"{block}/", 1)
        self.num_rows += 1
        return self._is_whole

    def _new_column(self) -> bool:
        """Counts a new column. Returns False if there are too many columns."""
        if self._num_columns >= self._most_columns:
            self._is_whole = False
            return False
        self._num_columns += 1
        return True

    def _add(self, values: Mapping[str, Any], node: _Node, prefix: str, depth: int) -> None:
        """Appends the values of one dict.

        This method runs for each dict of each row, so it must be fast. Therefore, it looks up
        columns of numbers in the tree of nodes, so it need not construct their joined names. It
        looks up columns of strings by their joined names.
        """
        num_rows = self.num_rows
        for key, value in values.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                numbers = node.get(key)
                if type(numbers) is not array:
                    if prefix + key not in self._numbers and not self._new_column():
                        continue
                    numbers = node[key] = self._numbers.setdefault(prefix + key, array("d"))
                if len(numbers) < num_rows:
                    numbers.extend([math.nan] * (num_rows - len(numbers)))
                if len(numbers) == num_rows:  # longer if two paths have the same joined name
                    numbers.append(value if kind is float else _number(value))
            elif kind is str:
                if prefix + key not in self._strings and not self._new_column():
                    continue
                strings = self._strings.setdefault(prefix + key, [])
                if len(strings) <= num_rows:
                    strings.extend([""] * (num_rows - len(strings)))
                    strings.append(value)
            elif kind is dict or kind is list:
                if depth >= _MAX_DEPTH:
                    continue
                if kind is list:
                    value = dict(zip(_INDICES, value, strict=False))
                below = node.get(key)
                if type(below) is not dict:
                    below = node[key] = {}
                self._add(value, below, f"{prefix}{key}/", depth + 1)

    def names(self) -> set[str]:
        """Returns the names of all columns."""
        return {*self._numbers, *self._strings}

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a column of shape `[num_rows]`. All values are NaN if no row has this column."""
        strings = self._strings.get(name)
        if strings is not None:
            texts = np.full(self.num_rows, "", dtype=object)
            texts[: len(strings)] = strings
            return texts
        numbers = self._numbers.get(name, ())
        column = np.full(self.num_rows, np.nan)
        column[: len(numbers)] = numbers
        return column


_INDICES = tuple(map(str, range(_MAX_LIST)))


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer that is too large for a float
        return math.inf


@dataclass
class FileNotes:
    """The content of a result file that is not stored as columns.

    Attributes:
        num_lines: number of lines read, including skipped lines.
        problems: a sentence for each of the first few lines that were skipped.
        config: the config in the first row that contains a config.
        config_changes: for each later change of the config, the changed keys with their old and new
            values as text.
        last_config: the config in the last row that contains a config.
    """

    num_lines: int = 0
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_changes: list[dict[str, list[str]]] = field(default_factory=list)
    last_config: dict[str, Any] | None = None


class LineParser:
    """Parses the lines of a result file.

    Args:
        notes: the notes on the lines so far. The parser adds the notes on the next lines.
    """

    def __init__(self, notes: FileNotes | None = None) -> None:
        self.notes = notes or FileNotes()

    def parse(self, data: bytes, into: RowColumns) -> None:
        """Parses lines, and appends their rows to `into`.

        Args:
            data: whole lines. The last line ends with a newline.
            into: receives the rows.
        """
        for line in data.split(b"\n")[:-1]:
            self.notes.num_lines += 1
            if not line.strip():
                continue
            row = _decoded(line)
            if row is None:
                self._skip("not a JSON object")
                continue
            config = row.get("config")
            if isinstance(config, dict) and config != self.notes.last_config:
                self._note_config(config)
            row[CONFIG_CHANGES] = len(self.notes.config_changes)
            if not into.append(row, len(line)):
                self._skip("it has too many keys for the size of the file")

    def _note_config(self, config: dict[str, Any]) -> None:
        notes = self.notes
        if notes.config is None or notes.last_config is None:
            notes.config = config
        elif len(notes.config_changes) < _MAX_CHANGES:
            old, new = flat_config(notes.last_config), flat_config(config)
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            notes.config_changes.append(
                {key: [old.get(key, NOT_SET), new.get(key, NOT_SET)] for key in keys}
            )
        notes.last_config = config

    def _skip(self, why: str) -> None:
        if len(self.notes.problems) < _MAX_PROBLEMS:
            self.notes.problems.append(f"line {self.notes.num_lines} skipped: {why}")


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line)  # accepts NaN, which Tune writes before the first episode ends
            if b"\\u" in line:  # perhaps half of a surrogate pair, which cannot be written as UTF-8
                text = json.dumps(row, ensure_ascii=False).encode(errors="replace")
                row = json.loads(text)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of a config as text, by dotted keys such as `model.fcnet_hiddens`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{below}": text for below, text in flat_config(value).items()})
        else:
            flat[str(key)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def rows_in_effect(iterations: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a mask of shape `[R]` of the rows that belong to the history of the run.

    A run that resumes from a checkpoint continues from an earlier iteration, and writes its rows to
    the end of the same file. Each of these rows replaces all rows before it in the file whose
    iteration is the same or later.

    Args:
        iterations: `training_iteration` of each row in file order, shape `[R]`. Rows with NaN
            always belong to the history.
    """
    if not len(iterations):
        return np.zeros(0, dtype=bool)
    after = np.concatenate([np.where(np.isnan(iterations), np.inf, iterations)[1:], [np.inf]])
    least_after = np.minimum.accumulate(after[::-1])[::-1]
    return np.asarray(np.isnan(iterations) | (iterations < least_after))
