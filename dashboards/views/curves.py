"""Curves and final scores of groups of runs: what the comparison draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polopt.dashboards.data.results import RETURN, SECONDS, STEPS
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.statistics import (
    LEAST_RUNS_FOR_BAND,
    bootstrap_band,
    first_reach,
    resampled,
)

_GRID = 200  # points of a band
_RESAMPLES = 400  # of bands; the 95 percent interval of final scores takes more

Array = np.ndarray[Any, Any]
AXES = {"steps": STEPS, "seconds": SECONDS}


@dataclass(frozen=True)
class Scored:
    """Returns of one run on one axis.

    Attributes:
        run: the run.
        x: steps or seconds, shape `[R]`.
        y: returns, shape `[R]`; normalised per task where several tasks are selected.
        holds: whether the run has finished, so that its last return holds from then on.
    """

    run: Run
    x: Array
    y: Array
    holds: bool


@dataclass(frozen=True)
class Band:
    """Interquartile mean of a group with its 95 percent interval, each of shape `[points]`."""

    x: Array
    mean: Array
    low: Array
    high: Array


def scored_runs(selection: Selection, axis: str) -> list[Scored]:
    """Runs that have returns, in the order of the selection.

    With several tasks returns are normalised: 0 is the lowest and 1 the highest return of any
    selected run of that task.
    """
    found = []
    for run in selection.runs:
        x, y = run.trial.values(AXES[axis]), run.trial.values(RETURN)
        if x is None or y is None or not (np.isfinite(x) & np.isfinite(y)).any():
            continue
        found.append(Scored(run, x, y, run.trial.state == "finished"))
    tasks: dict[str, list[Scored]] = {}
    for scored in found:
        tasks.setdefault(scored.run.task, []).append(scored)
    if len(tasks) < 2:
        return found
    ranges = {task: _range([scored.y for scored in runs]) for task, runs in tasks.items()}
    return [
        Scored(scored.run, scored.x, (scored.y - low) / (high - low), scored.holds)
        for scored in found
        for low, high in [ranges[scored.run.task]]
    ]


def _range(returns: Sequence[Array]) -> tuple[float, float]:
    finite = np.concatenate([values[np.isfinite(values)] for values in returns])
    low, high = float(finite.min()), float(finite.max())
    return low, high if high > low else low + 1.0


def grouped(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Runs by the label of their group."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.run.group, []).append(one)
    return groups


def by_task(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Runs of one group by task, in the order of the tasks' names."""
    tasks: dict[str, list[Scored]] = {}
    for one in scored:
        tasks.setdefault(one.run.task, []).append(one)
    return [tasks[task] for task in sorted(tasks)]


def has_band(scored: Sequence[Scored]) -> bool:
    """Whether each task of a group has enough runs for a band."""
    return min(len(task) for task in by_task(scored)) >= LEAST_RUNS_FOR_BAND


def reach_of(scored: Sequence[Scored]) -> float:
    """Where the curve of a group ends: where a run that has not finished ends, or the last one."""
    ends = [(float(np.nanmax(one.x)), one.holds) for one in scored]
    open_ends = [end for end, holds in ends if not holds]
    return min(open_ends) if open_ends else max(end for end, _ in ends)


def band(scored: Sequence[Scored]) -> Band | None:
    """Interquartile mean and interval of one group; None if its runs do not overlap."""
    grid = np.linspace(0.0, reach_of(scored), _GRID)
    tasks = [
        np.stack([resampled(one.x, one.y, grid, one.holds) for one in task])
        for task in by_task(scored)
    ]
    known = np.isfinite(np.concatenate(tasks)).all(axis=0)
    if not known.any():
        return None
    mean, low, high = bootstrap_band([task[:, known] for task in tasks], _RESAMPLES)
    return Band(grid[known], mean, low, high)


def budget_of(scored: Sequence[Scored]) -> float:
    """Steps or seconds that all groups have reached."""
    return min(reach_of(members) for members in grouped(scored).values())


def scores_at(scored: Sequence[Scored], budget: float) -> dict[str, list[Array]]:
    """Returns at a budget for each group: scores of shape `[runs]` for each of its tasks.

    Groups that lack a task that others have are compared on the tasks that all have.
    """
    groups = grouped(scored)
    shared = set.intersection(*({one.run.task for one in members} for members in groups.values()))
    scores: dict[str, list[Array]] = {}
    for name, members in groups.items():
        tasks = []
        for task in by_task([one for one in members if one.run.task in shared]):
            grid = np.array([budget])
            values = np.array([resampled(one.x, one.y, grid, one.holds)[0] for one in task])
            tasks.append(values[np.isfinite(values)])
        if tasks and all(len(task) for task in tasks):
            scores[name] = tasks
    return scores


def default_target(scored: Sequence[Scored]) -> float:
    """The highest return that at least one run of each group has reached."""
    groups = grouped(scored).values()
    best = [max(float(np.nanmax(one.y)) for one in members) for members in groups]
    return min(best) if best else float("nan")


def reached(scored: Sequence[Scored], target: float) -> dict[str, list[tuple[Run, float]]]:
    """Where each run first reaches the target, by group; NaN where it does not."""
    return {
        name: [(one.run, first_reach(one.x, one.y, target)) for one in members]
        for name, members in grouped(scored).items()
    }
