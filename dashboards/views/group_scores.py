"""Computes the curves, final scores and times to a return that the tab Compare draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polopt.dashboards.data.downsample import Array, Curve
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.statistics import (
    LEAST_RUNS_FOR_BAND,
    Estimate,
    bootstrap_band,
    first_reach,
    median_reach,
    resampled,
)
from polopt.dashboards.data.trials import EVALUATED_RETURN, EVALUATED_STEPS, RETURN

_GRID = 200  # number of points of a band
_RESAMPLES = 400  # bootstrap samples of bands. Final scores use more


@dataclass(frozen=True)
class Scored:
    """The returns of one run.

    Attributes:
        run: the run.
        x: steps or seconds of each result, shape `[R]`.
        y: returns, shape `[R]`. They are normalised per task if several tasks are selected.
        raw: returns that are not normalised, shape `[R]`.
        holds: whether the run has finished. Then its last return also counts for all later steps.
        evaluated: steps or seconds of the run's evaluations, and the mean returns, each of shape
            `[E]`. The steps of an evaluation are the steps at which its weights were taken. The
            returns are normalised like `y`.
    """

    run: Run
    x: Array
    y: Array
    raw: Array
    holds: bool
    evaluated: tuple[Array, Array]

    @property
    def end(self) -> float:
        """The largest entry of `x`."""
        return float(np.nanmax(self.x))

    @property
    def ended_early(self) -> bool:
        """Whether the run ended before it finished, because it failed, was stopped or pruned."""
        return self.run.trial.state not in ("finished", "running", "paused")


@dataclass(frozen=True)
class Point:
    """The point of one run in a plot that shows one line of points for each group.

    Attributes:
        run: the run.
        value: position on the x axis.
        reached: whether the run reached the target return of its task. If False, `value` is the end
            of the run.
    """

    run: Run
    value: float
    reached: bool = True


def scored_runs(selection: Selection, axis: str) -> list[Scored]:
    """Returns the runs that have returns, in the order of the selection.

    With several tasks, returns are normalised per task. 0 is the lowest return of the selected runs
    of a task, and 1 is the highest.

    Args:
        selection: the selected runs.
        axis: `steps` or `seconds`.
    """
    found = []
    on_axis = replace(selection, x=axis)
    for run in selection.runs:
        x, y = on_axis.x_of(run), run.trial.values(RETURN)
        if x is None or y is None or not (np.isfinite(x) & np.isfinite(y)).any():
            continue
        evaluated = _evaluated(on_axis, run, x)
        found.append(Scored(run, x, y, y, run.trial.state == "finished", evaluated))
    tasks: dict[str, list[Scored]] = {}
    for scored in found:
        tasks.setdefault(scored.run.task, []).append(scored)
    if len(tasks) < 2:
        return found
    ranges = {task: _range([scored.y for scored in runs]) for task, runs in tasks.items()}
    return [
        replace(
            scored,
            y=(scored.y - low) / (high - low),
            evaluated=(scored.evaluated[0], (scored.evaluated[1] - low) / (high - low)),
        )
        for scored in found
        for low, high in [ranges[scored.run.task]]
    ]


def _evaluated(selection: Selection, run: Run, x: Array) -> tuple[Array, Array]:
    returns = run.trial.values(EVALUATED_RETURN)
    if returns is None:
        return np.empty(0), np.empty(0)
    steps = run.trial.values(EVALUATED_STEPS) if selection.x == "steps" else None
    at = x if steps is None else steps
    known = np.isfinite(returns) & np.isfinite(at)
    return at[known], returns[known]


def _range(returns: Sequence[Array]) -> tuple[float, float]:
    finite = np.concatenate([values[np.isfinite(values)] for values in returns])
    low, high = float(finite.min()), float(finite.max())
    return low, high if high > low else low + 1.0


def grouped(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Returns the runs of each group, by label of the group."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.run.group, []).append(one)
    return groups


def _by_task(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Returns the runs of each task, sorted by name of the task."""
    tasks: dict[str, list[Scored]] = {}
    for one in scored:
        tasks.setdefault(one.run.task, []).append(one)
    return [tasks[task] for task in sorted(tasks)]


def _reach_of(scored: Sequence[Scored]) -> float:
    """Returns the end of the curve of a group.

    This is the earliest end of a run that has not finished. If all runs have finished, it is the
    latest end.
    """
    ends = [(one.end, one.holds) for one in scored]
    open_ends = [end for end, holds in ends if not holds]
    return min(open_ends) if open_ends else max(end for end, _ in ends)


def band(scored: Sequence[Scored]) -> Curve | None:
    """Returns the interquartile mean and the interval of one group over time.

    Returns None if a task has too few runs for an interval, or if the runs do not overlap.
    """
    tasks_ = _by_task(scored)
    if min(map(len, tasks_), default=0) < LEAST_RUNS_FOR_BAND:
        return None
    grid = np.linspace(0.0, _reach_of(scored), _GRID)
    tasks = [
        np.stack([resampled(one.x, one.y, grid, one.holds) for one in task]) for task in tasks_
    ]
    known = np.isfinite(np.concatenate(tasks)).all(axis=0)
    if not known.any():
        return None
    return Curve(grid[known], *bootstrap_band([task[:, known] for task in tasks], _RESAMPLES))


def default_budget(scored: Sequence[Scored]) -> float:
    """Returns the largest number of steps that half of the runs of every group have reached.

    Finished runs count as having reached any number of steps, because they keep their last return.
    """
    reached = []
    for members in grouped(scored).values():
        ends = sorted((one.end for one in members if not one.holds), reverse=True)
        needed = -(-len(members) // 2) - sum(one.holds for one in members)
        longest = max(one.end for one in members)
        reached.append(ends[needed - 1] if needed > 0 else longest)
    return min(reached)


def ended_before(scored: Sequence[Scored], budget: float) -> list[Scored]:
    """Returns the runs that have not finished and have fewer steps than `budget`."""
    return [one for one in scored if not one.holds and one.end < budget]


def scores_at(scored: Sequence[Scored], budget: float) -> dict[str, list[Array]]:
    """Returns the scores of each group after `budget` steps, of shape `[runs]` for each task.

    Only tasks that occur in all groups are compared. The result omits a group that has no score
    after `budget` steps in one of these tasks.
    """
    groups = grouped(scored)
    shared = set.intersection(*({one.run.task for one in members} for members in groups.values()))
    scores: dict[str, list[Array]] = {}
    for name, members in groups.items():
        tasks = []
        for task in _by_task([one for one in members if one.run.task in shared]):
            grid = np.array([budget])
            values = np.array([resampled(one.x, one.y, grid, one.holds)[0] for one in task])
            tasks.append(values[np.isfinite(values)])
        if tasks and all(len(task) for task in tasks):
            scores[name] = tasks
    return scores


def default_targets(scored: Sequence[Scored]) -> dict[str, float]:
    """Returns, for each task, the highest return that half of the runs of every group reach."""
    targets: dict[str, float] = {}
    for members in grouped(scored).values():
        for task in _by_task(members):
            best = sorted((float(np.nanmax(one.raw)) for one in task), reverse=True)
            name = task[0].run.task
            half = best[-(-len(best) // 2) - 1]
            targets[name] = min(targets.get(name, half), half)
    return targets


def reached(scored: Sequence[Scored], targets: Mapping[str, float]) -> dict[str, list[Point]]:
    """Returns the point at which each run first reaches the target of its task.

    For a run that does not reach the target, the point is the end of the run. The keys are the
    labels of the groups. With several tasks, a key also contains the task.
    """
    several = len({one.run.task for one in scored}) > 1
    groups: dict[str, list[Point]] = {}
    for one in scored:
        name = f"{one.run.group}, {one.run.task}" if several else one.run.group
        at = first_reach(one.x, one.raw, targets[one.run.task])
        found = bool(np.isfinite(at))
        groups.setdefault(name, []).append(Point(one.run, at if found else one.end, found))
    return groups


def median_of(points: Sequence[Point]) -> Estimate:
    """Returns the median of a group. Runs that have not reached the target count as infinite."""
    return median_reach(np.array([one.value if one.reached else np.nan for one in points]))
