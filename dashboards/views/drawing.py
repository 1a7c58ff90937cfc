"""`Panel`, and the functions that draw the layout, curves, bands and heat maps of all plots.

These functions pass traces to Plotly as dicts, because Plotly validates the properties of a dict
only once. Plotly validates the arguments of `add_scatter` twice, which would take most of the time
for drawing a tab.
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

HEIGHT = 360  # px of a plot whose legend has at most `_FREE_LEGEND_ROWS` rows
# A plot with a row for each group: px of a row, and px around the rows without and with a legend.
_ROW_HEIGHT, _AROUND_ROWS, _AROUND_WITH_LEGEND = 20, 100, 180
_LINE_HEIGHT, _NAME_LINE = 15, 26  # px and characters of a line in the name of a row
# Legends: characters of a row and of a symbol, px of a row, and rows that fit into `HEIGHT`.
_LEGEND_ROW, _LEGEND_SYMBOL, _LEGEND_ROW_HEIGHT, _FREE_LEGEND_ROWS = 55, 7, 20, 2
_POINTS = 20_000  # maximum number of points of all curves of a figure with at most 400 curves
_MOST_COLUMNS = 500  # columns of pixels of a plot, which is half a page wide
#: Plots with more runs have no bands of minima and maxima, because these bands would hide each
#: other.
MOST_BANDS = 8

#: Color scale of heat maps of shares. It begins with a transparent color. So empty bins show the
#: background of the page, which may be light or dark.
HEAT = [
    [0.0, "rgba(47,126,216,0)"],
    [0.25, "rgba(47,126,216,0.55)"],
    [0.6, "rgba(180,90,214,0.85)"],
    [1.0, "rgba(232,116,59,1)"],
]


@dataclass(frozen=True)
class Panel:
    """A plot, a table or a list of findings in a tab.

    Attributes:
        key: unique name in the tab. It names the files that `--figures` writes.
        title: title in plain text.
        help: a few sentences that explain how to read the panel.
        figure: the plot. None for a table or a list of findings, or if data are missing.
        columns: names of the columns of a table.
        rows: cells of a table.
        findings: the entries of a list of findings. Each entry is the text of the problem, the
            change that may help, and the groups that have the problem.
        note: a text, such as a sentence about values that the plot does not show, or shows
            smoothed. Unlike `help`, it is always visible. It may be all that the panel has.
        missing: the reason why there is nothing to show. Empty if there is something to show.
        wide: whether the panel spans the width of the page.
        run: label of the run that the panel shows. Empty if it shows all selected runs.
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
        if self.figure is not None:  # makes room for the legend, which is below the plot
            rows = _legend_rows([t.name or "" for t in self.figure.data if _is_listed(t)])
            height = HEIGHT + _LEGEND_ROW_HEIGHT * max(0, rows - _FREE_LEGEND_ROWS)
            self.figure.layout.height = max(height, self.figure.layout.height or 0)


def _is_listed(trace: Any) -> bool:
    """Returns whether a trace has an entry in the legend."""
    return trace.showlegend is not False and trace.type != "heatmap"


def _legend_rows(names: Sequence[str]) -> int:
    """Returns the number of rows of a legend. Its entries are not broken into lines."""
    rows = filled = 0
    for name in names:
        width = len(name) + _LEGEND_SYMBOL
        if not rows or filled + width > _LEGEND_ROW:
            rows, filled = rows + 1, 0
        filled += width
    return rows


def escaped(text: str) -> str:
    """Escapes text from result files, because Plotly interprets some HTML in labels."""
    return html.escape(text, quote=False)


def not_in_results(key: str, title: str, help_: str, *names: str) -> Panel:
    """Returns a panel without a plot. It says which keys the results do not contain."""
    listed = ", ".join(names)
    return Panel(key, title, help_, missing=f"Not in these results: {listed}")


def new_figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """Returns an empty figure with the layout of all plots."""
    grid = {"gridcolor": "rgba(128,128,128,0.2)", "zeroline": False, "automargin": True}
    # The layout is set at once, because several updates of a layout take much longer.
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
                "maxheight": 2000,  # px. `Panel` increases the height of the figure for the legend
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
    """Sets type and range of the axis of values.

    Args:
        figure: the figure.
        scale: type and range.
        from_zero: whether a linear axis includes 0.
        horizontal: whether the axis of values is the x axis instead of the y axis.
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
    """Sets the names and the height of a plot that has a row for each group.

    Long names are broken into lines, which leaves more room for the plot.

    Args:
        figure: the figure.
        names: names of the rows, from top to bottom.
    """
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=names[::-1],
        range=[-0.6, len(names) - 0.4],
        **broken_names(names),
    )
    lines = max((len(_broken(name)) for name in names), default=1)
    row = max(_ROW_HEIGHT, 6 + _LINE_HEIGHT * lines)
    around = _AROUND_WITH_LEGEND if any(map(_is_listed, figure.data)) else _AROUND_ROWS
    figure.layout.height = max(HEIGHT, row * len(names) + around)


def broken_names(names: Sequence[str]) -> dict[str, Any]:
    """Returns the options of an axis of categories, whose long names are broken into lines."""
    texts = ["<br>".join(_broken(name)) for name in names]
    return {"tickmode": "array", "tickvals": list(names), "ticktext": texts}


def _broken(name: str) -> list[str]:
    """Breaks a name into lines at spaces, but not within short parentheses."""
    lines: list[str] = []
    for word in re.findall(r"\([^()]{,20}\)|\S+", name):
        if lines and len(lines[-1]) + 1 + len(word) <= _NAME_LINE:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def transparent(color: str, alpha: float) -> str:
    """Adds an alpha channel to a hex color."""
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
    """Adds a curve, downsampled to the mean of each column of pixels.

    A band shows minimum and maximum of each column of pixels.

    Args:
        figure: the figure.
        x: increasing positions, shape `[R]`.
        y: values, shape `[R]`.
        name: name in the legend and the hover text. This function escapes it.
        color: color as a hex string.
        columns: number of columns of pixels.
        group: legend entry of several curves, which a click shows or hides together. If empty, the
            entry is `name`.
        legend: whether this curve adds the entry to the legend.
        band: whether the curve has a band.
        points: whether each point has a marker.
        dash: dash of the line.
        shape: Plotly's shape of the line between points.
        width: width of the line in px.
        smoothing: weight for the function `smoothed`. Above 0, the measured curve is drawn as a
            faint line instead of a band.
        log: whether the axis is logarithmic. Then values that are not above 0 are not drawn.
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
                "name": f"{escaped(name)}, measured",
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
            "hovertemplate": f"{escaped(name)}<br>%{{x:,.7~r}}: %{{y:,.7~g}}<extra></extra>",
        }
    )


def add_band(figure: go.Figure, curve: Curve, *, color: str, group: str) -> None:
    """Fills the area between minimum and maximum of a curve. The area has no legend entry."""
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
    """Adds points. By default, they have no entry in the legend.

    Args:
        figure: the figure.
        x: positions, shape `[points]`.
        y: positions, shape `[points]`.
        name: name of the points. The caller escapes it.
        marker: the property `marker` of Plotly's `scatter`.
        hover: Plotly's template of the hover text.
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
        x: position of each column, shape `[columns]`.
        y: name of each row, shape `[rows]`.
        values: shape `[columns, rows]`.
        title: title of the color bar.
        form: format of the values on the color bar, in the format language of d3.
        hover: Plotly's template of the hover text, without the position on the x axis.
        colors: a color scale of Plotly.
        greatest: the value of the last color. `None` means the maximum of `values`.
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
            "hovertemplate": f"%{{x:,.7~r}}: {hover}<extra></extra>",
        }
    )


def shares_of_totals(counts: Array, totals: Array) -> Array:
    """Returns `counts / totals`, of the shape of `counts`. A share is 0 if its total is 0."""
    return np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)


def pixel_columns(num_curves: int) -> int:
    """Returns the number of columns of pixels for each curve of a figure."""
    return max(50, min(_MOST_COLUMNS, _POINTS // max(1, num_curves)))
