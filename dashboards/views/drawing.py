"""Panels and the layout, curves and bands of all plots.

Traces are given to Plotly as dicts, because it checks the properties of a dict once. It checks the
arguments of `add_scatter` twice, which would be most of the time of a tab.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from polopt.dashboards.data.downsample import Array, Curve, downsample
from polopt.dashboards.data.scales import Scale, above_zero, smoothed

HEIGHT = 360  # px, with a legend of few rows
# Px of a plot with a row for each group: of a row, and around the rows, with and without a legend.
_ROW_HEIGHT, _AROUND_ROWS, _AROUND_WITH_LEGEND = 20, 100, 180
_LINE_HEIGHT, _NAME_LINE = 15, 26  # of the name of a row: px and characters of a line
# Of legends: characters of a row and of a symbol, px of a row, rows that fit into `HEIGHT`.
_LEGEND_ROW, _LEGEND_SYMBOL, _LEGEND_ROW_HEIGHT, _FREE_LEGEND_ROWS = 55, 7, 20, 2
_POINTS = 20_000  # in one figure, over all of its curves
_MOST_COLUMNS = 500  # a plot is half a page wide
#: Bands of minima and maxima are drawn for this many runs at most. More hide each other.
MOST_BANDS = 8

#: Colors of shares. From transparent, so that empty bins have the background of the page, light or
#: dark.
HEAT = [
    [0.0, "rgba(47,126,216,0)"],
    [0.25, "rgba(47,126,216,0.55)"],
    [0.6, "rgba(180,90,214,0.85)"],
    [1.0, "rgba(232,116,59,1)"],
]


@dataclass(frozen=True)
class Panel:
    """One plot or table of a tab.

    Attributes:
        key: name of its files in `--figures`, unique in its tab.
        title: plain text.
        help: one sentence on how to read it.
        figure: the plot. None for a table or where data are missing.
        columns: names of a table's columns.
        rows: cells of a table.
        findings: what is wrong, the change that may help, and the runs: a list instead of a table.
        note: what is left out or changed in the plot, always visible, unlike the help.
        missing: why there is nothing to draw.
        wide: whether it spans the page.
        run: label of the run that it shows. Empty if it shows all selected runs.
    """

    key: str
    title: str
    help: str = ""
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    findings: Sequence[tuple[str, str, str]] = ()
    note: str = ""
    missing: str = ""
    wide: bool = False
    run: str = ""

    def __post_init__(self) -> None:
        if self.figure is not None:  # room for the legend, which is below the plot
            rows = _legend_rows([t.name or "" for t in self.figure.data if _is_listed(t)])
            height = HEIGHT + _LEGEND_ROW_HEIGHT * max(0, rows - _FREE_LEGEND_ROWS)
            self.figure.layout.height = max(height, self.figure.layout.height or 0)


def _is_listed(trace: Any) -> bool:
    """Whether a trace is in the legend."""
    return trace.showlegend is not False and trace.type != "heatmap"


def _legend_rows(names: Sequence[str]) -> int:
    """Rows of a legend whose entries are not broken."""
    rows = filled = 0
    for name in names:
        width = len(name) + _LEGEND_SYMBOL
        if not rows or filled + width > _LEGEND_ROW:
            rows, filled = rows + 1, 0
        filled += width
    return rows


def escaped(text: str) -> str:
    """Text of result files for Plotly, which takes some HTML in labels."""
    return html.escape(text, quote=False)


def not_in_results(key: str, title: str, help_: str, *names: str) -> Panel:
    """A panel that says which keys of results it would need."""
    listed = ", ".join(names)
    return Panel(key, title, help_, missing=f"Not in these results: {listed}")


def new_figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """An empty figure with the layout of all plots."""
    grid = {"gridcolor": "rgba(128,128,128,0.2)", "zeroline": False, "automargin": True}
    # The whole layout at once: three updates of it take Plotly eight times as long.
    return go.Figure(
        layout={
            "height": HEIGHT,
            "margin": {"l": 64, "r": 20, "t": 12, "b": 48},
            "hovermode": "closest",
            "legend": {
                "orientation": "h",
                "yanchor": "top",
                "y": -0.3,
                "x": 0,
                "font": {"size": 11},
                "tracegroupgap": 0,
                "maxheight": 2000,  # px. The height of the figure has room for it
            },
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": {"title": {"text": x_title}, **grid},
            "yaxis": {"title": {"text": y_title}, **grid},
            **layout,
        }
    )


def set_scale(
    figure: go.Figure, scale: Scale, from_zero: bool = False, horizontal: bool = False
) -> None:
    """Sets the axis of values.

    Args:
        figure: the figure.
        scale: of its values.
        from_zero: whether an axis that is linear contains 0.
        horizontal: whether it is the x axis instead of the y axis.
    """
    update = figure.update_xaxes if horizontal else figure.update_yaxes
    if scale.log:
        update(type="log", exponentformat="power")
        return
    if from_zero:
        update(rangemode="tozero")
    if scale.range is None:
        return
    low, high = scale.range
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low or abs(high) or 1.0)
    bottom = 0.0 if from_zero and low == 0.0 else low - margin
    update(range=[bottom, high + margin])


def set_rows(figure: go.Figure, names: Sequence[str]) -> None:
    """Names the rows of a plot of one row for each group, from the top, and makes it high enough
    for their names. Long names are broken into lines, so that they leave room for the plot."""
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=names[::-1],
        range=[-0.6, len(names) - 0.4],
        **broken_names(names),
    )
    lines = max(len(_broken(name)) for name in names)
    row = max(_ROW_HEIGHT, 6 + _LINE_HEIGHT * lines)
    around = _AROUND_WITH_LEGEND if any(map(_is_listed, figure.data)) else _AROUND_ROWS
    figure.layout.height = max(HEIGHT, row * len(names) + around)


def broken_names(names: Sequence[str]) -> dict[str, Any]:
    """Options of an axis whose categories have these names: long ones are broken into lines."""
    texts = ["<br>".join(_broken(name)) for name in names]
    return {"tickmode": "array", "tickvals": list(names), "ticktext": texts}


def _broken(name: str) -> list[str]:
    """Lines of a name, broken at spaces, but not within parentheses."""
    lines: list[str] = []
    for word in re.findall(r"\([^()]{,20}\)|\S+", name):
        if lines and len(lines[-1]) + 1 + len(word) <= _NAME_LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def transparent(color: str, alpha: float) -> str:
    """A hex color with an alpha channel."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def add_curve(
    figure: go.Figure,
    x: Array,
    y: Array,
    *,
    name: str,
    color: str,
    columns: int,
    group: str = "",
    legend: bool = True,
    band: bool = True,
    points: bool = False,
    dash: str = "solid",
    shape: str = "linear",
    width: float = 1.6,
    smoothing: float = 0.0,
    log: bool = False,
) -> None:
    """Adds the means of a curve's pixel columns, with a band from minimum to maximum.

    Args:
        figure: the figure.
        x: shape `[R]`, increasing.
        y: shape `[R]`.
        name: of the legend and of the hover text, escaped here.
        color: hex.
        columns: columns of pixels.
        group: name in the legend of the curves that are switched together. Empty: `name`.
        legend: whether it has an entry in the legend.
        band: whether it has a band.
        points: whether each point is marked.
        dash: of the line.
        shape: of the line between points.
        width: of the line, px.
        smoothing: weight of `smoothed`. The curve itself is faint then, without a band.
        log: whether values that are not above 0 are left out.
    """
    measured = y
    if smoothing > 0.0:
        y = smoothed(y, smoothing)
    if log:
        measured, y = above_zero(measured), above_zero(y)
    curve = downsample(x, y, columns)
    if not len(curve.x):
        return
    group = escaped(group or name)
    if smoothing > 0.0:
        faint = downsample(x, measured, columns)
        figure.add_trace(
            {
                "type": "scatter",
                "x": faint.x,
                "y": faint.mean,
                "mode": "lines",
                "line": {"color": transparent(color, 0.4), "width": 1.0},
                "name": f"{escaped(name)}, as measured",
                "legendgroup": group,
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    elif band and not curve.exact:
        add_band(figure, curve, color=color, group=group)
    single = "markers" if len(curve.x) == 1 else "lines"
    figure.add_trace(
        {
            "type": "scatter",
            "x": curve.x,
            "y": curve.mean,
            "name": group if legend else escaped(name),
            "mode": "lines+markers" if points else single,
            "marker": {"size": 5},
            "line": {"color": color, "width": width, "dash": dash, "shape": shape},
            "legendgroup": group,
            "showlegend": legend,
            "hovertemplate": f"{escaped(name)}<br>%{{x:,.6~g}}: %{{y:,.5~g}}<extra></extra>",
        }
    )


def add_band(figure: go.Figure, curve: Curve, *, color: str, group: str) -> None:
    """Fills the band of a curve, without an entry in the legend."""
    figure.add_trace(
        {
            "type": "scatter",
            "x": np.concatenate([curve.x, curve.x[::-1]]),
            "y": np.concatenate([curve.high, curve.low[::-1]]),
            "fill": "toself",
            "fillcolor": transparent(color, 0.18),
            "line": {"width": 0},
            "mode": "lines",
            "name": f"{group}, band",
            "legendgroup": group,
            "showlegend": False,
            "hoverinfo": "skip",
        }
    )


def add_points(
    figure: go.Figure, x: Any, y: Any, *, name: str, marker: dict[str, Any], hover: str, **more: Any
) -> None:
    """Adds marks without an entry in the legend.

    Args:
        figure: the figure.
        x: shape `[points]`.
        y: shape `[points]`.
        name: escaped.
        marker: of Plotly's `scatter`.
        hover: template of Plotly.
        **more: further properties of Plotly's `scatter`.
    """
    figure.add_trace(
        {
            "type": "scatter",
            "x": x,
            "y": y,
            "mode": "markers",
            "marker": marker,
            "name": name,
            "showlegend": False,
            "hovertemplate": f"{hover}<extra></extra>",
            **more,
        }
    )


def add_heat_map(
    figure: go.Figure,
    x: Array,
    y: Any,
    values: Array,
    *,
    title: str = "share",
    form: str = ".0%",
    hover: str = "%{y}: %{z:.1%}",
    colors: Any = HEAT,
    greatest: float | None = 1.0,
) -> None:
    """Adds a heat map over time.

    Args:
        figure: the figure.
        x: shape `[columns]`.
        y: the names of the rows, shape `[rows]`.
        values: shape `[columns, rows]`.
        title: of the bar of colors.
        form: of the values on the bar, in d3's language, which Plotly takes.
        hover: template of Plotly, after the place on the x axis.
        colors: a scale of Plotly.
        greatest: the value of the last color. None: the greatest value.
    """
    figure.add_trace(
        {
            "type": "heatmap",
            "x": x,
            "y": y,
            "z": values.T,
            "colorscale": colors,
            "zmin": 0.0,
            "zmax": greatest,
            "colorbar": {"title": {"text": title}, "thickness": 12, "tickformat": form},
            "hovertemplate": f"%{{x:,.6~g}}: {hover}<extra></extra>",
        }
    )


def shares_of_totals(counts: Array, totals: Array) -> Array:
    """Counts over totals, of the shape of `counts`. The share is 0 where a total is 0."""
    return np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)


def pixel_columns(num_curves: int) -> int:
    """Columns of pixels for each of so many curves."""
    return max(50, min(_MOST_COLUMNS, _POINTS // max(1, num_curves)))
