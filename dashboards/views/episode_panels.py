"""Returns, lengths and actions of one run: panels that all optimizers' tabs share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polopt.dashboards.data.colors import PALETTE
from polopt.dashboards.data.downsample import Curve, downsample_rows
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import plot_lines
from polopt.dashboards.views.drawing import (
    Panel,
    add_band,
    add_curve,
    add_heat_map,
    new_figure,
    not_in_results,
    pixel_columns,
    shares_of_totals,
)
from polopt.dashboards.views.fault_marks import add_fault_marks
from polopt.metrics.actions import MOST_CATEGORIES
from polopt.metrics.episode_window import HISTOGRAM_BINS, PERCENTILES
from polopt.metrics.tab import Plot

_BLOCK = "env_runners/"
_ACTIONS = "optimizer/actions/"
_MOST_ROW_NAMES = 16  # beside a heat map


def episode_panels(selection: Selection, run: Run) -> list[Panel]:
    """Distributions of returns and lengths, now and over time, and of actions over time."""
    return [
        _histogram(run, "return", "Returns of the last episodes", "episode return"),
        _quantiles(selection, run, "return", "Distribution of returns", "episode return"),
        _histogram(run, "len", "Lengths of the last episodes", "environment steps"),
        _quantiles(selection, run, "len", "Distribution of lengths", "environment steps"),
        *_actions(selection, run),
    ]


def _histogram(run: Run, which: str, title: str, x_title: str) -> Panel:
    """Of the newest result."""
    name = f"{_BLOCK}episode_{which}"
    panel = (
        f"{which}-histogram",
        title,
        "The last 100 episodes before the newest result, in bins from the least to the greatest; "
        "the line is the median. Two peaks: the policy may fail from some initial states.",
    )
    bins = [f"{name}_histogram/{bin_}" for bin_ in range(HISTOGRAM_BINS)]
    found = run.trial.rows.columns([*bins, f"{name}_min", f"{name}_max", f"{name}_p50"])
    if len(found) != len(bins) + 3:
        return not_in_results(*panel, f"{name}_histogram")
    low, high, median = (float(found[f"{name}_{which_}"][-1]) for which_ in ("min", "max", "p50"))
    if not np.isfinite([low, high]).all():
        return Panel(*panel, missing="No episode has ended in this run", run=run.label)
    counts = np.array([found[bin_][-1] for bin_ in bins])
    width = (high - low) / len(bins)
    at = low + width * (np.arange(len(bins)) + 0.5)
    if width == 0.0:
        at, counts, width = np.array([low]), counts[:1], 1.0
    figure = new_figure(x_title, "episodes", bargap=0.0)
    figure.add_trace(
        {
            "type": "bar",
            "x": at,
            "y": counts,
            "width": width,
            "marker": {"color": run.color},
            "showlegend": False,
            "hovertemplate": "around %{x:,.5~g}: %{y} episodes<extra></extra>",
        }
    )
    figure.add_vline(x=median, line={"dash": "dash", "color": "#888888"})
    return Panel(*panel, figure=figure, run=run.label)


def _quantiles(selection: Selection, run: Run, which: str, title: str, y_title: str) -> Panel:
    """Over time."""
    name = f"{_BLOCK}episode_{which}"
    panel = (
        f"{which}-quantiles",
        title,
        "Of the last 100 episodes before each result: median, half of the episodes (dark), 90 "
        "percent of them (light), least and greatest (dotted). A mean that rises while the lower "
        "edge stays: some episodes still fail.",
    )
    names = [f"{name}_{part}" for part in ("min", *(f"p{p}" for p in PERCENTILES), "max")]
    x, columns = selection.x_of(run), run.trial.rows.columns(names)
    if x is None or len(columns) != len(names):
        return not_in_results(*panel, names[1])
    rows = np.stack([columns[name] for name in names], axis=1)
    known = np.isfinite(rows).all(axis=1)
    at, quantiles = downsample_rows(x[known], rows[known])
    if not len(at):
        return Panel(*panel, missing="No episode has ended in this run", run=run.label)
    least, p5, p25, median, p75, p95, greatest = quantiles.T
    figure = new_figure(selection.x_title, y_title)
    for low, high in ((p5, p95), (p25, p75)):
        add_band(figure, Curve(at, median, low, high), color=run.color, group="median")
    pixels = pixel_columns(1)
    add_curve(figure, at, median, name="median", color=run.color, columns=pixels, width=2.4)
    for edge, values in (("least", least), ("greatest", greatest)):
        add_curve(figure, at, values, name=edge, color=run.color, columns=pixels, dash="dot")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def _actions(selection: Selection, run: Run) -> list[Panel]:
    names = run.trial.rows.names()
    if any(name.startswith(f"{_ACTIONS}mean/") for name in names):
        return [_dimensions(selection, run, statistic) for statistic in ("mean", "std")]
    return [_shares(selection, run)]


def _dimensions(selection: Selection, run: Run, statistic: str) -> Panel:
    """A line for each dimension of a real action."""
    word, help_ = {
        "mean": ("Mean", "As sampled, before clipping or squashing."),
        "std": (
            "Standard deviation",
            "Over the sampled actions. A fall to 0: exploration has ended, and actions do not "
            "depend on observations.",
        ),
    }[statistic]
    names = run.trial.rows.names()
    number = sum(name.startswith(f"{_ACTIONS}{statistic}/") for name in names)
    first = f" The first {len(PALETTE)} of {number}." if number > len(PALETTE) else ""
    shown = range(min(number, len(PALETTE)))
    plot = Plot(
        f"action-{statistic}",
        f"{word} of each action dimension",
        f"{help_}{first}",
        "action",
        {f"dimension {index}": f"{_ACTIONS}{statistic}/{index}" for index in shown},
    )
    return plot_lines(selection, run, plot)


def _shares(selection: Selection, run: Run) -> Panel:
    """A row for each category of each categorical action."""
    panel = (
        "actions",
        "Shares of actions",
        "Of the sampled actions of each result. One row at 100 percent: the policy has become "
        "deterministic.",
    )
    prefix = f"{_ACTIONS}histogram/"
    x = selection.x_of(run)
    found = (
        name.removeprefix(prefix).split("/")
        for name in run.trial.rows.names()
        if name.startswith(prefix)
    )
    places = sorted((int(part), int(category)) for part, category in found)
    columns = run.trial.rows.columns([f"{prefix}{part}/{category}" for part, category in places])
    if x is None or not columns:
        return not_in_results(*panel, prefix.rstrip("/"))
    at, counts = downsample_rows(x, np.stack(list(columns.values()), axis=1))
    parts = np.array([part for part, _ in places])
    # Each part of an action sums to 1.
    totals = np.stack([counts[:, parts == part].sum(axis=1) for part in parts], axis=1)
    shares = shares_of_totals(counts, totals)
    labels = _row_names(places)
    if max(category for _, category in places) == MOST_CATEGORIES - 1:
        panel = (
            *panel[:2],
            f"{panel[2]} Row {MOST_CATEGORIES - 1} holds all further actions, too.",
        )
    figure = new_figure(selection.x_title, "action")
    hover = "action %{y}: %{z:.1%}"
    add_heat_map(figure, at, labels, np.round(shares, 5), hover=hover)
    every = -(-len(labels) // _MOST_ROW_NAMES)
    figure.update_yaxes(type="category", dtick=every, autorange="reversed")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def _row_names(places: Sequence[tuple[int, int]]) -> list[str]:
    """Names of `(part, category)`, or of the category alone where there is one part."""
    if places[-1][0] == 0:
        return [str(category) for _, category in places]
    return [f"{part}: {category}" for part, category in places]
