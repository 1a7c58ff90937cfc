"""The tab of faults: how many of each kind, when, and the last messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.fault_marks import KINDS, last_line

_MESSAGES = "fault_tolerance/last_"
_MOST_CHARACTERS = 600


def panels(selection: Selection) -> list[Panel]:
    """What ended trials, counters of faults over time, workers up, and the last messages."""
    remote = [run for run in selection.runs if _has_workers(run)]
    healthy = (
        "healthy-workers",
        "Healthy workers",
        "Workers that answer. A line that stays low: a worker was given up.",
    )
    name = "fault_tolerance/num_healthy_workers"
    return [
        *_failed(selection),
        *(_kind(selection, kind) for kind in KINDS),
        run_lines(
            healthy, replace(selection, runs=remote), name, "workers", shape="hv", from_zero=True
        )
        if remote or not selection.runs
        else Panel(*healthy, missing="These runs sample in the driver (num_workers=0)"),
        _messages(selection),
    ]


def _has_workers(run: Run) -> bool:
    """Whether a run has remote workers. With `num_workers=0` the driver samples."""
    return run.trial.last("optimizer/workers/per_worker/0/index") > 0.0


def total_faults(run: Run) -> int:
    """Faults of all kinds in a run, skipped updates included."""
    return int(sum(_count(run, kind) or 0.0 for kind in KINDS))


def _count(run: Run, kind: str) -> float | None:
    values = run.trial.values(KINDS[kind][0])
    known = values is not None and np.isfinite(values).any()
    return float(np.nanmax(values)) if known else None  # type: ignore[arg-type]


def _end_of(text: str) -> str:
    """The end of a long text, from the beginning of a line: a traceback ends with the exception."""
    text = text.strip()
    if len(text) <= _MOST_CHARACTERS:
        return text
    kept = text[-_MOST_CHARACTERS:]
    _, newline, lines = kept.partition("\n")
    return f"... {lines if newline and lines else kept}"


def _failed(selection: Selection) -> list[Panel]:
    """The exceptions of failed trials, as one table."""
    rows = [
        [
            run.label,
            run.trial.state,
            last_line(run.trial.error),
            run.trial.name,
            _end_of(run.trial.error),
        ]
        for run in selection.runs
        if run.trial.error
    ]
    if not rows:
        return []
    help_ = "The end of each traceback; error.txt in the trial's directory holds all of it."
    columns = ("run", "state", "error", "trial", "end of the traceback")
    return [Panel("failed", "Failed trials", help_, columns=columns, rows=rows, wide=True)]


def _kind(selection: Selection, kind: str) -> Panel:
    panel = (kind.replace(" ", "-"), kind.capitalize(), "Since the start of each run.")
    counts = [_count(run, kind) for run in selection.runs]
    known = [count for count in counts if count is not None]
    if known and not any(known):
        missing = counts.count(None)
        without = f"; {missing} have no results" if missing else ""
        return Panel(*panel, missing=f"None in the {len(known)} runs with results{without}")
    return run_lines(panel, selection, KINDS[kind][0], "count", shape="hv")


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
                text = str(said[-1])
                rows.append([run.label, kind, last_line(text), _end_of(text)])
    panel = ("messages", "Last fault of each kind", "As the workers reported it.")
    if not rows:
        return Panel(*panel, missing="No messages in the selected runs", wide=True)
    return Panel(*panel, columns=("run", "fault", "message", "its end"), rows=rows, wide=True)
