"""Charts that several views use: curves of runs, heat maps of lag, points by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polopt.dashboards.data.downsample import downsample_rows
from polopt.dashboards.data.scales import Scale, scale_of
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.statistics import median_reach
from polopt.dashboards.views.drawing import (
    MOST_BANDS,
    Array,
    Panel,
    add_curve,
    escaped,
    new_figure,
    not_in_results,
    pixel_columns,
    set_rows,
    set_scale,
    transparent,
)
from polopt.dashboards.views.faults import add_fault_marks


def scale_of_runs(selection: Selection, curves: Iterable[tuple[Run, Array]]) -> Scale:
    """The y axis of curves of runs, each with its values of shape `[R]`."""
    groups: dict[str, list[Array]] = {}
    for run, values in curves:
        groups.setdefault(run.group, []).append(values)
    return scale_of(groups, selection.log, selection.robust)


def smoothing_note(selection: Selection, which: str = "Smoothed") -> str:
    """A sentence on the smoothing of curves; empty without it."""
    if selection.smoothing <= 0.0:
        return ""
    return f"{which} with weight {selection.smoothing:g}; faint lines are as measured."


def _is_count(name: str) -> bool:
    """Whether a column holds counts: drawn as they are, neither smoothed nor on another scale."""
    return name.rsplit("/", 1)[-1].startswith("num_")


def run_lines(
    panel: tuple[str, str, str], selection: Selection, name: str, y_title: str, **o: Any
) -> Panel:
    """A curve for each run of one column of results.

    Args:
        panel: key, title and help of the panel.
        selection: runs and axis.
        name: the column.
        y_title: title of the axis with its unit.
        **o: `transform(run, column)` for what is drawn instead of the column; `from_zero` for an
            axis that contains 0; `shape` of the lines.
    """
    drawn = []
    for run in selection.runs:
        x = selection.x_of(run)
        y = run.trial.values(name)
        if x is None or y is None:
            continue
        if "transform" in o:
            y = o["transform"](run, y)
        drawn.append((run, x, y))
    if not drawn:
        return not_in_results(*panel, name)
    figure = new_figure(selection.x_title, y_title)
    if _is_count(name) and "transform" not in o:
        selection = replace(selection, smoothing=0.0, log=False, robust=False)
    scale = scale_of_runs(selection, [(run, y) for run, _, y in drawn])
    set_scale(figure, scale, from_zero=o.get("from_zero", False))
    columns = pixel_columns(len(drawn) * (2 if selection.smoothing > 0.0 else 1))
    seen: set[str] = set()
    for run, x, y in drawn:
        add_curve(
            figure, x, y, name=run.label, group=run.group, color=run.color, columns=columns,
            legend=run.group not in seen, band=len(drawn) <= MOST_BANDS,
            shape=o.get("shape", "linear"), dash=run.look.dash,
            smoothing=selection.smoothing, log=scale.log,
        )  # fmt: skip
        seen.add(run.group)
    add_fault_marks(figure, selection, [run for run, _, _ in drawn])
    note = f"{smoothing_note(selection)} {scale.note}".strip()
    return Panel(*panel, figure=figure, note=note)


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
    if all(_is_count(lines[name][0]) for name in drawn):
        selection = replace(selection, smoothing=0.0, log=False)
    scale = scale_of({run.group: list(drawn.values())}, selection.log, robust=False)
    set_scale(figure, scale, from_zero=True)
    columns = pixel_columns(len(drawn) * (2 if selection.smoothing > 0.0 else 1))
    for name, values in drawn.items():
        add_curve(
            figure, x, values, name=name, color=lines[name][1], columns=columns,
            smoothing=selection.smoothing, log=scale.log,
        )  # fmt: skip
    add_fault_marks(figure, selection, [run])
    note = f"{smoothing_note(selection)} {scale.note}".strip()
    return Panel(*panel, figure=figure, note=note, run=run.label)


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
    figure.add_trace(
        {
            "type": "heatmap",
            "x": at,
            "y": np.arange(num_bins),
            "z": np.round(shares.T, 5),
            "colorscale": HEAT,
            "zmin": 0.0,
            "zmax": max(0.05, float(shares.max(initial=0.0))),
            "colorbar": {"title": {"text": "share"}, "thickness": 12, "tickformat": ".0%"},
            "hovertemplate": "%{x:,.6~g}: lag %{y}: %{z:.1%}<extra></extra>",
        }
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


#: Colors of shares. From transparent, so that empty bins have the background of the page, light or
#: dark.
HEAT = [
    [0.0, "rgba(47,126,216,0)"],
    [0.25, "rgba(47,126,216,0.55)"],
    [0.6, "rgba(180,90,214,0.85)"],
    [1.0, "rgba(232,116,59,1)"],
]


@dataclass(frozen=True)
class Point:
    """One run in a row of points.

    Attributes:
        run: the run.
        value: on the x axis.
        reached: False for a run that got as far as `value` without reaching what is asked for.
    """

    run: Run
    value: float
    reached: bool = True


def strips(
    panel: tuple[str, str, str], groups: Mapping[str, Sequence[Point]], x_title: str
) -> Panel:
    """A row of points for each group, one point for each run, and the median of the group.

    Runs that have not reached the goal are open marks; the median counts them as larger than all
    others, and is left out where half of the runs have not reached it.
    """
    figure = new_figure(x_title, "")
    for name, points in groups.items():
        for reached in (True, False):
            shown = [point for point in points if point.reached == reached]
            if not shown:
                continue
            color = shown[0].run.color
            texts = [escaped(point.run.label) for point in shown]
            figure.add_trace(
                {
                    "type": "scatter",
                    "x": [point.value for point in shown],
                    "y": [escaped(name)] * len(shown),
                    "mode": "markers",
                    "marker": {
                        "color": transparent(color, 0.55) if reached else color,
                        "size": 9,
                        "symbol": shown[0].run.look.symbol if reached else "triangle-right-open",
                    },
                    "text": texts if reached else [f"{text}: not reached until" for text in texts],
                    "hovertemplate": "%{text}<br>%{x:,.6~g}<extra></extra>",
                    "showlegend": False,
                    "name": escaped(name) if reached else f"{escaped(name)}, not reached",
                }
            )
        found = [point.value if point.reached else np.nan for point in points]
        median = median_reach(np.array(found)).value
        if np.isfinite(median):
            color = points[0].run.color
            figure.add_trace(
                {
                    "type": "scatter",
                    "x": [median],
                    "y": [escaped(name)],
                    "mode": "markers",
                    "marker": {
                        "size": 18,
                        "symbol": "line-ns",
                        "line": {"width": 3, "color": color},
                    },
                    "hovertemplate": "median %{x:,.6~g}<extra></extra>",
                    "showlegend": False,
                    "name": f"{escaped(name)}, median",
                }
            )
    set_rows(figure, [escaped(name) for name in groups])
    figure.update_xaxes(rangemode="tozero")
    return Panel(*panel, figure=figure)
