"""Figures that all views share: curves of runs, stacked shares, heat maps of lag, points."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from polopt.dashboards.downsample import downsample, downsample_rows
from polopt.dashboards.selection import Run, Selection
from polopt.dashboards.views.faults import add_fault_marks

HEIGHT = 360  # px, with a legend of few rows
# Of legends: characters of a row and of a symbol, px of a row, rows that fit into `HEIGHT`.
_LEGEND_ROW, _LEGEND_SYMBOL, _LEGEND_ROW_HEIGHT, _FREE_LEGEND_ROWS = 55, 7, 20, 2
_POINTS = 20_000  # in one figure, over all of its curves
_MOST_COLUMNS = 500  # a plot is half a page wide
#: Bands of minima and maxima are drawn for this many runs at most; more hide each other.
_MOST_BANDS = 8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Panel:
    """One plot or table of a tab.

    Attributes:
        key: name of its files in `--figures`, unique in its tab.
        title: plain text.
        help: one sentence on how to read it.
        figure: the plot; None for a table or where data are missing.
        columns: names of a table's columns.
        rows: cells of a table.
        missing: why there is nothing to draw.
        wide: whether it spans the page.
        run: label of the run that it shows; empty where it shows all selected runs.
    """

    key: str
    title: str
    help: str = ""
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    missing: str = ""
    wide: bool = False
    run: str = ""

    def __post_init__(self) -> None:
        if self.figure is not None:  # room for the legend, which is below the plot
            names = [t.name or "" for t in self.figure.data if t.showlegend is not False]
            characters = sum(len(name) + _LEGEND_SYMBOL for name in names)
            rows = -(-characters // _LEGEND_ROW)
            height = HEIGHT + _LEGEND_ROW_HEIGHT * max(0, rows - _FREE_LEGEND_ROWS)
            self.figure.update_layout(height=height)


def escaped(text: str) -> str:
    """Text of result files for Plotly, which takes some HTML in labels."""
    return html.escape(text, quote=False)


def not_in_results(key: str, title: str, help_: str, *names: str) -> Panel:
    """A panel that says which keys of results it would need."""
    listed = ", ".join(names)
    return Panel(key, title, help_, missing=f"Not in these results: {listed}")


def new_figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """An empty figure with the layout of all plots."""
    figure = go.Figure()
    figure.update_layout(
        height=HEIGHT,
        margin={"l": 64, "r": 20, "t": 12, "b": 48},
        hovermode="closest",
        legend={
            "orientation": "h",
            "yanchor": "top",
            "y": -0.3,
            "x": 0,
            "font": {"size": 11},
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        **layout,
    )
    grid = "rgba(128,128,128,0.2)"
    figure.update_xaxes(title_text=x_title, gridcolor=grid, zeroline=False, automargin=True)
    figure.update_yaxes(title_text=y_title, gridcolor=grid, zeroline=False, automargin=True)
    return figure


def transparent(color: str, alpha: float) -> str:
    """A hex color with an alpha channel."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def add_curve(
    figure: go.Figure, x: Array, y: Array, *, name: str, color: str, columns: int, **options: Any
) -> None:
    """Adds the means of a curve's pixel columns, with a band from minimum to maximum.

    Args:
        figure: the figure.
        x: shape `[R]`, increasing.
        y: shape `[R]`.
        name: of the legend and of the hover text, escaped here.
        color: hex.
        columns: columns of pixels.
        **options: `legend` (False hides the entry), `group` (entries that are switched together),
            `band` (False leaves it out), `dash`, `shape` of lines.
    """
    curve = downsample(x, y, columns)
    if not len(curve.x):
        return
    group = escaped(options.get("group", name))
    if options.get("band", True) and not curve.exact:
        add_band(figure, curve.x, curve.low, curve.high, color=color, group=group)
    figure.add_scatter(
        x=curve.x,
        y=curve.mean,
        name=group if options.get("legend", True) else escaped(name),
        mode="lines" if len(curve.x) > 1 else "markers",
        line={
            "color": color,
            "width": options.get("width", 1.6),
            "dash": options.get("dash", "solid"),
            "shape": options.get("shape", "linear"),
        },
        legendgroup=group,
        showlegend=options.get("legend", True),
        hovertemplate=f"{escaped(name)}<br>%{{x:,.6~g}}: %{{y:,.5~g}}<extra></extra>",
    )


def add_band(
    figure: go.Figure, x: Array, low: Array, high: Array, *, color: str, group: str
) -> None:
    """Adds a filled band between two curves, without an entry in the legend."""
    figure.add_scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=transparent(color, 0.18),
        line={"width": 0},
        mode="lines",
        name=f"{group}, band",
        legendgroup=group,
        showlegend=False,
        hoverinfo="skip",
    )


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
            legend=run.group not in seen, band=len(drawn) <= _MOST_BANDS,
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


def pixel_columns(num_curves: int) -> int:
    """Columns of pixels for each of so many curves."""
    return max(50, min(_MOST_COLUMNS, _POINTS // max(1, num_curves)))


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
