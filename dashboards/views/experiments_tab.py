"""The tab Experiments: tables of the best trials and of all trials, and their returns."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from polopt.dashboards.data.rows import NOT_SET
from polopt.dashboards.data.selection import (
    SEED_KEY,
    TASK_KEY,
    Run,
    Selection,
    differing_keys,
    last_return,
)
from polopt.dashboards.data.trials import EVENTS, RETURN, STARTUP_S, STEPS
from polopt.dashboards.views.charts import run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.faults_tab import total_faults

_COLUMNS = (
    "state", "group", "task", "seed", "optimizer", "best return", "steps", "seconds", "start-up, s",
    "steps/s", "faults", "recorded", "experiment", "trial",
)  # fmt: skip


#: The table of the best trials shows at most this many trials per task, and this many config keys.
#: It also shows all trials of pinned groups.
_BEST, _MOST_KEYS = 10, 12


def panels(selection: Selection) -> list[Panel]:
    """Returns the panels of the tab."""
    rows = [_row(selection, run) for run in selection.runs]
    problems = [
        [run.trial.experiment, run.trial.name, problem]
        for run in selection.runs
        for problem in run.trial.problems
    ]
    help_ = (
        "All selected trials, including trials without results. For seconds and steps/s: "
        f"{selection.since}"
    )
    listed = [
        *_best(selection),
        Panel("trials", _counted(selection), help_, columns=_COLUMNS, rows=rows, wide=True),
    ]
    if problems:
        listed.append(
            Panel(
                "unreadable",
                "Files and lines that were skipped",
                "The dashboards show all other results of these trials.",
                columns=("experiment", "trial", "problem"),
                rows=problems,
                wide=True,
            )
        )
    listed.append(
        run_lines(
            ("returns", "Return of each trial", "The mean return of the last 100 episodes."),
            selection,
            RETURN,
            "mean episode return",
        )
    )
    listed.append(
        run_lines(
            (
                "steps",
                "Progress of each trial",
                "The environment steps so far. A line that no longer grows belongs to a run that "
                "has ended or hangs.",
            ),
            replace(selection, x="seconds"),
            STEPS,
            "environment steps",
        )
    )
    return listed


def _best(selection: Selection) -> list[Panel]:
    """Returns the table of the trials with the highest returns. Returns no table if the configs
    differ only in the seed and the task, or if no trial has a return."""
    trials = [run.trial for run in selection.runs]
    keys = [key for key in differing_keys(trials) if key not in (SEED_KEY, TASK_KEY)]
    if not keys:
        return []
    shown, rows = keys[:_MOST_KEYS], []
    for task in selection.tasks:
        of_task = [run for run in selection.runs if run.task == task]
        with_returns = [run for run in of_task if math.isfinite(last_return(run))]
        ranked = sorted(with_returns, key=lambda run: -last_return(run))
        for rank, run in enumerate(ranked, start=1):
            if rank > _BEST and run.group not in selection.pinned:
                continue
            values = [run.trial.settings.get(key, NOT_SET) for key in shown]
            won = [rank, run.group, round(last_return(run), 2)]  # visible in a narrow window, too
            steps, state = _whole(run.trial.last(STEPS)), run.trial.state
            rows.append([*won, task, steps, state, run.seed, *values, run.trial.name])
    if not rows:
        return []
    more = f" {len(keys) - len(shown)} more keys differ." if len(keys) > len(shown) else ""
    help_ = (
        "Trials are ranked by their last mean return, even if they ended after different numbers "
        "of steps. The columns after the seed are the config keys that differ between the selected "
        f"trials.{more}"
    )
    columns = ("rank", "group", "return", "task", "steps", "state", "seed", *shown, "trial")
    of_each = " of each task" if len(selection.tasks) > 1 else ""
    title = f"Highest returns{of_each}: at most {_BEST} of {len(trials)} trials"
    if selection.pinned:
        title += ", and all trials of pinned groups"
    return [Panel("best", title, help_, columns=columns, rows=rows, wide=True)]


def _counted(selection: Selection) -> str:
    """Returns a title with the number of trials in each state."""
    counts = Counter(run.trial.state for run in selection.runs)
    return f"Trials: {', '.join(f'{count} {state}' for state, count in counts.most_common())}"


def _row(selection: Selection, run: Run) -> list[Any]:
    trial = run.trial
    returns = trial.values(RETURN)
    finite = np.empty(0) if returns is None else returns[np.isfinite(returns)]
    seconds = selection.seconds_of(run)
    return [
        trial.state, run.group, run.task, run.seed, trial.optimizer,
        round(float(finite.max()), 2) if len(finite) else None,
        _whole(trial.last(STEPS)), _whole(float(seconds[-1])) if seconds is not None else None,
        _tenths(trial.last(STARTUP_S)), _whole(selection.rate_of(run)),
        total_faults(run), "yes" if trial.last(EVENTS) > 0 else "no", trial.experiment, trial.name,
    ]  # fmt: skip


def _tenths(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None
