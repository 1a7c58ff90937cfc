"""Compares the results of a run with the declarations of its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ray.tune.result import AUTO_RESULT_KEYS

from polopt.metrics.number import Number, find

#: The keys that Tune or the trainer adds to a result for Tune, and the copy of the config.
_OF_TUNE = {*AUTO_RESULT_KEYS, "timesteps_since_restore", "trial_id", "done"}
_OF_TUNE |= {"checkpoint_dir_name", "stop_reason"}
_TYPES = {"histogram": list, "list": list, "text": str}
#: Declared numbers that a result need not have: of callbacks, of actions of another space, and of
#: several agents.
_SOMETIMES = ("/custom_metrics/", "optimizer/actions/", "<agent>", "<policy>")


def values_of(result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a result by path. The dicts in a tuple have their index as a name."""
    items = result.items() if isinstance(result, Mapping) else enumerate(result)
    for key, value in items:
        if prefix == "" and key in {*_OF_TUNE, "config"}:
            continue
        if isinstance(value, Mapping | tuple):
            yield from values_of(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def differences(numbers: Sequence[Number], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each key that is not declared, for each declared number that no result
    has, and for each value that does not fit the kind or unit of its number."""
    found, seen, before = [], set(), dict[str, Any]()
    for result in results:
        for path, value in values_of(result):
            number = find(numbers, path)
            if number is None:
                found.append(f"{path} is not declared")
                continue
            seen.add(number.key)
            if not _fits(number, value, before.get(path, 0)):
                found.append(f"{path} is {value!r} after {before.get(path)!r}: {number}")
            before[path] = value
    absent = [
        number.key
        for number in numbers
        if number.key not in seen and not any(part in number.key for part in _SOMETIMES)
    ]
    return [*found, *(f"no result has {key}" for key in absent)]


def _fits(number: Number, value: Any, before: Any) -> bool:
    if number.kind in _TYPES:
        return type(value) is _TYPES[number.kind]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if number.kind in ("counter", "total") and not value >= before:
        return False
    if number.unit == "share" and not math.isnan(value):
        return -1e-9 <= value <= 1.0 + 1e-9
    return not (number.unit in ("s", "ms", "bytes") and value < 0.0)
