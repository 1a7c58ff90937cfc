"""Panels of returns, lengths and actions of one run, for the tabs of all optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polopt.dashboards.data.downsample import Curve, downsample_rows
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.tab import Plot
from polopt.dashboards.views.charts import part_lines
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

_BLOCK = "env_runners/"
_ACTIONS = "optimizer/actions/"
_MOST_ROW_NAMES = 16  # maximum number of row names beside a heat map


def episode_panels(selection: Selection, run: Run) -> list[Panel]:
    """Returns panels of returns and lengths in the newest result and over time, of the returns of
    agents and of policies, and of actions."""
    return [
        _histogram(run, "return", "Returns of the last episodes", "episode return"),
        _quantiles(selection, run, "return", "Distribution of returns", "episode return"),
        _histogram(run, "len", "Lengths of the last episodes", "environment steps"),
        _quantiles(selection, run, "len", "Distribution of lengths", "environment steps"),
        *_agents(selection, run),
        *_actions(selection, run),
    ]


def _agents(selection: Selection, run: Run) -> list[Panel]:
    """Draws the returns by agent and by policy, if the environment has several agents."""
    panels = []
    for which, noun in (("agent", "agent"), ("module", "policy")):
        prefix = f"{_BLOCK}{which}_episode_returns_mean/"
        found = (name for name in run.trial.rows.names() if name.startswith(prefix))
        if keys := {name.removeprefix(prefix): name for name in found}:
            help_ = f"The mean over the last 100 episodes in which the {noun} took part."
            if noun == "policy":
                help_ += " The return of a policy is the sum over its agents."
            plot = Plot(f"{noun}-returns", f"Return by {noun}", help_, "episode return", {})
            panels.append(part_lines(selection, run, plot, keys))
    return panels


def _histogram(run: Run, which: str, title: str, x_title: str) -> Panel:
    """Draws the histogram of the newest result."""
    name = f"{_BLOCK}episode_{which}"
    panel = (
        f"{which}-histogram",
        title,
        "The last 100 episodes before the newest result, in bins of equal width from the minimum "
        "to the maximum. The line is the median. Two peaks can mean that the policy fails from "
        "some initial states.",
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
            "hovertemplate": "around %{x:,.7~g}: %{y} episodes<extra></extra>",
        }
    )
    figure.add_vline(x=median, line={"dash": "dash", "color": "#888888"})
    return Panel(*panel, figure=figure, run=run.label)


def _quantiles(selection: Selection, run: Run, which: str, title: str, y_title: str) -> Panel:
    """Draws the percentiles over time."""
    name = f"{_BLOCK}episode_{which}"
    panel = (
        f"{which}-quantiles",
        title,
        "The last 100 episodes before each result. The line is the median. The dark band contains "
        "the middle half of the episodes, and the light band contains the middle 90 percent. "
        "Dotted lines are minimum and maximum. If the median rises but the lower edge does not, "
        "some episodes still fail.",
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
    for edge, values in (("minimum", least), ("maximum", greatest)):
        add_curve(figure, at, values, name=edge, color=run.color, columns=pixels, dash="dot")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def _actions(selection: Selection, run: Run) -> list[Panel]:
    names = run.trial.rows.names()
    if any(name.startswith(f"{_ACTIONS}mean/") for name in names):
        return [_dimensions(selection, run, statistic) for statistic in ("mean", "std")]
    return [_shares(selection, run)]


def _dimensions(selection: Selection, run: Run, statistic: str) -> Panel:
    """Draws a line for each dimension of the actions of a Box."""
    word, help_ = {
        "mean": (
            "Mean",
            "The mean of the sampled actions, before they are mapped to the bounds, clipped or "
            "squashed.",
        ),
        "std": (
            "Standard deviation",
            "The standard deviation of the sampled actions. A fall to 0 means that exploration has "
            "ended and that actions do not depend on observations.",
        ),
    }[statistic]
    names = run.trial.rows.names()
    number = sum(name.startswith(f"{_ACTIONS}{statistic}/") for name in names)
    key, title = f"action-{statistic}", f"{word} of each action dimension"
    keys = {f"dimension {index}": f"{_ACTIONS}{statistic}/{index}" for index in range(number)}
    return part_lines(selection, run, Plot(key, title, help_, "action", {}), keys)


def _shares(selection: Selection, run: Run) -> Panel:
    """Draws a heat map with a row for each category of each categorical action."""
    panel = (
        "actions",
        "Shares of actions",
        "How often each action was sampled in the interval before each result. One row at 100 "
        "percent means that the policy always chooses the action of this row.",
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
    # A part is one categorical action of a MultiDiscrete action. The shares of a part sum to 1.
    totals = np.stack([counts[:, parts == part].sum(axis=1) for part in parts], axis=1)
    shares = shares_of_totals(counts, totals)
    labels = _row_names(places)
    if max(category for _, category in places) == MOST_CATEGORIES - 1:
        panel = (
            *panel[:2],
            f"{panel[2]} With more than {MOST_CATEGORIES} actions, row {MOST_CATEGORIES - 1} also "
            "counts all further actions.",
        )
    figure = new_figure(selection.x_title, "action")
    hover = "action %{y}: %{z:.1%}"
    add_heat_map(figure, at, labels, np.round(shares, 5), hover=hover)
    every = -(-len(labels) // _MOST_ROW_NAMES)
    figure.update_yaxes(type="category", dtick=every, autorange="reversed")
    add_fault_marks(figure, selection, [run])
    return Panel(*panel, figure=figure, run=run.label)


def _row_names(places: Sequence[tuple[int, int]]) -> list[str]:
    """Returns a name for each `(part, category)`. With a single categorical action, names omit the
    part."""
    if places[-1][0] == 0:
        return [str(category) for _, category in places]
    return [f"{part}: {category}" for part, category in places]
