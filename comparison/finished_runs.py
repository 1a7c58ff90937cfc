"""Reads finished runs, so that they can be compared without running anything."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.common.files import read_regular
from polopt.comparison.comparison_plan import (
    SECONDS,
    STEPS,
    ComparisonConfig,
    ComparisonPlan,
    plan_of_runs,
)
from polopt.comparison.records import Curve, SeedRecord, record_of
from polopt.dashboards.data.selection import make_runs
from polopt.dashboards.data.trials import ResultsDirectory

_MOST_BYTES = 1 << 28
_COLUMNS = ("variant", "seed", "steps", "seconds", "score")


def read_finished(
    sources: Sequence[str], settings: ComparisonConfig
) -> tuple[ComparisonPlan, list[SeedRecord]]:
    """Reads finished runs, and returns the plan of their comparison and their records.

    Args:
        sources: `PATH` or `NAME=PATH`. A path is a directory of results of Tune, or a file whose
            rows have the columns `variant` and `score`, and may have `seed`, `steps` and `seconds`
            (`.csv`, or `.jsonl` with one row in each line). Several rows of a seed are its curve.
            All runs in `NAME=PATH` belong to the variant `NAME`. Otherwise, the runs in a directory
            are variants if their options differ, except for the seed.
        settings: how the runs are compared.

    Raises:
        ConfigError: a source cannot be read or has no runs, or a setting is wrong.
    """
    found: dict[str, dict[str, tuple[Curve, str]]] = {}
    for source in sources:
        name, equals, path = source.partition("=")
        if not equals or Path(source).exists():
            name, path = "", source
        place = Path(path).expanduser()
        if not place.exists():
            raise ConfigError(f"--runs {source}: {path!r} does not exist")
        read = _from_file(place) if place.is_file() else _from_directory(place, settings.metric)
        num_before = sum(map(len, found.values()))
        for variant, seed, curve, trial in read:
            runs = found.setdefault(name or variant, {})
            key = seed if seed not in runs else f"{seed}, {trial}"
            runs[key] = curve, trial
        if sum(map(len, found.values())) == num_before:
            raise ConfigError(f"--runs {source}: no runs with results")
    names = list(found)
    num_seeds = min(map(len, found.values()))
    if len({len(runs) for runs in found.values()}) > 1:
        counts = ", ".join(f"{name}: {len(runs)}" for name, runs in found.items())
        raise ConfigError(
            f"the variants have different numbers of runs ({counts}). Allowed: the same number, "
            "because choosing some of them would be a choice after the results"
        )
    curves = [curve for runs in found.values() for curve, _ in runs.values()]
    least = min((curve[-1][0] for curve in curves), default=0.0)
    plan = plan_of_runs(names, num_seeds, least or 1.0, settings)
    axis = int(plan.budget_key == SECONDS)
    records = []
    for name, runs in found.items():
        for number, (seed, (curve, trial)) in enumerate(sorted(runs.items(), key=_order)):
            whole = any(point[axis] > 0.0 for point in curve)
            error = "" if not whole or curve[-1][axis] >= plan.budget else "ended before the budget"
            fields: dict[str, Any] = {"variant": name, "number": number, "trial": trial}
            fields |= {"seed": int(seed) if seed.isdecimal() else number}
            fields["total_s"] = curve[-1][1]
            records.append(record_of(curve, axis, plan.budget, error, **fields))
    return plan, records


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    seed = item[0].partition(",")[0]
    return int(seed) if seed.isdecimal() else 0, item[0]


def _from_directory(folder: Path, metric: str) -> Iterator[tuple[str, str, Curve, str]]:
    """Yields variant, seed, curve and directory of each run in a directory of results."""
    directory = ResultsDirectory(folder)
    directory.refresh()
    for run in make_runs(directory.trials):
        columns = [run.trial.values(key) for key in (STEPS, SECONDS, metric)]
        known = [column for column in columns if column is not None]
        if len(known) < len(columns):
            missing = [
                key
                for key, column in zip((STEPS, SECONDS, metric), columns, strict=True)
                if column is None
            ]
            raise ConfigError(f"{run.trial.folder}: the results have no key {missing[0]!r}")
        if len(known[0]):
            curve = [(float(a), float(b), float(c)) for a, b, c in zip(*known, strict=True)]
            yield run.group, run.seed, curve, str(run.trial.folder)


def _from_file(path: Path) -> Iterator[tuple[str, str, Curve, str]]:
    """Yields variant, seed, curve and file of each seed in a file of rows."""
    try:
        text = read_regular(path, _MOST_BYTES).decode()
        if path.suffix == ".jsonl":
            rows: list[Mapping[str, Any]] = [json.loads(line) for line in text.splitlines()]
        else:
            rows = list(csv.DictReader(text.splitlines()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    curves: dict[tuple[str, str], Curve] = {}
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        if not isinstance(row, Mapping) or not {"variant", "score"} <= row.keys():
            raise ConfigError(
                f"{where}: the columns 'variant' and 'score' are needed. Allowed: "
                f"{', '.join(_COLUMNS)}"
            )
        seed = row.get("seed")
        key = str(row["variant"]), str(number if seed in (None, "") else seed)
        steps, seconds = (_number(row.get(column), where) for column in ("steps", "seconds"))
        score = _number(row["score"], where, math.nan)
        curves.setdefault(key, []).append((steps, seconds, score))
    for (variant, seed), curve in curves.items():
        yield variant, seed, sorted(curve, key=lambda point: point[:2]), str(path)


def _number(value: Any, where: str, missing: float = 0.0) -> float:
    if value in (None, ""):
        return missing
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: got {value!r}. Allowed: a number") from None
