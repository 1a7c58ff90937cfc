"""The tab of faults: how many of each kind, when, and the last messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.faults import KINDS

_MESSAGES = "fault_tolerance/last_"
_MOST_CHARACTERS = 300


def panels(selection: Selection) -> list[Panel]:
    """Counters of faults over time, workers up, and what the last faults were."""
    return [
        *(_kind(selection, kind) for kind in KINDS),
        run_lines(
            (
                "healthy-workers",
                "Healthy workers",
                "Workers that answer. A line that stays low: a worker was given up.",
            ),
            selection,
            ["fault_tolerance/num_healthy_workers"],
            "workers",
            shape="hv",
            from_zero=True,
        ),
        _messages(selection),
    ]


def total_faults(run: Run) -> int:
    """Faults of all kinds in a run, skipped updates included."""
    return int(sum(count for _, count in _counts(run)))


def _counts(run: Run) -> list[tuple[str, float]]:
    counts = []
    for kind, (names, *_) in KINDS.items():
        values = next((v for v in map(run.trial.values, names) if v is not None), None)
        if values is not None and np.isfinite(values).any():
            counts.append((kind, float(np.nanmax(values))))
    return counts


def _kind(selection: Selection, kind: str) -> Panel:
    names = KINDS[kind][0]
    panel = (kind.replace(" ", "-"), kind.capitalize(), "Since the start of each run.")
    counts = [count for run in selection.runs for k, count in _counts(run) if k == kind]
    if counts and not any(counts):
        return Panel(*panel, missing="None in the selected runs")
    return run_lines(panel, selection, names, "count", shape="hv")


def _messages(selection: Selection) -> Panel:
    rows: list[list[Any]] = []
    for run in selection.runs:
        for name in sorted(n for n in run.trial.rows.names() if n.startswith(_MESSAGES)):
            texts = run.trial.rows.column(name)
            if texts is None or texts.dtype != object:
                continue
            said = [text for text in texts if text]
            if said:
                kind = name.removeprefix(_MESSAGES).replace("_", " ")
                rows.append([run.label, kind, str(said[-1])[:_MOST_CHARACTERS]])
    panel = ("messages", "Last fault of each kind", "As the workers reported it.")
    if not rows:
        return Panel(*panel, missing="No faults in the selected runs", wide=True)
    return Panel(*panel, columns=("run", "fault", "message"), rows=rows, wide=True)
