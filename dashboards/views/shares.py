"""Where the time of the driver and of the workers goes: panels that all optimizers' tabs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polopt.dashboards.data.downsample import downsample_rows
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import named_lines
from polopt.dashboards.views.drawing import Panel, escaped, new_figure, not_in_results, transparent
from polopt.dashboards.views.faults import add_fault_marks

#: Waiting is grey in every plot, work has colors.
PHASE_COLORS = {
    "wait": "#9aa5b1",
    "apply": "#2f7ed8",
    "dispatch": "#e8743b",
    "broadcast": "#e8743b",
    "sample": "#19a979",
    "learn": "#2f7ed8",
    "gradient": "#b45ad6",
    "allreduce": "#e8743b",
    "skew": "#e4508f",
    "group": "#d9a514",
    "idle": "#9aa5b1",
    "report": "#a1887f",
    "other": "#cbd2d9",
}
DRIVER, WORKERS = "optimizer/driver/share", "optimizer/workers/share"
PARTS = ("sample", "gradient", "learn", "allreduce", "skew", "idle")


def share_areas(
    panel: tuple[str, str, str], selection: Selection, run: Run, block: str, parts: Sequence[str]
) -> Panel:
    """Shares of one run over time, stacked to 100 percent.

    Args:
        panel: key, title and help of the panel.
        selection: the axis.
        run: the run.
        block: prefix of the shares, such as `optimizer/driver/share`.
        parts: their names, drawn from the bottom; parts that are 0 throughout are left out.
    """
    x = selection.x_of(run)
    columns = run.trial.rows.columns([f"{block}/{part}" for part in parts])
    if x is None or not columns:
        return not_in_results(*panel, block)
    names = [name for name, values in columns.items() if np.nansum(values) > 0.0]
    if not names:
        return not_in_results(*panel, f"{block}: all are 0")
    at, shares = downsample_rows(x, np.stack([columns[name] for name in names], axis=1))
    figure = new_figure(selection.x_title, "share of time", hoverdistance=50)
    for index, name in enumerate(names):
        part = name.rsplit("/", 1)[1]
        color = PHASE_COLORS.get(part, "#888888")
        figure.add_scatter(
            x=at,
            y=shares[:, index],
            name=part,
            stackgroup="shares",
            mode="lines",
            line={"width": 0.5, "color": color},
            fillcolor=transparent(color, 0.75),
            hovertemplate=f"{part} %{{y:.1%}}<extra></extra>",
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_layout(hovermode="x unified")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def share_bars(
    panel: tuple[str, str, str], runs: Sequence[Run], block: str, parts: Sequence[str]
) -> Panel:
    """Mean shares of each group over its runs, as one bar of 100 percent for each group."""
    groups: dict[str, list[np.ndarray[Any, Any]]] = {}
    for run in runs:
        columns = run.trial.rows.columns([f"{block}/{part}" for part in parts])
        if columns:
            means = [
                float(np.nanmean(columns[f"{block}/{part}"]))
                if f"{block}/{part}" in columns and np.isfinite(columns[f"{block}/{part}"]).any()
                else 0.0
                for part in parts
            ]
            groups.setdefault(run.group, []).append(np.array(means))
    if not groups:
        return not_in_results(*panel, block)
    names = [f"{escaped(name)} (n={len(means)})" for name, means in groups.items()]
    shares = np.stack([np.mean(values, axis=0) for values in groups.values()])  # [groups, parts]
    figure = new_figure("share of time", "", barmode="stack")
    for index, part in enumerate(parts):
        if not shares[:, index].any():
            continue
        figure.add_bar(
            x=shares[:, index],
            y=names,
            orientation="h",
            name=part,
            marker={"color": PHASE_COLORS.get(part, "#888888")},
            text=[f"{value:.0%}" if value >= 0.06 else "" for value in shares[:, index]],
            width=0.5,
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            hovertemplate=f"{part} %{{x:.1%}}<extra>%{{y}}</extra>",
        )
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], range=[-0.6, len(names) - 0.4]
    )
    return Panel(*panel, figure=figure)


def phase_times(
    key: str, selection: Selection, run: Run, phases: Mapping[str, str], block: str
) -> Panel:
    """Milliseconds of single timings: median and 99th percentile, means in older results.

    Args:
        key: key of the panel.
        selection: the axis.
        run: the run.
        phases: name of a phase -> its column of means in older results.
        block: `optimizer/driver` or `optimizer/workers`.
    """
    whose = "Driver" if block.endswith("driver") else "Workers"
    panel = (
        key,
        f"{whose}: time of single phases",
        "Solid: median, dotted: 99th percentile of single timings. A 99th percentile far above "
        "the median means stalls.",
    )
    names = run.trial.rows.names()
    if not any(name.startswith(f"{block}/p50_ms/") for name in names):
        lines = {phase: (name, PHASE_COLORS[phase]) for phase, name in phases.items() if name}
        help_ = "Mean of the last timings; these results have no percentiles."
        return named_lines((key, panel[1], help_), selection, run, lines, "ms")
    lines = {}
    for phase in phases:
        lines[phase] = (f"{block}/p50_ms/{phase}", PHASE_COLORS[phase])
        lines[f"{phase}, p99"] = (f"{block}/p99_ms/{phase}", PHASE_COLORS[phase])
    drawn = named_lines(panel, selection, run, lines, "ms")
    if drawn.figure is not None:
        drawn.figure.for_each_trace(
            lambda trace: trace.update(line={"dash": "dot"}, showlegend=False),
            selector=lambda trace: str(trace.name).endswith("p99"),
        )
    return drawn


def driver_panels(selection: Selection, run: Run, phases: Sequence[str], help_: str) -> list[Panel]:
    """Shares of the driver's phases: of one run over time, and of each group.

    Args:
        selection: the axis, and the runs of the groups.
        run: the run.
        phases: in the order of one step; without `report` and `other`.
        help_: of the panel of one run.
    """
    return [
        share_areas(
            ("driver-shares", "Driver's time", help_),
            selection,
            run,
            DRIVER,
            (*reversed(phases), "report", "other"),
        ),
        share_bars(
            ("driver-bars", "Driver's time by group", "Mean over the run and over its seeds."),
            selection.runs,
            DRIVER,
            (*phases, "report", "other"),
        ),
    ]


def worker_bars(selection: Selection) -> Panel:
    """Mean shares of what workers do, for each group."""
    panel = ("worker-bars", "Workers' time by group", "Mean over workers, run and seeds.")
    return share_bars(panel, selection.runs, WORKERS, PARTS)


def driver_times(selection: Selection, run: Run, phases: Sequence[str]) -> Panel:
    """Milliseconds of the driver's phases."""
    means = {phase: f"optimizer/{phase}_time_ms" for phase in phases}
    return phase_times("driver-times", selection, run, means, "optimizer/driver")


def per_second(run: Run, counter: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rate of a lifetime counter between results, shape `[R]`; NaN where it starts anew."""
    seconds = run.trial.values("time_total_s")
    if seconds is None:
        return np.full(len(counter), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.diff(counter, prepend=np.nan) / np.diff(seconds, prepend=np.nan)
    return np.where(np.isfinite(rate) & (rate >= 0.0), rate, np.nan)


def increase_share(counter: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> Any:
    """How much of the rise of one counter is the rise of another, shape `[R]`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.diff(counter, prepend=np.nan) / np.diff(of, prepend=np.nan)
    return np.where(np.isfinite(share), share, np.nan)
