"""Result rows as columns: parses the JSON lines that Tune writes to `result.json`."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: Column of a row's number; rows that a resumed run wrote again are recognised by it.
ITERATION = "training_iteration"
# Other blocks of a row repeat these (`info`, `timers`) or do not change (`config`).
_BLOCKS = ("optimizer", "env_runners", "learners", "fault_tolerance")
_MAX_LIST = 64  # entries of a list that become columns
_MAX_PROBLEMS = 5
_MAX_DEPTH = 8  # of dicts in dicts; deeper values are left out


class RowColumns:
    """Columns that grow row by row: numbers as float64, strings as lists of str.

    Nested keys are joined by `/`, entries of lists have their index as the last part. A row that
    lacks a key has NaN or an empty string there.

    Attributes:
        num_rows: rows appended so far.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._numbers: dict[str, array[float]] = {}
        self._strings: dict[str, list[str]] = {}

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends the values of one decoded row."""
        for name, value in _flatten(row):
            if isinstance(value, str):
                strings = self._strings.setdefault(name, [])
                if len(strings) <= self.num_rows:
                    strings.extend([""] * (self.num_rows - len(strings)))
                    strings.append(value)
            else:
                numbers = self._numbers.get(name)
                if numbers is None:
                    numbers = self._numbers[name] = array("d")
                if len(numbers) != self.num_rows:
                    if len(numbers) > self.num_rows:  # the key occurs twice after joining
                        continue
                    numbers.extend([math.nan] * (self.num_rows - len(numbers)))
                numbers.append(value)
        self.num_rows += 1

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of all columns, each of shape `[num_rows]`."""
        return {name: self.column(name) for name in self.names()}

    def names(self) -> set[str]:
        """Names of all columns."""
        return {*self._numbers, *self._strings}

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One column of shape `[num_rows]`; NaN throughout if no row has it."""
        strings = self._strings.get(name)
        if strings is not None:
            texts = np.full(self.num_rows, "", dtype=object)
            texts[: len(strings)] = strings
            return texts
        numbers = self._numbers.get(name, ())
        column = np.full(self.num_rows, np.nan)
        column[: len(numbers)] = numbers
        return column


def _flatten(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, int | float):
            yield key, _number(value)
        elif isinstance(value, dict) and key in _BLOCKS:
            yield from _flatten_block(value, f"{key}/", 1)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _flatten_block(block: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        if isinstance(value, float):
            yield prefix + key, value
        elif isinstance(value, int):
            yield prefix + key, _number(value)
        elif isinstance(value, str):
            yield prefix + key, value
        elif isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _flatten_block(value, f"{prefix}{key}/", depth + 1)
        elif isinstance(value, list) and depth < _MAX_DEPTH:
            entries = {str(index): entry for index, entry in enumerate(value[:_MAX_LIST])}
            yield from _flatten_block(entries, f"{prefix}{key}/", depth + 1)


class LineParser:
    """Decodes lines of a result file and remembers what could not be decoded.

    Attributes:
        num_lines: lines seen, those that were skipped included.
        problems: one sentence for each skipped line; the first few.
        config: the config that the rows carry, from the first row that has one.
    """

    def __init__(self, num_lines: int = 0, problems: list[str] | None = None) -> None:
        self.num_lines = num_lines
        self.problems = problems or []
        self.config: dict[str, Any] | None = None

    def parse(self, data: bytes, into: RowColumns) -> None:
        """Appends the rows of `data`, which ends with a newline."""
        for line in data.split(b"\n")[:-1]:
            self.num_lines += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                self._skip("not a JSON object")
                continue
            if self.config is None and isinstance(row.get("config"), dict):
                self.config = row["config"]
            into.append(row)

    def _skip(self, why: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(f"line {self.num_lines} skipped: {why}")


def rows_in_effect(iterations: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which rows are part of the run's history, as a mask of shape `[R]`.

    A run that resumes from a checkpoint continues from an earlier iteration in the same file. Its
    rows replace all rows from that iteration on: those that it writes again, and those that the
    checkpoint did not contain.

    Args:
        iterations: `training_iteration` of each row in file order, shape `[R]`; NaN rows stay.
    """
    after = np.concatenate([np.where(np.isnan(iterations), np.inf, iterations)[1:], [np.inf]])
    least_after = np.minimum.accumulate(after[::-1])[::-1] if len(after) else after
    return np.asarray(np.isnan(iterations) | (iterations < least_after))
