"""The tab Faults: exceptions of failed trials, counters of faults over time, and messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.fault_marks import KINDS, increases, last_line

_MESSAGES = "fault_tolerance/last_"
_MOST_CHARACTERS = 600


def panels(selection: Selection) -> list[Panel]:
    """Returns the panels of the tab."""
    remote = [run for run in selection.runs if _has_workers(run)]
    healthy = (
        "healthy-workers",
        "Healthy workers",
        "The number of workers that are up. If the line stays low, a failed worker was not "
        "replaced.",
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
    """Returns whether a run has remote workers. With `num_workers=0`, the driver samples."""
    return run.trial.last("optimizer/workers/per_worker/0/index") > 0.0


def total_faults(run: Run) -> int:
    """Returns the sum of the increases of all counters in `KINDS`."""
    return int(sum(_count(run, kind) or 0.0 for kind in KINDS))


def _count(run: Run, kind: str) -> float | None:
    found = increases(run, KINDS[kind][0])
    return float(found[1].sum()) if found is not None else None


def _end_of(text: str) -> str:
    """Returns the end of a long text, from the beginning of a line if possible.

    The end is shown, because a traceback ends with the exception.
    """
    text = text.strip()
    if len(text) <= _MOST_CHARACTERS:
        return text
    kept = text[-_MOST_CHARACTERS:]
    _, newline, lines = kept.partition("\n")
    return f"... {lines if newline and lines else kept}"


def _failed(selection: Selection) -> list[Panel]:
    """Returns a table of the trials that have an error file, if there are such trials."""
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
    help_ = "The end of each traceback. error.txt in the trial's directory has the whole traceback."
    columns = ("run", "state", "error", "trial", "end of the traceback")
    return [Panel("failed", "Failed trials", help_, columns=columns, rows=rows, wide=True)]


def _kind(selection: Selection, kind: str) -> Panel:
    panel = (
        kind.replace(" ", "-"),
        kind.capitalize(),
        "The number since the start of each run. After a restore, it may start again at 0.",
    )
    counts = [_count(run, kind) for run in selection.runs]
    known = [count for count in counts if count is not None]
    if known and not any(known):
        missing = counts.count(None)
        without = f", without results: {missing}" if missing else ""
        why = f"No faults of this kind. Runs with results: {len(known)}{without}"
        return Panel(*panel, missing=why)
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
    panel = ("messages", "Last fault of each kind", "The last message of each kind in each run.")
    if not rows:
        return Panel(*panel, missing="No messages in the selected runs", wide=True)
    columns = ("run", "fault", "message", "end of the message")
    return Panel(*panel, columns=columns, rows=rows, wide=True)
