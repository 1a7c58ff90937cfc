"""Charts that several views use: curves of runs, heat maps of lag, points by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polopt.dashboards.data.downsample import downsample_rows
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.drawing import (
    MOST_BANDS,
    Panel,
    add_curve,
    escaped,
    new_figure,
    not_in_results,
    pixel_columns,
    transparent,
)
from polopt.dashboards.views.faults import add_fault_marks


def run_lines(
    panel: tuple[str, str, str], selection: Selection, names: Sequence[str], y_title: str, **o: Any
) -> Panel:
    """A curve for each run of one column of results.

    Args:
        panel: key, title and help of the panel.
        selection: runs and axis.
        names: the column, and older names of it that are taken where it is missing.
        y_title: title of the axis with its unit.
        **o: `transform(run, column)` for what is drawn instead of the column; `from_zero` for an
            axis that contains 0; `shape` of the lines.
    """
    drawn = []
    for run in selection.runs:
        x = selection.x_of(run)
        y = next((v for v in map(run.trial.values, names) if v is not None), None)
        if x is None or y is None:
            continue
        if "transform" in o:
            y = o["transform"](run, y)
        drawn.append((run, x, y))
    if not drawn:
        return not_in_results(*panel, names[0])
    figure = new_figure(selection.x_title, y_title)
    if o.get("from_zero"):
        figure.update_yaxes(rangemode="tozero")
    columns = pixel_columns(len(drawn))
    seen: set[str] = set()
    for run, x, y in drawn:
        add_curve(
            figure, x, y, name=run.label, group=run.group, color=run.color, columns=columns,
            legend=run.group not in seen, band=len(drawn) <= MOST_BANDS,
            shape=o.get("shape", "linear"),
        )  # fmt: skip
        seen.add(run.group)
    add_fault_marks(figure, selection, [run for run, _, _ in drawn])
    return Panel(*panel, figure=figure)


def named_lines(
    panel: tuple[str, str, str],
    selection: Selection,
    run: Run,
    lines: Mapping[str, tuple[str, str]],
    y_title: str,
) -> Panel:
    """Several columns of one run in one plot.

    Args:
        panel: key, title and help of the panel.
        selection: the axis.
        run: the run.
        lines: name of a line -> column and color.
        y_title: title of the axis with its unit.
    """
    x = selection.x_of(run)
    found = {name: run.trial.values(column) for name, (column, _) in lines.items()}
    drawn = {name: values for name, values in found.items() if values is not None}
    if x is None or not drawn:
        return not_in_results(*panel, *(column for column, _ in lines.values()))
    figure = new_figure(selection.x_title, y_title)
    figure.update_yaxes(rangemode="tozero")
    for name, values in drawn.items():
        add_curve(
            figure, x, values, name=name, color=lines[name][1], columns=pixel_columns(len(drawn))
        )
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def heat_map(
    panel: tuple[str, str, str], selection: Selection, run: Run, prefix: str, **options: Any
) -> Panel:
    """A histogram over time as a heat map: each column of pixels sums to 1.

    Args:
        panel: key, title and help of the panel.
        selection: the axis.
        run: the run.
        prefix: column prefix of the bins, such as `optimizer/gradient_lag/histogram/`.
        **options: `y_title`; `limit`: value of a line with its name in `limit_name`, or None.
    """
    x = selection.x_of(run)
    num_bins = sum(name.startswith(prefix) for name in run.trial.rows.names())
    columns = run.trial.rows.columns([f"{prefix}{bin_}" for bin_ in range(num_bins)])
    if x is None or not num_bins or len(columns) != num_bins:
        return not_in_results(*panel, prefix.rstrip("/"))
    at, counts = downsample_rows(x, np.stack(list(columns.values()), axis=1))
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    figure = new_figure(selection.x_title, options["y_title"])
    figure.add_heatmap(
        x=at,
        y=np.arange(num_bins),
        z=np.round(shares.T, 5),
        colorscale=_HEAT,
        zmin=0.0,
        zmax=max(0.05, float(shares.max(initial=0.0))),
        colorbar={"title": {"text": "share"}, "thickness": 12, "tickformat": ".0%"},
        hovertemplate="%{x:,.6~g}: lag %{y}: %{z:.1%}<extra></extra>",
    )
    used = np.flatnonzero(shares.max(axis=0, initial=0.0) > 0.0)
    limit = options.get("limit")
    top = max([3.0, float(used[-1]) if len(used) else 0.0, *([limit] if limit is not None else [])])
    figure.update_yaxes(range=[-0.5, top + 0.7])
    if limit is not None:
        figure.add_hline(
            y=limit,
            line={"dash": "dash", "color": "#e4508f"},
            annotation_text=escaped(options["limit_name"]),
        )
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


# From transparent, so that empty bins have the background of the page, light or dark.
_HEAT = [
    [0.0, "rgba(47,126,216,0)"],
    [0.25, "rgba(47,126,216,0.55)"],
    [0.6, "rgba(180,90,214,0.85)"],
    [1.0, "rgba(232,116,59,1)"],
]


def strips(
    panel: tuple[str, str, str], groups: Mapping[str, Sequence[tuple[Run, float]]], x_title: str
) -> Panel:
    """A row of points for each group, one point for each run, and the median of the group."""
    figure = new_figure(x_title, "")
    for name, runs in groups.items():
        values = np.array([value for _, value in runs])
        finite = np.isfinite(values)
        labels = [escaped(run.label) for run, _ in runs]
        color = runs[0][0].color
        axis = [escaped(name)] * int(finite.sum())
        figure.add_scatter(
            x=values[finite],
            y=axis,
            mode="markers",
            marker={"color": transparent(color, 0.55), "size": 9},
            text=[label for label, ok in zip(labels, finite, strict=True) if ok],
            hovertemplate="%{text}<br>%{x:,.6~g}<extra></extra>",
            showlegend=False,
            name=escaped(name),
        )
        if finite.any():
            figure.add_scatter(
                x=[float(np.median(values[finite]))],
                y=[escaped(name)],
                mode="markers",
                marker={"size": 18, "symbol": "line-ns", "line": {"width": 3, "color": color}},
                hovertemplate="median %{x:,.6~g}<extra></extra>",
                showlegend=False,
                name=f"{escaped(name)}, median",
            )
    names = [escaped(name) for name in groups]
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], range=[-0.6, len(names) - 0.4]
    )
    figure.update_xaxes(rangemode="tozero")
    return Panel(*panel, figure=figure)
