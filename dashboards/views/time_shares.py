"""Panels of the time of the driver and of the workers, for the tabs of all optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from polopt.dashboards.data.colors import phase_color
from polopt.dashboards.data.downsample import Array, downsample_rows
from polopt.dashboards.data.scales import scale_of
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import Line, line_plot
from polopt.dashboards.views.drawing import (
    Panel,
    escaped,
    new_figure,
    not_in_results,
    set_rows,
    shares_of_totals,
    transparent,
)
from polopt.dashboards.views.fault_marks import add_fault_marks
from polopt.metrics.timers import EVALUATION, REPORT, STARTUP
from polopt.metrics.worker_times import BUSY_PARTS, PARTS

INTERVAL_S = "optimizer/interval_s"
DRIVER, WORKERS = "optimizer/driver/share", "optimizer/workers/share"


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Returns the color of each phase of a plot."""
    return {name: phase_color(name, number) for number, name in enumerate(names)}


def share_areas(
    panel: tuple[str, str, str], selection: Selection, run: Run, block: str, parts: Sequence[str]
) -> Panel:
    """Draws the shares of time of one run over time, stacked to 100 percent.

    Args:
        panel: key, title and help of the panel.
        selection: gives the x axis.
        run: the run.
        block: prefix of the shares' keys, such as `optimizer/driver/share`.
        parts: names of the shares, from bottom to top. A share that is always 0 is not drawn.
    """
    x, interval_s = selection.x_of(run), run.trial.values(INTERVAL_S)
    found = shares_of(selection, run, block, parts)
    if x is None or interval_s is None or found is None:
        return not_in_results(*panel, block)
    shares, seconds = found
    names = [part for part, values in zip(parts, shares.T, strict=True) if np.any(values > 0.0)]
    if not names:
        return not_in_results(*panel, f"shares above 0 in {block}")
    kept = shares[:, [parts.index(name) for name in names]]
    at, drawn = downsample_rows(x, kept, seconds)
    # A result describes the interval since the previous result, so the areas begin one interval
    # before the first result.
    before = x[0] - seconds[0] if selection.x == "seconds" else 0.0
    at, drawn = np.append(before, at), np.concatenate([drawn[:1], drawn])
    figure = new_figure(selection.x_title, "share of time", hoverdistance=50, hovermode="x unified")
    for index, part in enumerate(names):
        color = _colors(parts)[part]
        figure.add_trace(
            {
                "type": "scatter",
                "x": at,
                "y": drawn[:, index],
                "name": part,
                "stackgroup": "shares",
                "mode": "lines",
                "line": {"width": 0.5, "color": color, "shape": "vh"},
                "fillcolor": transparent(color, 0.75),
                "hovertemplate": f"{part} %{{y:.1%}}<extra></extra>",
            }
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def shares_of(
    selection: Selection, run: Run, block: str, parts: Sequence[str]
) -> tuple[Array, Array] | None:
    """Returns the shares of time in each result, and the length of the interval of each result.

    If the selection excludes start-up, the intervals do not include start-up, and the driver's
    shares are relative to these shorter intervals. The workers' shares do not contain start-up.

    Returns:
        Shares of shape `[R, parts]` and seconds of shape `[R]`. None if the results do not contain
        the shares.
    """
    interval_s = run.trial.values(INTERVAL_S)
    columns = run.trial.rows.columns([f"{block}/{part}" for part in parts])
    if interval_s is None or not columns or not len(interval_s):
        return None
    none = np.zeros(len(interval_s))
    shares = np.stack([columns.get(f"{block}/{part}", none) for part in parts], axis=1)
    shares = np.nan_to_num(shares)
    seconds = np.nan_to_num(interval_s)
    startup = run.trial.values(f"{DRIVER}/{STARTUP}")
    if startup is None or selection.startup:
        return shares, seconds
    rest = 1.0 - np.nan_to_num(startup)
    if STARTUP in parts:
        shares[:, parts.index(STARTUP)] = 0.0
        shares = shares_of_totals(shares, rest[:, None])
    return shares, seconds * rest


def share_bars(
    panel: tuple[str, str, str], selection: Selection, block: str, parts: Sequence[str]
) -> Panel:
    """Draws the mean shares of time of each group as a bar of 100 percent.

    The shares of a run are weighted by time. All runs of a group have equal weight.
    """
    groups: dict[str, list[Array]] = {}
    for run in selection.runs:
        found = shares_of(selection, run, block, parts)
        if found is not None and found[1].sum() > 0.0:
            groups.setdefault(run.group, []).append(np.average(found[0], axis=0, weights=found[1]))
    if not groups:
        return not_in_results(*panel, block)
    names = [f"{escaped(name)} (n={len(means)})" for name, means in groups.items()]
    shares = np.stack([np.mean(values, axis=0) for values in groups.values()])  # [groups, parts]
    figure = new_figure("share of time", "", barmode="stack")
    for index, (part, color) in enumerate(_colors(parts).items()):
        if not shares[:, index].any():
            continue
        figure.add_trace(
            {
                "type": "bar",
                "x": shares[:, index],
                "y": names,
                "orientation": "h",
                "name": part,
                "marker": {"color": color},
                "text": [f"{value:.0%}" if value >= 0.06 else "" for value in shares[:, index]],
                "width": 0.5,
                "textposition": "inside",
                "textangle": 0,
                "insidetextanchor": "middle",
                "hovertemplate": f"{part} %{{x:.1%}}<extra>%{{y}}</extra>",
            }
        )
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    set_rows(figure, names)
    return Panel(*panel, figure=figure)


def phase_times(
    key: str, selection: Selection, run: Run, phases: Sequence[str], block: str
) -> Panel:
    """Draws median and 99th percentile of the durations of phases.

    Args:
        key: key of the panel.
        selection: gives the x axis.
        run: the run.
        phases: names of the phases. A phase without timings is not drawn.
        block: `optimizer/driver` or `optimizer/workers`.
    """
    whose = "Driver" if block.endswith("driver") else "Workers"
    panel = (
        key,
        f"{whose}: duration of each phase",
        "Solid lines are medians and dotted lines are 99th percentiles of single timings. For "
        "workers, a timing is the time of the phase in one call. A 99th percentile far above the "
        "median means that some calls stall.",
    )
    x, lines = selection.x_of(run), []
    for phase, color in _colors(phases).items():
        half, most = (run.trial.values(f"{block}/{part}_ms/{phase}") for part in ("p50", "p99"))
        if x is None or half is None or not np.any(half > 0.0):
            continue
        lines.append(Line(x, half, phase, phase, color))
        if most is not None:
            lines.append(Line(x, most, f"{phase}, p99", phase, color, "dot"))
    if not lines:
        return not_in_results(*panel, f"{block}/p50_ms above 0")
    scale = scale_of({run.group: [line.y for line in lines]}, selection.log, robust=False)
    return line_plot(panel, selection, [run], lines, "ms", scale, from_zero=True, run=run.label)


def driver_panels(selection: Selection, run: Run, phases: Sequence[str], help_: str) -> list[Panel]:
    """Returns the panels of the driver's time: of one run over time, and of each group.

    Args:
        selection: gives the x axis and the groups.
        run: the run.
        phases: the phases of the optimizer's `step()` in their order. They do not include
            `startup`, `report`, `evaluation` and `other`.
        help_: help of the panel of one run.
    """
    return [
        share_areas(
            ("driver-shares", "Driver's time", help_),
            selection,
            run,
            DRIVER,
            (*reversed(phases), REPORT, EVALUATION, "other", STARTUP),
        ),
        share_bars(
            (
                "driver-bars",
                "Driver's time by group",
                "Shares of the time of a whole run, mean over the runs of a group. "
                f"{selection.since}",
            ),
            selection,
            DRIVER,
            (STARTUP, *phases, REPORT, EVALUATION, "other"),
        ),
    ]


def worker_parts(runs: Iterable[Run]) -> tuple[str, ...]:
    """Returns the parts of the workers' time: `PARTS`, and the further phases of workers that
    the results of `runs` contain."""
    names = (name for run in runs for name in run.trial.rows.names())
    found = {n.removeprefix(f"{WORKERS}/") for n in names if n.startswith(f"{WORKERS}/")}
    return (*BUSY_PARTS, *sorted(found - set(PARTS)), "idle")


def worker_shares(selection: Selection, run: Run) -> list[Panel]:
    """Returns the panels of the workers' time: of one run over time, and of each group."""
    help_ = "The mean over workers. In results before its first reply, a worker counts as idle."
    parts = worker_parts(selection.runs)
    return [
        share_areas(("worker-shares", "Workers' time", help_), selection, run, WORKERS, parts),
        share_bars(
            (
                "worker-bars",
                "Workers' time by group",
                f"Shares of the time of a whole run, mean over the runs of a group. {help_}",
            ),
            selection,
            WORKERS,
            parts,
        ),
    ]


def rise_per(run: Run, counter: Array, other: str) -> Array:
    """Returns the increase of a counter between results, per unit of another counter.

    Args:
        run: the run.
        counter: values of the counter, shape `[R]`.
        other: key of the other counter, such as `TRAINING_S`.

    Returns:
        Rates of shape `[R]`. The rate of the first result is NaN. A rate is also NaN if the counter
        has started again at 0, or if the other counter has not increased.
    """
    values = run.trial.values(other)
    if values is None:
        return np.full(len(counter), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.diff(counter, prepend=np.nan) / np.diff(values, prepend=np.nan)
    return np.where(np.isfinite(rate) & (rate >= 0.0), rate, np.nan)
