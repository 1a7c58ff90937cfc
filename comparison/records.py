"""The files of a comparison: its plans, and a record of each seed.

- `plan.json` holds the plans. The first is written before the first seed. A plan that is added
  later says how many seeds were known then.
- `seeds.jsonl` has a line for each seed that has ended. A line is written at once, so a killed
  comparison loses only the seeds that were running.
- `decisions.json` holds the report, and is made from the two other files.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polopt.common.config import ConfigError
from polopt.common.files import read_regular
from polopt.comparison.comparison_plan import hash_of
from polopt.comparison.decisions import DecisionRules, Decisions, decide, filled

PLAN_FILE, SEEDS_FILE, DECISIONS_FILE = "plan.json", "seeds.jsonl", "decisions.json"
_LOCK_FILE = "lock"
_FORMAT = 1
_MOST_BYTES = 1 << 28
_MOST_POINTS = 200  # of the curve in a record


Curve = list[tuple[float, float, float]]


@dataclass(frozen=True)
class SeedRecord:
    """A seed that has ended.

    Attributes:
        variant: name of the variant.
        number: number of the seed in its variant, from 0.
        seed: the seed of its run.
        score: the metric at the budget, or its last finite value before. None if the seed crashed
            or diverged.
        error: why the seed has no score, or an empty string.
        steps: environment steps of the run.
        seconds: seconds of training.
        total_s: seconds of the run, with start-up and evaluation.
        curve: points `(steps, seconds, metric)`. The metric is None where it was not finite.
        trial: name of the directory of the trial, or path of the run.
        added: whether the seed was added by hand after the plan had ended.
    """

    variant: str
    number: int
    seed: int
    score: float | None
    error: str = ""
    steps: float = 0.0
    seconds: float = 0.0
    total_s: float = 0.0
    curve: Sequence[tuple[float, float, float | None]] = field(default_factory=list)
    trial: str = ""
    added: bool = False


def record_of(
    curve: Curve,
    axis: int,
    budget: float,
    error: str = "",
    **fields: Any,
) -> SeedRecord:
    """Returns the record of a run.

    Args:
        curve: steps, seconds and metric of each result.
        axis: 0 for a budget of steps, 1 for a budget of seconds.
        budget: the budget. The score is the value there, interpolated between two results.
        error: why the run crashed, or an empty string.
        fields: further fields of the record.
    """
    used = _until(curve, axis, budget)
    known = [point[2] for point in used if math.isfinite(point[2])]
    if not error and not known:
        error = "no result has a finite value of the metric"
    thin = used
    if len(used) > _MOST_POINTS:
        places = np.unique(np.linspace(0, len(used) - 1, _MOST_POINTS).round().astype(int))
        thin = [used[place] for place in places]
    return SeedRecord(
        score=None if error else known[-1],
        error=error,
        steps=curve[-1][0] if curve else 0.0,
        seconds=curve[-1][1] if curve else 0.0,
        curve=[(a, b, c if math.isfinite(c) else None) for a, b, c in thin],
        **fields,
    )


def _until(curve: Curve, axis: int, budget: float) -> Curve:
    """Returns the part of a curve until a budget. Its last point is interpolated, because results
    do not lie at the budget."""
    inside = [point for point in curve if point[axis] <= budget]
    if not inside or len(inside) == len(curve) or inside[-1][axis] == budget:
        return inside or curve[:1]
    last, after = inside[-1], curve[len(inside)]
    share = (budget - last[axis]) / (after[axis] - last[axis])
    steps, seconds, score = (a + share * (b - a) for a, b in zip(last, after, strict=True))
    # Before the first finite value, there is nothing to interpolate.
    return [*inside, (steps, seconds, score if math.isfinite(score) else _finite(last, after))]


def _finite(*points: tuple[float, float, float]) -> float:
    return next((point[2] for point in points if math.isfinite(point[2])), math.nan)


class ComparisonFiles:
    """Reads and writes the files of a comparison.

    Args:
        folder: directory of the comparison.

    Attributes:
        folder: directory of the comparison.
        plans: the plans in the order in which they were written. Each has the keys `plan`, `hash`,
            `written`, `seeds_known` and `after_results`.
        records: the seeds that have ended.

    Raises:
        ConfigError: a file cannot be read, or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: list[dict[str, Any]] = []
        self.records: list[SeedRecord] = []
        try:
            if (folder / PLAN_FILE).exists():
                self.plans = _json(folder / PLAN_FILE)["plans"]
            if (folder / SEEDS_FILE).exists():
                text = read_regular(folder / SEEDS_FILE, _MOST_BYTES).decode()
                # A line without an end was being written when the process was killed.
                lines = text[: text.rfind("\n") + 1].splitlines()
                self.records = [_record(json.loads(line)) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder}: the comparison cannot be read: {error}") from None

    def of(self, variant: str) -> list[SeedRecord]:
        """Returns the records of a variant in the order of its seeds, until the first missing
        seed."""
        found = {one.number: one for one in self.records if one.variant == variant}
        numbers = range(len(found))
        return [found[n] for n in numbers if all(m in found for m in range(n + 1))]

    def add_plan(self, plan: Mapping[str, Any], after_results: bool = False) -> None:
        """Writes a plan, unless it is equal to the last plan."""
        digest = hash_of(plan)
        if self.plans and self.plans[-1]["hash"] == digest:
            return
        written = time.strftime("%Y-%m-%d %H:%M:%S")
        entry = {"hash": digest, "written": written, "seeds_known": len(self.records)}
        self.plans.append({**entry, "after_results": after_results, "plan": plan})
        self._replace(PLAN_FILE, {"polopt_comparison": _FORMAT, "plans": self.plans})

    def add(self, record: SeedRecord) -> None:
        """Writes the record of a seed."""
        path = self.folder / SEEDS_FILE
        before = path.read_bytes() if path.exists() else b""
        whole = before.rfind(b"\n") + 1
        with path.open("r+b" if before else "wb") as file:
            file.truncate(whole)  # removes a line that a killed process has not ended
            file.seek(whole)
            file.write(json.dumps(asdict(record), allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def write_decisions(self, report: Mapping[str, Any]) -> None:
        """Writes the report."""
        self._replace(DECISIONS_FILE, report)

    def _replace(self, name: str, value: Any) -> None:
        partial = self.folder / f"{name}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block, no other process can run this comparison.

        Raises:
            ConfigError: another process runs it.
        """
        with (self.folder / _LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"another process runs the comparison in {self.folder}") from None
            yield


def rules_of(plan: Mapping[str, Any]) -> DecisionRules:
    """Returns the rules of a plan in a file."""
    looks = tuple(map(int, plan["looks"]))
    return DecisionRules(looks, plan["level"], plan["equal_within"], plan["draw_seed"])


def decisions_of(files: ComparisonFiles, plan: Mapping[str, Any] | None = None) -> Decisions:
    """Returns the decisions about the seeds that have ended.

    Args:
        files: the files of the comparison.
        plan: a plan in these files. `None` means the last plan.
    """
    plan = files.plans[-1]["plan"] if plan is None else plan
    rules = rules_of(plan)
    sign = -1.0 if plan["mode"] == "min" else 1.0
    scores = {
        name: [None if one.score is None else sign * one.score for one in files.of(name)]
        for name in plan["variants"]
    }
    failed = None if plan["failed"] == "worst" else sign * plan["failed"]
    found = decide(filled(scores, rules.looks, failed), rules)
    turned = (replace(p, differences=tuple(sign * d for d in p.differences)) for p in found.pairs)
    return replace(found, pairs=tuple(turned))


def _record(values: dict[str, Any]) -> SeedRecord:
    return SeedRecord(**{**values, "curve": [(a, b, c) for a, b, c in values["curve"]]})


def _json(path: Path) -> Any:
    return json.loads(read_regular(path, _MOST_BYTES))
