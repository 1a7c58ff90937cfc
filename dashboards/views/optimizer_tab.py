"""The tab of an optimizer: the panels that every optimizer has, and the panels that it declares."""

from __future__ import annotations

import numpy as np

from polopt.dashboards.data.downsample import downsample_rows
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.tab import OptimizerTab, Plot
from polopt.dashboards.data.trials import TRAINING_S
from polopt.dashboards.views.charts import is_count, plot_lines, run_lines
from polopt.dashboards.views.drawing import (
    Panel,
    add_heat_map,
    add_points,
    escaped,
    new_figure,
    not_in_results,
    shares_of_totals,
)
from polopt.dashboards.views.episode_panels import episode_panels
from polopt.dashboards.views.fault_marks import add_fault_marks
from polopt.dashboards.views.time_shares import (
    driver_panels,
    phase_times,
    rise_per,
    worker_parts,
    worker_shares,
)
from polopt.dashboards.views.worker_panels import worker_panels
from polopt.metrics.number import Number

_MOST_EXTRA = 20
_DRAWN = ("counter", "total", "gauge")  # kinds of numbers that get a plot automatically


def _is_own(key: str) -> bool:
    """Returns whether the tab draws a number: a single number that no other tab draws."""
    return "<" not in key and not key.startswith("learners/")


def panels(selection: Selection, tab: OptimizerTab) -> list[Panel]:
    """Returns the panels of the tab.

    Args:
        selection: the runs of this optimizer, and the run in focus.
        tab: the optimizer's declaration.
    """
    run = selection.focused()
    if run is None:
        return []
    declared = [_declared(selection, run, plot) for plot in tab.tab.plots]
    shown = {key for plot in tab.tab.plots for key in plot.keys.values()}
    extra = [n for n in tab.numbers if n.kind in _DRAWN and n.key not in shown and _is_own(n.key)]
    return [
        *driver_panels(selection, run, tab.phases, tab.tab.driver),
        *worker_shares(selection, run),
        *declared,
        *(_extra(selection, number) for number in extra[:_MOST_EXTRA]),
        phase_times("driver-times", selection, run, tab.phases, "optimizer/driver"),
        phase_times("worker-times", selection, run, worker_parts([run]), "optimizer/workers"),
        *worker_panels(selection, run),
        *_efficiency(selection),
        *episode_panels(selection, run),
    ]


def _declared(selection: Selection, run: Run, plot: Plot) -> Panel:
    """Draws a plot that the optimizer declares."""
    if plot.kind == "lines":
        return plot_lines(selection, run, plot)
    plot = run.trial.optimizer_tab.described(plot)
    if plot.kind == "heatmap":
        return _histogram(selection, run, plot)
    (key,) = plot.keys.values()
    per = TRAINING_S if plot.per == "s" else plot.per
    return run_lines(
        (plot.key, plot.title, plot.help),
        selection,
        key,
        plot.unit,
        transform=(lambda run, counter: rise_per(run, counter, per)) if per else None,
        from_zero=True,
        shape="hv" if plot.steps else "linear",
    )


def _histogram(selection: Selection, run: Run, plot: Plot) -> Panel:
    """Draws a histogram over time as a heat map, in which each column of pixels sums to 1."""
    panel = (plot.key, plot.title, plot.help)
    (key,) = plot.keys.values()
    x, names = selection.x_of(run), run.trial.rows.names()
    num_bins = sum(name.startswith(f"{key}/") for name in names)
    columns = run.trial.rows.columns([f"{key}/{bin_}" for bin_ in range(num_bins)])
    if x is None or not num_bins or len(columns) != num_bins:
        return not_in_results(*panel, key)
    at, counts = downsample_rows(x, np.stack(list(columns.values()), axis=1))
    shares = shares_of_totals(counts, counts.sum(axis=1, keepdims=True))
    figure = new_figure(selection.x_title, plot.unit)
    add_heat_map(
        figure, at, np.arange(num_bins), np.round(shares, 5), hover="%{y}: %{z:.1%}",
        greatest=max(0.05, float(shares.max(initial=0.0))),
    )  # fmt: skip
    used = np.flatnonzero(shares.max(axis=0, initial=0.0) > 0.0)
    top = max([3.0, *map(float, used[-1:])])
    # An optimizer's option may come from a preset or a default, which the config does not contain.
    limit = run.trial.optimizer_tab.limits.get(plot.limit, run.trial.config.get(plot.limit))
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        top = max(top, float(limit))
        text = escaped(f"{plot.limit} {limit}")
        figure.add_hline(y=limit, line={"dash": "dash", "color": "#e4508f"}, annotation_text=text)
    figure.update_yaxes(range=[-0.5, top + 0.7])
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def _extra(selection: Selection, number: Number) -> Panel:
    """Draws a number that the optimizer declares: a counter as its rate, and other numbers as they
    are."""
    panel = (f"extra-{number.key.removeprefix('optimizer/')}", number.heading, number.sentence)
    is_rate = number.kind == "counter"
    return run_lines(
        panel,
        selection,
        number.key,
        f"{number.unit}/s" if is_rate else number.unit or number.heading,
        transform=(lambda run, values: rise_per(run, values, TRAINING_S)) if is_rate else None,
        from_zero=is_rate,
        shape="hv" if is_count(number.key) and not is_rate else "linear",
    )


def _efficiency(selection: Selection) -> list[Panel]:
    """Draws the efficiency of runs with `n` workers. Draws nothing without a run with one worker.

    The efficiency is the steps per second with `n` workers, divided by `n` times the steps per
    second with one worker, for the same preset and task. If several runs have one worker, the
    median of their rates is used. A run with `num_workers=0` counts as a run with one worker.
    """
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
        add_points(
            figure, [count], [rate / (count * float(np.median(base)))], name=escaped(run.group),
            marker={"color": run.color, "size": 9, "symbol": run.look.symbol},
            text=[escaped(run.label)], hover="%{text}<br>%{y:.2f}",
        )  # fmt: skip
    if not figure.data:
        return []
    figure.add_hline(y=1.0, line={"dash": "dash", "color": "#888888"})
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(dtick=1)
    help_ = (
        "Steps/s with n workers, divided by n times the steps/s with one worker, for the same "
        f"preset and task. 1 means perfect scaling. {selection.since}"
    )
    return [Panel("efficiency", "Efficiency against one worker", help_, figure=figure)]
