"""Marks of faults and of config changes at the bottom of each plot over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go

from polopt.dashboards.data.downsample import Array, column_starts
from polopt.dashboards.data.rows import CONFIG_CHANGES
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.drawing import add_points, escaped

#: Maps each kind of fault to its counter, the symbol and color of its marks, and the result key of
#: the last message. This key is empty if the results have no message. A broken round is a round of
#: sampling and learning that a fault interrupted.
KINDS: dict[str, tuple[str, str, str, str]] = {
    "worker restarts": (
        "fault_tolerance/num_remote_worker_restarts",
        "triangle-up",
        "#d62728",
        "fault_tolerance/last_failure",
    ),
    "environment faults": (
        "fault_tolerance/num_env_faults",
        "diamond",
        "#c27c0e",
        "fault_tolerance/last_env_fault",
    ),
    "non-finite data": (
        "fault_tolerance/num_non_finite",
        "x",
        "#b45ad6",
        "fault_tolerance/last_non_finite",
    ),
    "skipped updates": ("optimizer/num_skipped_updates", "square-open", "#64748b", ""),
    "broken rounds": ("optimizer/num_broken_rounds", "star", "#e4508f", ""),
}
_CHANGES = ("config changes", "circle-open", "#2f7ed8")
# The marks of one kind are merged until a plot has at most `_MOST_MARKS` of them, divided equally
# among its runs. If the plot has many runs, each run may still have `_LEAST_MARKS` marks.
_MOST_MARKS, _LEAST_MARKS = 240, 12
_MARK_CHARACTERS = 120  # maximum number of characters of a message


def last_line(text: str) -> str:
    """Returns the last line of a message. In a traceback, this is the exception."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def increases(run: Run, name: str) -> tuple[Array, Array] | None:
    """Returns the rows in which a counter rose and its increases, or None without the counter.

    After a restore, a counter may start at 0 again. After a decrease, the increase is therefore the
    value itself.
    """
    counter = run.trial.values(name)
    rows = np.flatnonzero(np.isfinite(counter)) if counter is not None else np.empty(0, int)
    if counter is None or not len(rows):
        return None
    rise = np.diff(counter[rows], prepend=0.0)
    rise = np.where(rise < 0.0, counter[rows], rise)
    return rows[rise > 0.0], rise[rise > 0.0]


def add_fault_marks(figure: go.Figure, selection: Selection, runs: Sequence[Run]) -> None:
    """Marks faults and config changes of `runs` at the bottom of a plot."""
    columns = max(_LEAST_MARKS, _MOST_MARKS // max(1, len(runs)))
    marks: dict[tuple[str, str, str], list[tuple[float, str]]] = {
        (kind, symbol, color): [m for run in runs for m in _faults(selection, run, kind, columns)]
        for kind, (_, symbol, color, _) in KINDS.items()
    }
    marks[_CHANGES] = [mark for run in runs for mark in _changes(selection, run)]
    for look, found in marks.items():
        if found:
            _add_marks(figure, look, found)
    if any(marks.values()):
        layout = figure.layout  # assigns properties, because `update_layout` is much slower
        layout.yaxis2 = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        layout.showlegend = True  # even if the legend contains only marks


def _add_marks(
    figure: go.Figure, look: tuple[str, str, str], marks: Sequence[tuple[float, str]]
) -> None:
    """Adds the marks of one kind.

    Args:
        figure: the figure.
        look: name, symbol and color of the marks.
        marks: position and hover text of each mark.
    """
    kind, symbol, color = look
    texts = np.array([escaped(text) for _, text in marks], dtype=object)
    add_points(
        figure, np.array([at for at, _ in marks]), np.full(len(marks), 0.03), name=kind,
        marker={"symbol": symbol, "size": 9, "color": color}, text=texts, hover="%{text}",
        yaxis="y2", cliponaxis=False, showlegend=True,
    )  # fmt: skip


def _faults(selection: Selection, run: Run, kind: str, columns: int) -> list[tuple[float, str]]:
    """Returns the marks of one kind of one run, cached for all plots with the same x axis."""

    def found() -> list[tuple[float, str]]:
        name, _, _, message_name = KINDS[kind]
        rises, x = increases(run, name), selection.x_of(run)
        if rises is None or x is None:
            return []
        messages = run.trial.rows.column(message_name) if message_name else None
        marks = []
        for at, count, row in _merged(x, *rises, columns):
            text = f"{count:g} {kind}, {run.label}"
            if messages is not None and messages.dtype == object and messages[row]:
                text += f": {last_line(str(messages[row]))[:_MARK_CHARACTERS]}"
            marks.append((at, text))
        return marks

    key = ("marks", kind, columns, selection.x, selection.startup, run.label)
    marks: list[tuple[float, str]] = run.trial.derived(key, found)
    return marks


def _changes(selection: Selection, run: Run) -> Iterator[tuple[float, str]]:
    """Yields position and text of each change of the config, as in population-based training."""
    counter, x = run.trial.values(CONFIG_CHANGES), selection.x_of(run)
    if counter is None or x is None or not run.trial.rows.config_changes:
        return
    for row in np.flatnonzero(np.diff(counter, prepend=0.0)):
        change = run.trial.rows.config_changes[int(counter[row]) - 1]
        texts = [f"{key} from {old} to {new}" for key, (old, new) in change.items()]
        if np.isfinite(x[row]):
            yield float(x[row]), f"{', '.join(texts)}, {run.label}"


def _merged(
    x: Array,
    rows: Array,
    counts: Array,
    columns: int,
) -> list[tuple[float, float, int]]:
    """Merges the marks in each of `columns` equal parts of the x axis.

    Returns the position of the first mark, the sum of the counts and the last row of each part."""
    keep = np.isfinite(x[rows])
    rows, counts = rows[keep], counts[keep]
    if not len(rows):
        return []
    starts = column_starts(x[rows], columns, (float(np.nanmin(x)), float(np.nanmax(x))))
    ends = np.append(starts[1:], len(rows)) - 1
    totals = np.add.reduceat(counts, starts)
    return [
        (float(x[rows[start]]), float(total), int(rows[end]))
        for start, end, total in zip(starts, ends, totals, strict=True)
    ]
