"""The tab of one optimizer: panels that all optimizers have, and those that it declares."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.dashboards.data.colors import phase_color
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import heat_map, named_lines, run_lines
from polopt.dashboards.views.drawing import Panel, escaped, new_figure
from polopt.dashboards.views.episodes import episode_panels
from polopt.dashboards.views.shares import (
    driver_panels,
    driver_times,
    increase_share,
    per_second,
    worker_shares,
    worker_times,
)
from polopt.dashboards.views.workers import worker_panels
from polopt.metrics.tab import OptimizerTab, Plot

_MOST_EXTRA = 20


def panels(selection: Selection, tab: OptimizerTab) -> list[Panel]:
    """Shares of time, what the optimizer declares, times of phases, workers, traffic, scaling,
    episodes and actions.

    Args:
        selection: runs of this optimizer, and the run in focus.
        tab: what the optimizer declares.
    """
    run = selection.focused()
    if run is None:
        return []
    declared = [_declared(selection, run, plot) for plot in tab.tab.plots]
    shown = {key for plot in tab.tab.plots for key in plot.keys.values()}
    extra = [key for key in tab.extra_stats if f"optimizer/{key}" not in shown]
    return [
        *driver_panels(selection, run, tab.phases, tab.tab.driver),
        *worker_shares(selection, run),
        *declared,
        *(_extra(selection, key) for key in extra[:_MOST_EXTRA]),
        driver_times(selection, run, tab.phases),
        worker_times(selection, run),
        *worker_panels(selection, run),
        *efficiency(selection),
        *episode_panels(selection, run),
    ]


def _declared(selection: Selection, run: Run, plot: Plot) -> Panel:
    """One plot that an optimizer declares."""
    panel = (plot.key, plot.title, plot.help)
    names = list(plot.keys)
    if plot.kind == "lines":
        lines = {
            name: (key, phase_color(name, number))
            for number, (name, key) in enumerate(plot.keys.items())
        }
        return named_lines(panel, selection, run, lines, plot.unit)
    key = plot.keys[names[0]]
    if plot.kind == "heatmap":
        limit = run.trial.config.get(plot.limit) if plot.limit else None
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        return heat_map(
            panel,
            selection,
            run,
            f"{key}/",
            y_title=plot.unit,
            limit=float(limit) if is_number and limit is not None else None,
            limit_name=f"{plot.limit} {limit}",
        )
    options: dict[str, Any] = {"shape": "hv" if plot.steps else "linear", "from_zero": True}
    if plot.per == "s":
        options["transform"] = per_second
    elif plot.per:
        options["transform"] = lambda run, values: _per(run, values, plot.per)
    return run_lines(panel, selection, key, plot.unit, **options)


def _per(run: Run, values: np.ndarray[Any, Any], other: str) -> Any:
    counter = run.trial.values(other)
    return increase_share(values, counter) if counter is not None else np.full(len(values), np.nan)


def _extra(selection: Selection, key: str) -> Panel:
    title = key.removeprefix("num_").replace("_", " ").capitalize()
    panel = (f"extra-{key}", title, f"`optimizer/{key}` of the results.")
    return run_lines(panel, selection, f"optimizer/{key}", key)


def efficiency(selection: Selection) -> list[Panel]:
    """Steps per second of `n` workers over `n` times those of one worker with the same config, if
    there is a run with one worker."""
    rates = [
        (run, count, rate)
        for run in selection.runs
        if (count := run.trial.num_workers) and np.isfinite(rate := selection.rate_of(run))
    ]
    single: dict[tuple[str, str], list[float]] = {}
    for run, count, rate in rates:
        if count == 1:
            single.setdefault((run.trial.trainable, run.task), []).append(rate)
    figure = new_figure("workers", "efficiency")
    for run, count, rate in rates:
        base = single.get((run.trial.trainable, run.task))
        if base is None:
            continue
        figure.add_trace(
            {
                "type": "scatter",
                "x": [count],
                "y": [rate / (count * float(np.median(base)))],
                "mode": "markers",
                "marker": {"color": run.color, "size": 9, "symbol": run.look.symbol},
                "name": escaped(run.group),
                "showlegend": False,
                "text": [escaped(run.label)],
                "hovertemplate": "%{text}<br>%{y:.2f}<extra></extra>",
            }
        )
    if not figure.data:
        return []
    figure.add_hline(y=1.0, line={"dash": "dash", "color": "#888888"})
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(dtick=1)
    help_ = (
        "Steps/s with n workers over n times those of one worker of the same preset and task. 1: "
        f"perfect scaling. {selection.since}"
    )
    return [Panel("efficiency", "Efficiency against one worker", help_, figure=figure)]
