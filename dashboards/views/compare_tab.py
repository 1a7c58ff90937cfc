"""The tab Compare, which compares groups of runs.

It shows returns, final scores, steps and seconds until a return is reached, throughput, and
configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from polopt.dashboards.data.colors import evaluation_dash
from polopt.dashboards.data.downsample import Array, Curve
from polopt.dashboards.data.rows import NOT_SET
from polopt.dashboards.data.scales import scale_of_intervals
from polopt.dashboards.data.selection import Run, Selection, differing_keys
from polopt.dashboards.data.statistics import (
    LEAST_RUNS_FOR_BAND,
    Estimate,
    estimate,
    probability_of_improvement,
)
from polopt.dashboards.data.trials import RETURN
from polopt.dashboards.views.charts import run_lines, scale_of_runs, smoothing_note
from polopt.dashboards.views.drawing import (
    Panel,
    add_band,
    add_curve,
    add_points,
    broken_names,
    escaped,
    new_figure,
    not_in_results,
    pixel_columns,
    set_rows,
    set_scale,
    transparent,
)
from polopt.dashboards.views.fault_marks import add_fault_marks
from polopt.dashboards.views.group_scores import (
    Point,
    Scored,
    band,
    default_budget,
    default_targets,
    ended_before,
    grouped,
    median_of,
    reached,
    scored_runs,
    scores_at,
)
from polopt.dashboards.views.time_shares import DRIVER
from polopt.metrics.number_text import number_text
from polopt.metrics.timers import STARTUP

_STEPS = "environment steps"
_MOST_PAIRED = 12  # maximum number of groups in the matrix of pairs
_TOO_FEW = "too few seeds"


def panels(selection: Selection) -> list[Panel]:
    """Returns the panels of the tab."""
    on_steps = scored_runs(selection, "steps")
    if not on_steps:
        return [not_in_results("return-steps", "Return", "", RETURN)]
    on_seconds = scored_runs(selection, "seconds")
    return [
        _returns(selection, "steps", on_steps),
        _returns(selection, "seconds", on_seconds),
        *_final_scores(selection, on_steps),
        *_time_to_target(selection, on_steps, on_seconds),
        run_lines(
            (
                "throughput-time",
                "Throughput over time",
                "Environment steps per second in each interval between results. Intervals with "
                "start-up are not shown.",
            ),
            selection,
            "optimizer/env_steps_per_s",
            "env steps/s",
            from_zero=True,
            transform=_after_startup,
        ),
        _throughput(selection),
        _config_table(selection),
    ]


def _after_startup(run: Run, rates: Array) -> Array:
    """Replaces the rates of intervals that contain start-up by NaN.

    The rate of such an interval would be wrong: some of its steps may have been sampled during
    start-up, which training time does not include.
    """
    startup = run.trial.values(f"{DRIVER}/{STARTUP}")
    return rates if startup is None else np.where(startup > 0.0, np.nan, rates)


def _throughput(selection: Selection) -> Panel:
    rates = {
        name: [(run, selection.rate_of(run)) for run in runs]
        for name, runs in selection.groups.items()
    }
    help_ = (
        "Environment steps per second over each whole run, with a point for each run. The bar is "
        f"the median. {selection.since}"
    )
    points = {
        name: [Point(run, rate) for run, rate in runs if np.isfinite(rate)]
        for name, runs in rates.items()
    }
    return _strips(("throughput", "Throughput", help_), points, "env steps/s")


def _strips(
    panel: tuple[str, str, str], groups: Mapping[str, Sequence[Point]], x_title: str
) -> Panel:
    """Draws a row for each group, with a point for each run and the median of the group.

    In a plot of steps or seconds until a return, runs that have not reached this return are open
    marks. For the median, such a run counts as larger than all runs that have reached the return.
    The median is not drawn if at least half of the runs have not reached the return.
    """
    figure = new_figure(x_title, "")
    for name, points in groups.items():
        for is_reached in (True, False):
            shown = [point for point in points if point.reached == is_reached]
            if not shown:
                continue
            color = shown[0].run.color
            texts = [escaped(point.run.label) for point in shown]
            add_points(
                figure, [point.value for point in shown], [escaped(name)] * len(shown),
                name=escaped(name) if is_reached else f"{escaped(name)}, not reached",
                marker={
                    "color": transparent(color, 0.55) if is_reached else color,
                    "size": 9,
                    "symbol": shown[0].run.look.symbol if is_reached else "triangle-right-open",
                },
                text=texts if is_reached else [f"{text}: not reached, ended at" for text in texts],
                hover="%{text}<br>%{x:,.7~r}",
            )  # fmt: skip
        median = median_of(points).value
        if np.isfinite(median):
            line = {"width": 3, "color": points[0].run.color}
            add_points(
                figure, [median], [escaped(name)], name=f"{escaped(name)}, median",
                marker={"size": 18, "symbol": "line-ns", "line": line},
                hover="median %{x:,.7~r}",
            )  # fmt: skip
    set_rows(figure, [escaped(name) for name in groups])
    figure.update_xaxes(rangemode="tozero")
    return Panel(*panel, figure=figure)


def _is_normalised(scored: Sequence[Scored]) -> bool:
    return len({one.run.task for one in scored}) > 1


def _returns(selection: Selection, axis: str, scored: Sequence[Scored]) -> Panel:
    normalised = _is_normalised(scored)
    on_axis = replace(selection, x=axis)
    early = sum(one.ended_early for one in scored)
    evaluated = any(len(one.evaluated[0]) for one in scored)
    panel = (
        f"return-{axis}",
        f"Return against {on_axis.x_title}",
        f"Interquartile mean over seeds, with its 95 percent bootstrap interval. Groups with fewer "
        f"than {LEAST_RUNS_FOR_BAND} seeds are drawn as single runs. Finished runs keep their last "
        "return."
        + (" Lines with markers are evaluations of single runs." if evaluated else "")
        + (f" Runs that ended early ({early}) are drawn as single lines." if early else "")
        + (
            " Returns are normalised: in each task, 0 is the lowest return of the selected runs and"
            " 1 is the highest return."
            if normalised
            else ""
        ),
    )
    if not scored:
        return not_in_results(*panel, RETURN)
    y_title = "normalised return" if normalised else "mean episode return"
    figure = new_figure(on_axis.x_title, y_title)
    values = [(one.run, np.concatenate([one.y, one.evaluated[1]])) for one in scored]
    scale = scale_of_runs(on_axis, values)
    set_scale(figure, scale)
    columns = pixel_columns(len(scored) * (2 if selection.smoothing > 0.0 else 1))
    num_single = 0
    for name, members in grouped(scored).items():
        shown = f"{name} (n={len(members)})"
        whole = [one for one in members if not one.ended_early]
        found = band(whole)
        single = members
        if found is not None:
            color = members[0].run.color
            there = found.low > 0.0 if scale.log else np.full(len(found.x), True)
            drawn = Curve(found.x[there], found.mean[there], found.low[there], found.high[there])
            add_band(figure, drawn, color=color, group=escaped(shown))
            add_curve(
                figure, found.x, found.mean, name=shown, color=color, columns=columns, width=2.4,
                dash=members[0].run.look.dash, log=scale.log,
            )  # fmt: skip
            single = [one for one in members if one.ended_early]
        num_single += len(single)
        for number, one in enumerate(single):
            add_curve(
                figure, one.x, one.y, name=_named(one), group=shown, color=one.run.color,
                columns=columns, legend=number == 0 and found is None,
                band=len(scored) <= LEAST_RUNS_FOR_BAND, width=1.0 if one.ended_early else 1.6,
                dash=one.run.look.dash, smoothing=selection.smoothing, log=scale.log,
            )  # fmt: skip
        for number, one in enumerate(one for one in members if len(one.evaluated[0])):
            add_curve(
                figure, *one.evaluated, name=f"{_named(one)}, evaluation",
                group=f"{name}, evaluation", color=one.run.color, columns=columns,
                legend=number == 0, band=False, points=True,
                dash=evaluation_dash(one.run.look.dash), log=scale.log,
            )  # fmt: skip
    add_fault_marks(figure, on_axis, [one.run for one in scored])
    which = "Curves of single runs, except evaluations, are smoothed"
    smoothing = smoothing_note(selection, which) if num_single else ""
    return Panel(*panel, figure=figure, note=f"{smoothing} {scale.note}".strip())


def _named(one: Scored) -> str:
    state = one.run.trial.state
    return f"{one.run.label}, {state}" if one.ended_early else one.run.label


def _final_scores(selection: Selection, scored: Sequence[Scored]) -> list[Panel]:
    chosen = selection.budget is not None
    budget = selection.budget if selection.budget is not None else default_budget(scored)
    scores = scores_at(scored, budget)
    at = f"after {budget:,.0f} environment steps"
    why_at = (
        "The side bar sets this number of steps."
        if chosen
        else "At least half of the runs of each group have reached this number of steps. The side "
        "bar of polopt dashboard can set another number."
    )
    left_out = ended_before(scored, budget)
    about = f"{why_at} Finished runs keep their last return.{_left_out(left_out)}"
    final = (
        "final-score",
        f"Interquartile mean of returns {at}",
        f"{about} Open symbols are groups without an interval, because an interval needs at least "
        f"{LEAST_RUNS_FOR_BAND} seeds.",
    )
    pairs = (
        "probability-of-improvement",
        f"Probability of improvement {at}",
        "The probability that a run of the row's group has a higher return than a run of the "
        f"column's group (Agarwal et al., 2021). {about}",
    )
    if not scores:
        why = f"No group has results {at}, or no task occurs in all groups"
        return [Panel(*final, missing=why), Panel(*pairs, missing=why)]
    members = grouped(scored)
    figure = new_figure("normalised return" if _is_normalised(scored) else "mean return", "")
    labels = []
    estimates = {name: estimate(tasks) for name, tasks in scores.items()}
    intervals = {name: (one.value, one.low, one.high) for name, one in estimates.items()}
    scale = scale_of_intervals(intervals, selection.robust)
    set_scale(figure, scale, horizontal=True)
    for name, runs in members.items():
        tasks = scores.get(name, [])
        there = sum(map(len, tasks))
        label = f"{escaped(name)} (n={there}{'' if there == len(runs) else f' of {len(runs)}'})"
        labels.append(label)
        if not tasks:
            continue
        found = estimates[name]
        has_interval = np.isfinite(found.low)
        add_points(
            figure, [found.value], [label], name=label,
            marker={
                "color": runs[0].run.color,
                "size": 11,
                "symbol": runs[0].run.look.symbol + ("" if has_interval else "-open"),
                "line": {"width": 2},
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [found.high - found.value if has_interval else 0.0],
                "arrayminus": [found.value - found.low if has_interval else 0.0],
                "thickness": 3,
                "width": 6,
            },
            hover=f"{label}<br>{_interval_text(found)}",
        )  # fmt: skip
    set_rows(figure, labels)
    return [Panel(*final, figure=figure, note=scale.note), _pairs(pairs, scores)]


def _left_out(runs: Sequence[Scored]) -> str:
    """Returns a sentence with the names of runs that have fewer steps than the number at which
    groups are compared, or "" without such runs."""
    if not runs:
        return ""
    names = ", ".join(f"{one.run.label} ({one.run.trial.state})" for one in runs[:3])
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f" Not included, because they have fewer steps: {names}{more}."


def _pairs(panel: tuple[str, str, str], scores: dict[str, list[Array]]) -> Panel:
    names = list(scores)[:_MOST_PAIRED]
    if len(names) < 2:
        return Panel(*panel, missing="This plot needs at least two groups of runs")
    is_part = len(names) < len(scores)
    note = f"Only the first {len(names)} of {len(scores)} groups are shown." if is_part else ""
    estimates = [
        [
            Estimate(float("nan")) if x == y else probability_of_improvement(scores[x], scores[y])
            for y in names
        ]
        for x in names
    ]
    labels = [escaped(name) for name in names]

    def seeds(name: str) -> int:
        return min(map(len, scores[name]))

    def is_known(x: str, y: str) -> bool:
        return x != y and min(seeds(x), seeds(y)) >= LEAST_RUNS_FOR_BAND

    def hover(x: str, y: str, found: Estimate) -> str:
        few = "" if is_known(x, y) else f", {_TOO_FEW}: n={seeds(x)} and n={seeds(y)}"
        return f"{_interval_text(found)}{few}"

    if not any(is_known(x, y) for x in names for y in names):
        why = f"{_TOO_FEW.capitalize()}: two groups need at least {LEAST_RUNS_FOR_BAND} seeds each"
        return Panel(*panel, missing=why, note=note)
    figure = new_figure("lower return", "higher return")
    # A line break keeps the text large, because Plotly shrinks all cells until the longest line
    # fits.
    in_cell = _TOO_FEW.replace(" ", "<br>")
    cells = [
        list(zip([x] * len(names), names, row, strict=True))
        for x, row in zip(names, estimates, strict=True)
    ]
    figure.add_trace(
        {
            "type": "heatmap",
            "x": labels,
            "y": labels,
            # A cell with too few seeds has a text but no color.
            "z": [
                [found.value if is_known(x, y) else None for x, y, found in row] for row in cells
            ],
            "text": [
                [
                    f"{found.value:.2f}" if is_known(x, y) else in_cell if x != y else ""
                    for x, y, found in row
                ]
                for row in cells
            ],
            "customdata": [[hover(x, y, found) for x, y, found in row] for row in cells],
            "texttemplate": "%{text}",
            "hovertemplate": "P(%{y} > %{x}) = %{customdata}<extra></extra>",
            "colorscale": [[0, "#D55E00"], [0.5, "#d3d9df"], [1, "#0072B2"]],
            "zmin": 0,
            "zmax": 1,
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
        }
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, **broken_names(labels))
    figure.update_xaxes(showgrid=False, **broken_names(labels))
    return Panel(*panel, figure=figure, note=note)


def _interval_text(found: Estimate) -> str:
    """Returns the value as text, followed by the interval if the estimate has an interval."""
    interval = (
        "" if np.isnan(found.low) else f" [{number_text(found.low)}, {number_text(found.high)}]"
    )
    return f"{number_text(found.value)}{interval}"


def _time_to_target(
    selection: Selection, on_steps: Sequence[Scored], on_seconds: Sequence[Scored]
) -> list[Panel]:
    targets = {**default_targets(on_steps), **selection.targets}
    targets = {task: target for task, target in targets.items() if task in selection.tasks}
    (_, first), *others = targets.items()
    goal = f"a return of {number_text(first)}" if not others else "the return of each task"
    thresholds = "; ".join(f"{task}: {number_text(target)}" for task, target in targets.items())
    help_ = (
        "Each point is the first result of a run with at least this return. An open triangle is "
        "the end of a run that has not reached the return. The bar is the median. For the median, "
        "runs that have not reached the return count as longer than all other runs."
        f"{f' {thresholds}.' if others else ''}"
    )
    found = {
        "steps": reached(on_steps, targets),
        "seconds": reached(on_seconds, targets),
    }
    titles = {"steps": _STEPS, "seconds": selection.seconds_title}
    plots = []
    for axis, groups in found.items():
        counted = {f"{name} ({_count(points)})": points for name, points in groups.items()}
        panel = (f"target-{axis}", f"{axis.capitalize()} until {goal}", help_)
        plots.append(_strips(panel, counted, titles[axis]))
    rows = [
        [
            name,
            targets[steps[0].run.task],
            _count(steps),
            *_reach_cells(steps),
            *_reach_cells(found["seconds"].get(name, [])),
        ]
        for name, steps in found["steps"].items()
    ]
    interval = f"95 percent interval (from {LEAST_RUNS_FOR_BAND} seeds)"
    return [
        *plots,
        Panel(
            "target-table",
            f"Runs that reach {goal}",
            "For medians and intervals, runs that have not reached the return count as longer than "
            f"all other runs. {selection.since}",
            columns=(
                "group", "return", "runs that reach it",
                "median steps", f"steps, {interval}",
                "median seconds", f"seconds, {interval}",
            ),
            rows=rows,
            wide=True,
        ),
    ]  # fmt: skip


def _count(points: Sequence[Point]) -> str:
    return f"{sum(one.reached for one in points)} of {len(points)}"


def _reach_cells(points: Sequence[Point]) -> tuple[str, str]:
    """Returns the table cells of a median and its interval."""
    median = median_of(points)

    def text(value: float) -> str:
        if np.isnan(value):
            return ""
        return number_text(value) if np.isfinite(value) else "not reached"

    if np.isnan(median.low):
        return text(median.value), _TOO_FEW
    return text(median.value), f"{text(median.low)} to {text(median.high)}"


def _config_table(selection: Selection) -> Panel:
    """Returns the table of the config keys that differ between the selected runs.

    Groups are columns. If there are more groups than keys, groups are rows.
    """
    panel = (
        "config-differences",
        "Config differences",
        "The config keys whose values differ between the selected runs.",
    )
    differing = differing_keys([run.trial for run in selection.runs])
    groups = selection.groups
    if not differing:
        return Panel(*panel, missing="All selected runs have the same config", wide=True)
    rows: list[list[str]] = []
    for key in differing:
        cells = []
        for runs in groups.values():
            texts = {run.trial.settings.get(key, NOT_SET) for run in runs}
            cells.append(", ".join(sorted(texts)))
        rows.append([key, *cells])
    if len(groups) > len(differing):
        turned = list(zip(*rows, strict=True))
        by_group = [[name, *cells] for name, cells in zip(groups, turned[1:], strict=True)]
        return Panel(*panel, columns=("group", *turned[0]), rows=by_group, wide=True)
    return Panel(*panel, columns=("key", *groups), rows=rows, wide=True)
