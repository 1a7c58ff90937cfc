"""Result rows as columns: parses the JSON lines that Tune writes to `result.json`."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

#: Column of the number of a row, which tells the rows that a resumed run wrote again.
ITERATION = "training_iteration"
#: Column that counts how often the config has changed since the first row.
CONFIG_CHANGES = "config/num_changes"
#: Text of a config key that a config lacks.
NOT_SET = "not set"
# Other blocks of a row repeat these (`info`, `timers`) or do not change (`config`).
_BLOCKS = frozenset({"optimizer", "env_runners", "learners", "fault_tolerance", "evaluation"})
_MAX_LIST = 64  # entries of a list that become columns
_MAX_PROBLEMS = 5
_MAX_CHANGES = 200  # of the config
_MAX_DEPTH = 8  # of dicts in dicts. Deeper values are left out

# Of the keys of one dict: a column of numbers or of strings, or the keys of the dict below.
_Node = dict[str, Any]


class RowColumns:
    """Columns that grow row by row: numbers as float64, strings as objects.

    Nested keys are joined by `/`, entries of lists have their index as the last part. A row that
    lacks a key has NaN or an empty string there.

    Attributes:
        num_rows: rows appended so far.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._root: _Node = {}
        self._numbers: dict[str, array[float]] = {}
        self._strings: dict[str, list[str]] = {}

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends the values of one decoded row."""
        top = {key: value for key, value in row.items() if not isinstance(value, dict | str | list)}
        self._add(top, self._root, "", 0)
        for block in _BLOCKS & row.keys():
            if isinstance(row[block], dict):
                node = self._root.setdefault(f"{block}/", {})
                self._add(row[block], node, f"{block}/", 1)
        self.num_rows += 1

    def _add(self, values: Mapping[str, Any], node: _Node, prefix: str, depth: int) -> None:
        """Appends the values of one dict. It runs once for each row and dict, hence the lookups by
        type and by node instead of by joined names."""
        num_rows = self.num_rows
        for key, value in values.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                numbers = node.get(key)
                if type(numbers) is not array:
                    numbers = node[key] = self._numbers.setdefault(prefix + key, array("d"))
                if len(numbers) < num_rows:
                    numbers.extend([math.nan] * (num_rows - len(numbers)))
                if len(numbers) == num_rows:  # longer where two paths have the same joined name
                    numbers.append(value if kind is float else _number(value))
            elif kind is str:
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
        """Names of all columns."""
        return {*self._numbers, *self._strings}

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One column of shape `[num_rows]`. NaN throughout if no row has it."""
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
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


@dataclass
class FileNotes:
    """What the lines of a result file say besides their numbers.

    Attributes:
        num_lines: lines seen, including skipped lines.
        problems: one sentence for each of the first few lines that were skipped.
        config: the config that the rows carry, from the first row that has one.
        config_changes: of each later change the keys with their old and new values, as text.
    """

    num_lines: int = 0
    problems: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_changes: list[dict[str, list[str]]] = field(default_factory=list)
    last_config: dict[str, Any] | None = None


class LineParser:
    """Decodes lines of a result file.

    Args:
        notes: filled with what is not a number, and continued by the next lines.
    """

    def __init__(self, notes: FileNotes | None = None) -> None:
        self.notes = notes or FileNotes()

    def parse(self, data: bytes, into: RowColumns) -> None:
        """Appends the rows of `data`, which ends with a newline."""
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
            into.append(row)

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
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Values of a config as text by their dotted keys, such as `model.fcnet_hiddens`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{below}": text for below, text in flat_config(value).items()})
        else:
            flat[str(key)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def rows_in_effect(iterations: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which rows are part of the run's history, as a mask of shape `[R]`.

    A run that resumes from a checkpoint continues from an earlier iteration in the same file. Its
    rows replace all rows from that iteration on, whether it writes an iteration again or the
    checkpoint did not contain it.

    Args:
        iterations: `training_iteration` of each row in file order, shape `[R]`. NaN rows stay.
    """
    if not len(iterations):
        return np.zeros(0, dtype=bool)
    after = np.concatenate([np.where(np.isnan(iterations), np.inf, iterations)[1:], [np.inf]])
    least_after = np.minimum.accumulate(after[::-1])[::-1]
    return np.asarray(np.isnan(iterations) | (iterations < least_after))
