"""Helpers for tests of the tabs and of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboard_results import write_trial

from polopt.dashboards.data.selection import Selection, make_runs
from polopt.dashboards.data.trials import ResultsDirectory


def select(results: Path, **options: Any) -> Selection:
    directory = ResultsDirectory(results)
    directory.refresh()
    return Selection(make_runs(directory.trials), **options)


def write_sweep(results: Path, trials: int) -> None:
    """Writes a trial for each learning rate. The returns rise with the learning rate."""
    for number in range(trials):
        params = {"lr": round(0.001 * (number + 1), 3), "num_sgd_iter": 4 + number % 2}
        write_trial(results, "sync_samples", 0, 3, level=100.0 + 20 * number, params=params)
