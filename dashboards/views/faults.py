"""Faults: marks on the time axis of every plot, and a tab of their own."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from polopt.dashboards.data.selection import Run, Selection

Array = np.ndarray[Any, Any]
#: Kind -> counter, older names of it, the symbol of its mark, its color, and what tells the cause.
KINDS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "worker restarts": (
        ("fault_tolerance/num_remote_worker_restarts",),
        "triangle-up",
        "#d62728",
        "fault_tolerance/last_failure",
    ),
    "environment faults": (
        ("fault_tolerance/num_env_faults",),
        "diamond",
        "#c27c0e",
        "fault_tolerance/last_env_fault",
    ),
    "non-finite data": (
        ("fault_tolerance/num_non_finite", "fault_tolerance/num_bad_numbers"),
        "x",
        "#b45ad6",
        "fault_tolerance/last_non_finite",
    ),
    "skipped updates": (("optimizer/num_skipped_updates",), "square-open", "#64748b", ""),
    "broken rounds": (("optimizer/num_broken_rounds",), "star", "#e4508f", ""),
}
# Of one kind in one plot, over all runs, and in one run; marks closer than that are one.
_MOST_MARKS, _LEAST_MARKS = 240, 12


def increases(run: Run, names: Sequence[str]) -> tuple[Array, Array] | None:
    """Rows in which a lifetime counter rose, and by how much; None if no row has the counter.

    A counter that starts anew after a restore falls; that is no fault.
    """
    counter = next((v for v in map(run.trial.values, names) if v is not None), None)
    if counter is None:
        return None
    known = np.where(np.isfinite(counter), counter, 0.0)
    rise = np.diff(known, prepend=0.0)
    rows = np.flatnonzero(rise > 0)
    return rows, rise[rows]


def add_fault_marks(figure: go.Figure, selection: Selection, runs: Sequence[Run]) -> None:
    """Marks faults of `runs` at the bottom of a plot over time or steps."""
    any_marks = False
    columns = max(_LEAST_MARKS, _MOST_MARKS // max(1, len(runs)))
    for kind, (names, symbol, color, message_name) in KINDS.items():
        at: list[float] = []
        texts: list[str] = []
        for run in runs:
            found, x = increases(run, names), selection.x_of(run)
            if found is None or x is None:
                continue
            messages = run.trial.rows.column(message_name) if message_name else None
            for value, count, row in _merged(x, *found, columns):
                text = f"{count:g} {kind}, {run.label}"
                if messages is not None and messages.dtype == object and messages[row]:
                    text += f": {str(messages[row])[:120]}"
                at.append(value)
                texts.append(html.escape(text, quote=False))
        if at:
            any_marks = True
            figure.add_scatter(
                x=np.array(at),
                y=np.full(len(at), 0.03),
                yaxis="y2",
                mode="markers",
                cliponaxis=False,
                marker={"symbol": symbol, "size": 9, "color": color},
                name=kind,
                text=np.array(texts, dtype=object),
                hovertemplate="%{text}<extra></extra>",
            )
    if any_marks:
        figure.update_layout(
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            showlegend=True,
        )


def _merged(
    x: Array,
    rows: Array,
    counts: Array,
    columns: int,
) -> list[tuple[float, float, int]]:
    """Position, count and last row of marks; those in one column of pixels are one mark."""
    keep = np.isfinite(x[rows])
    rows, counts = rows[keep], counts[keep]
    if not len(rows):
        return []
    span = max(float(np.nanmax(x)) - float(np.nanmin(x)), 1e-12)
    bins = ((x[rows] - float(np.nanmin(x))) / span * columns).astype(np.int64)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    ends = np.append(starts[1:], len(rows)) - 1
    totals = np.add.reduceat(counts, starts)
    return [
        (float(x[rows[start]]), float(total), int(rows[end]))
        for start, end, total in zip(starts, ends, totals, strict=True)
    ]
