"""The tab Decisions of the dashboard, which is also a section of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from polopt.common.config import ConfigError
from polopt.comparison.comparison_plan import SECONDS, STEPS
from polopt.comparison.comparison_report import UNITS, make_report, pair_rows, variant_rows
from polopt.comparison.records import PLAN_FILE, ComparisonFiles, rules_of
from polopt.dashboards.data.colors import looks_of
from polopt.dashboards.data.downsample import Curve
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.statistics import LEAST_RUNS_FOR_BAND, bootstrap_band, resampled
from polopt.dashboards.views.drawing import (
    Panel,
    add_band,
    add_curve,
    add_points,
    escaped,
    new_figure,
    pixel_columns,
)
from polopt.dashboards.views.tabs import Tab

_POINTS = 100  # of a curve of several seeds


def tabs_of(runs: Sequence[Run]) -> list[Tab]:
    """Returns a tab for each comparison to which runs belong."""
    folders = dict.fromkeys(run.trial.folder.parent for run in runs)
    found = [folder for folder in folders if (folder / PLAN_FILE).is_file()]
    return [
        Tab(
            "decisions" if len(found) == 1 else f"decisions-{folder.name}",
            "Decisions" if len(found) == 1 else f"Decisions: {folder.name}",
            partial(panels, folder),
        )
        for folder in found
    ]


def panels(folder: Path, selection: Selection) -> list[Panel]:
    """Returns the panels of the comparison in a directory. They show all its seeds."""
    try:
        files = ComparisonFiles(folder)
        report = make_report(files)
    except (ConfigError, LookupError, TypeError, ValueError) as error:
        return [Panel("decisions", "Decisions", missing=f"cannot be read: {error}", wide=True)]
    head, *rows = pair_rows(report)
    variant_head, *variants = variant_rows(report)
    plan = report["plan"]
    return [
        Panel(
            "decisions",
            "Decisions",
            f"Plan {report['plan_hash']}: {plan['test']}. Level {plan['level']:g}, looks at "
            f"{', '.join(map(str, plan['looks']))} seeds.",
            columns=head,
            rows=rows,
            note=" ".join(report["warnings"]),
            wide=True,
        ),
        Panel(
            "variants",
            "Variants",
            "The score of a variant is the interquartile mean over its seeds, with the 95 percent "
            "bootstrap interval, which is not adjusted for the looks.",
            columns=variant_head,
            rows=variants,
            wide=True,
        ),
        _looks(report),
        _scores(files, plan),
        *(_curves(files, plan, key) for key in (STEPS, SECONDS)),
        Panel(
            "paragraph",
            "For a paper",
            note=report["paragraph"],
            wide=True,
        ),
    ]


def _looks(report: Mapping[str, Any]) -> Panel:
    rules = rules_of(report["plan"])
    figure = new_figure("seeds of each variant", "p-value")
    looks = list(rules.looks)
    names = [f"{pair['first']} and {pair['second']}" for pair in report["pairs"]]
    colors = looks_of(names)
    for name, pair in zip(names, report["pairs"], strict=True):
        if pair["p_values"]:
            x = np.array(looks[: len(pair["p_values"])], float)
            add_curve(
                figure, x, np.array(pair["p_values"]), name=f"{name}: {pair['text']}",
                color=colors[name].color, columns=pixel_columns(len(names)), points=True,
                dash=colors[name].dash,
            )  # fmt: skip
    add_points(
        figure, [looks[0], looks[-1]], [rules.level_of_look] * 2, name="decides",
        marker={"size": 1}, mode="lines", line={"dash": "dot", "color": "gray"}, showlegend=True,
        hover="%{y:.2g} decides, or less with several pairs",
    )  # fmt: skip
    lowest = min([rules.level_of_look, *(p for one in report["pairs"] for p in one["p_values"])])
    figure.update_yaxes(type="log", range=[math.log10(lowest / 2), math.log10(1.2)], dtick=1)
    help_ = (
        "The p-value of each pair at each look. At or below the dotted line, a pair of two "
        "variants is decided. With more variants, the first differences need smaller p-values."
    )
    return Panel("looks", "Looks", help_, figure=figure)


def _scores(files: ComparisonFiles, plan: Mapping[str, Any]) -> Panel:
    figure = new_figure(plan["metric"], "")
    colors = looks_of(list(plan["variants"]))
    for name in plan["variants"]:
        found = [one for one in files.of(name) if one.score is not None]
        add_points(
            figure, [one.score for one in found], [escaped(name)] * len(found), name=escaped(name),
            marker={"color": colors[name].color, "size": 9, "opacity": 0.55},
            text=[f"seed {one.seed}{', added by hand' * one.added}" for one in found],
            hover="%{text}<br>%{x:,.7~r}",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed")  # the order of the table
    return Panel("scores", "Scores", "A point for each seed that has a score.", figure=figure)


def _curves(files: ComparisonFiles, plan: Mapping[str, Any], key: str) -> Panel:
    axis: Literal[0, 1] = 1 if key == SECONDS else 0
    figure = new_figure(UNITS[key], plan["metric"])
    colors = looks_of(list(plan["variants"]))
    for name in plan["variants"]:
        curves = [
            np.array([(p[axis], np.nan if p[2] is None else p[2]) for p in one.curve])
            for one in files.of(name)
            if one.curve and one.curve[-1][axis] > 0.0
        ]
        if curves:
            _add(figure, name, curves, colors[name].color, colors[name].dash)
    help_ = (
        "Interquartile mean over seeds, with its 95 percent bootstrap interval. Curves end where "
        f"half of the seeds have ended. Variants with fewer than {LEAST_RUNS_FOR_BAND} seeds are "
        "drawn as single runs."
    )
    panel = ("curves-seconds" if axis else "curves-steps", f"Curves against {UNITS[key]}", help_)
    if not figure.data:
        return Panel(*panel, missing="The seeds have no curves")
    return Panel(*panel, figure=figure)


def _add(figure: go.Figure, name: str, curves: Sequence[Any], color: str, dash: str) -> None:
    columns = pixel_columns(len(curves))
    if len(curves) < LEAST_RUNS_FOR_BAND:
        for number, curve in enumerate(curves):
            add_curve(
                figure, curve[:, 0], curve[:, 1], name=name, color=color, columns=columns,
                legend=number == 0, band=False, dash=dash,
            )  # fmt: skip
        return
    end = float(np.median([curve[-1, 0] for curve in curves]))
    grid = np.linspace(0.0, end, _POINTS)
    drawn = np.array([resampled(c[:, 0], c[:, 1], grid, hold=True) for c in curves])
    known = np.isfinite(drawn).all(axis=0)
    if known.any():
        mean, low, high = bootstrap_band([drawn[:, known]])
        shown = f"{name} (n={len(curves)})"
        add_band(figure, Curve(grid[known], mean, low, high), color=color, group=escaped(shown))
        add_curve(figure, grid[known], mean, name=shown, color=color, columns=columns, dash=dash)
