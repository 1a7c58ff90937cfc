"""Turns measurements into table rows: medians, ratios, and whether goals are reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from suite_cases import Case

#: The result of one process in each turn.
Turns = Mapping[int, Mapping[str, Any]]


class Spread(NamedTuple):
    """Median and range of several turns."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Computes the median, minimum and maximum."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """Formats the spread for a table."""
        median, low, high = (
            "never" if math.isinf(value) else f"{value:,.{digits}f}" for value in self
        )
        return f"{median} ({low} to {high})"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        case: name of the case.
        what: description.
        peer: peer and its case. Empty if polopt's rate is compared with a number.
        ours: steps per second, or seconds, of polopt.
        theirs: the figure of the peer in the same unit.
        ratio: polopt's advantage, above 1 if polopt is faster.
        goal: minimum of the ratio, or of polopt's own rate.
        reached: whether the goal was reached. None for a row without a goal or a measurement.
        note: reason for a missing measurement.
    """

    case: str
    what: str
    peer: str
    ours: Spread | None = None
    theirs: Spread | None = None
    ratio: Spread | None = None
    goal: float | None = None
    reached: bool | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)


def rate_row(case: Case, peer: str, goal: float | None, ours: Turns, theirs: Turns) -> Row:
    """Compares rates turn by turn, so that changes of the machine's speed affect both sides."""
    turns = sorted(ours.keys() & theirs.keys())
    if not turns:
        return Row(case.name, case.what, peer, goal=goal, note="no turn measured both")
    mine = [float(ours[turn]["rate"]) for turn in turns]
    other = [float(theirs[turn]["rate"]) for turn in turns]
    ratio = Spread.of([a / b for a, b in zip(mine, other, strict=True)])
    reached = None if goal is None else ratio.median >= goal
    spreads = (Spread.of(mine), Spread.of(other), ratio)
    return Row(case.name, case.what, peer, *spreads, goal=goal, reached=reached)


def floor_row(case: Case, ours: Turns) -> Row:
    """Compares polopt's own rate with a number."""
    if not ours:
        return Row(case.name, case.what, "", goal=case.floor, note="no turn")
    rate = Spread.of([float(turn["rate"]) for turn in ours.values()])
    assert case.floor is not None
    reached = rate.median >= case.floor
    return Row(case.name, case.what, "", rate, goal=case.floor, reached=reached)


def learn_rows(case: Case, peer: str, goal: float | None, ours: Turns, theirs: Turns) -> list[Row]:
    """Compares the seconds until the task is solved, without and with start-up. If there is a goal,
    the goal for the row with start-up is 1.

    Each turn has its own seed. The seeds of two systems are unrelated, so the rows compare medians.
    """
    if not ours or not theirs:
        return [Row(case.name, case.what, peer, goal=goal, note="no turn measured both")]
    rows = []
    with_startup = None if goal is None else 1.0
    for words, startup, needed in (("", False, goal), (", start-up included", True, with_startup)):
        mine, other = seconds(ours, startup), seconds(theirs, startup)
        # A system that does not reach the goal counts as infinitely slow.
        ratio = 0.0 if math.isinf(mine.median) else other.median / mine.median
        reached = None if needed is None else ratio >= needed
        spread = Spread(ratio, ratio, ratio)
        rows.append(Row(case.name, case.what + words, peer, mine, other, spread, needed, reached))
    return rows


def seconds(turns: Turns, startup: bool) -> Spread:
    """Returns the seconds until the task is solved, or infinity if it was not solved."""
    return Spread.of(
        [
            turn["seconds_to_goal"] + (turn["startup_s"] if startup else 0.0)
            if turn["reached"]
            else math.inf
            for turn in turns.values()
        ]
    )


def markdown(rows: Sequence[Row]) -> str:
    """Formats a table."""
    lines = [
        "| what | polopt | peer | its figure | times better | goal | reached |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        digits = 1 if row.case.startswith("learn") else 0
        if row.ours is None or (row.peer and row.theirs is None):
            reached = f"not measured: {row.note}".replace("|", "/")
        else:
            reached = {None: "", True: "yes", False: "no"}[row.reached]
            reached += f" ({row.note})".replace("|", "/") if row.note else ""
        goal = "" if row.goal is None else f"{row.goal:,g}"
        cells = [
            row.what,
            row.ours.text(digits) if row.ours else "",
            row.peer,
            row.theirs.text(digits) if row.theirs else "",
            row.ratio.text(1) if row.ratio else "",
            goal,
            reached,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
