"""Helpers for tests of the tabs and of the report. Without plotly, these tests are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dashboard_results import write_trial

pytest.importorskip("plotly", reason="the extra polopt[dashboard] is not installed")

from polopt.dashboards.data.selection import Selection, make_runs
from polopt.dashboards.data.trials import ResultsDirectory
from polopt.dashboards.views import optimizer_tab
from polopt.dashboards.views.drawing import Panel


def select(results: Path, **options: Any) -> Selection:
    directory = ResultsDirectory(results)
    directory.refresh()
    return Selection(make_runs(directory.trials), **options)


def write_sweep(results: Path, trials: int) -> None:
    """Writes a trial for each learning rate. The returns rise with the learning rate."""
    for number in range(trials):
        params = {"lr": round(0.001 * (number + 1), 3), "num_sgd_iter": 4 + number % 2}
        write_trial(results, "sync_samples", 0, 3, level=100.0 + 20 * number, params=params)


def of_optimizer(selection: Selection) -> dict[str, Panel]:
    """Returns the panels in the tab of the first run's optimizer, by key."""
    tab = selection.runs[0].trial.optimizer_tab
    return by_key(optimizer_tab.panels(selection.of([tab.name]), tab))


def by_key(panels: list[Panel]) -> dict[str, Panel]:
    assert len({panel.key for panel in panels}) == len(panels)
    return {panel.key: panel for panel in panels}


def curves(panel: Panel) -> dict[str, Any]:
    assert panel.figure is not None, panel.missing
    return {trace.name: trace for trace in panel.figure.data}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
