"""The comparison of groups: returns, final scores, time to a return, throughput, configs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polopt.dashboards.data.selection import NOT_SET, Selection, differing_keys, flat_config
from polopt.dashboards.data.statistics import (
    LEAST_RUNS_FOR_BAND,
    Estimate,
    estimate,
    probability_of_improvement,
)
from polopt.dashboards.views.allreduce import mean_rate
from polopt.dashboards.views.charts import run_lines, strips
from polopt.dashboards.views.curves import (
    Array,
    Scored,
    band,
    budget_of,
    default_target,
    grouped,
    has_band,
    reached,
    scored_runs,
    scores_at,
)
from polopt.dashboards.views.drawing import (
    Panel,
    add_band,
    add_curve,
    escaped,
    new_figure,
    not_in_results,
    pixel_columns,
)
from polopt.dashboards.views.faults import add_fault_marks

_RETURN_KEY = "env_runners/episode_return_mean"
_UNITS = {"steps": "environment steps", "seconds": "training time (s)"}
_MOST_PAIRED = 12  # groups in the matrix of pairs


def panels(selection: Selection) -> list[Panel]:
    """Everything that compares groups of runs."""
    on_steps = scored_runs(selection, "steps")
    if not on_steps:
        return [not_in_results("return-steps", "Return", "", _RETURN_KEY)]
    on_seconds = scored_runs(selection, "seconds")
    return [
        _returns(selection, "steps", on_steps),
        _returns(selection, "seconds", on_seconds),
        *_final_scores(on_steps),
        *_time_to_target(selection, on_steps, on_seconds),
        run_lines(
            (
                "throughput-time",
                "Throughput over time",
                "Environment steps per second between results.",
            ),
            selection,
            ["optimizer/env_steps_per_s", "num_env_steps_sampled_per_second"],
            "env steps/s",
            from_zero=True,
        ),
        strips(
            (
                "throughput",
                "Throughput",
                "Environment steps over training time of each run; the bar is the median.",
            ),
            {
                name: [(run, mean_rate(run)) for run in runs]
                for name, runs in selection.groups.items()
            },
            "env steps/s",
        ),
        config_table(selection),
    ]


def _is_normalised(scored: Sequence[Scored]) -> bool:
    return len({one.run.task for one in scored}) > 1


def _returns(selection: Selection, axis: str, scored: Sequence[Scored]) -> Panel:
    normalised = _is_normalised(scored)
    panel = (
        f"return-{axis}",
        f"Return against {'environment steps' if axis == 'steps' else 'training time'}",
        f"Interquartile mean over seeds with its 95 percent bootstrap interval; single runs below "
        f"{LEAST_RUNS_FOR_BAND} seeds. Finished runs keep their last return."
        + (" Normalised per task to the lowest and highest return." if normalised else ""),
    )
    if not scored:
        return not_in_results(*panel, _RETURN_KEY)
    on_axis = Selection(selection.runs, axis)
    y_title = "normalised return" if normalised else "mean episode return"
    figure = new_figure(_UNITS[axis], y_title)
    columns = pixel_columns(len(scored))
    for name, members in grouped(scored).items():
        shown = f"{name} (n={len(members)})"
        found = band(members) if has_band(members) else None
        if found is not None:
            color = members[0].run.color
            add_band(figure, found.x, found.low, found.high, color=color, group=escaped(shown))
            add_curve(
                figure, found.x, found.mean, name=shown, color=color, columns=columns, width=2.4
            )
            continue
        for number, one in enumerate(members):
            add_curve(
                figure, one.x, one.y, name=one.run.label, group=shown, color=one.run.color,
                columns=columns, legend=number == 0, band=len(scored) <= LEAST_RUNS_FOR_BAND,
            )  # fmt: skip
    add_fault_marks(figure, on_axis, [one.run for one in scored])
    return Panel(*panel, figure=figure)


def _final_scores(scored: Sequence[Scored]) -> list[Panel]:
    budget = budget_of(scored)
    scores = scores_at(scored, budget)
    at = f"after {budget:,.0f} environment steps"
    interval = f"Intervals need {LEAST_RUNS_FOR_BAND} seeds."
    final = (
        "final-score",
        f"Interquartile mean of returns {at}",
        f"At the steps that all groups have reached. {interval}",
    )
    pairs = (
        "probability-of-improvement",
        f"Probability of improvement {at}",
        "How likely a run of the row's group has a higher return than one of the column's "
        f"(Agarwal et al., 2021). {interval}",
    )
    if not scores:
        why = "No run of every group has results there, or the groups share no task"
        return [Panel(*final, missing=why), Panel(*pairs, missing=why)]
    colors = {one.run.group: one.run.color for one in scored}
    figure = new_figure("normalised return" if _is_normalised(scored) else "mean return", "")
    for name, tasks in scores.items():
        found = estimate(tasks)
        has_interval = np.isfinite(found.low)
        num_runs = sum(map(len, tasks))
        label = f"{escaped(name)} (n={num_runs})"
        figure.add_scatter(
            x=[found.value],
            y=[label],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [found.high - found.value if has_interval else 0.0],
                "arrayminus": [found.value - found.low if has_interval else 0.0],
                "thickness": 3,
                "width": 6,
            },
            mode="markers",
            marker={"color": colors[name], "size": 11},
            name=label,
            showlegend=False,
            hovertemplate=f"{label}<br>{_interval(found)}<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed")
    return [Panel(*final, figure=figure), _pairs(pairs, scores)]


def _pairs(panel: tuple[str, str, str], scores: dict[str, list[Array]]) -> Panel:
    names = list(scores)[:_MOST_PAIRED]
    if len(names) < 2:
        return Panel(*panel, missing="Needs two groups of runs")
    estimates = [
        [
            Estimate(float("nan")) if x == y else probability_of_improvement(scores[x], scores[y])
            for y in names
        ]
        for x in names
    ]
    labels = [escaped(name) for name in names]
    figure = new_figure("lower return", "higher return")
    figure.add_heatmap(
        x=labels,
        y=labels,
        z=[[found.value for found in row] for row in estimates],
        text=[[f"{found.value:.2f}" if x != y else "" for y, found in enumerate(row)]
              for x, row in enumerate(estimates)],
        customdata=[[_interval(found) for found in row] for row in estimates],
        texttemplate="%{text}",
        hovertemplate="P(%{y} > %{x}) = %{customdata}<extra></extra>",
        colorscale=[[0, "#e8743b"], [0.5, "#d3d9df"], [1, "#2f7ed8"]],
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=2,
        ygap=2,
        hoverongaps=False,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False)
    return Panel(*panel, figure=figure)


def _interval(found: Estimate) -> str:
    if not np.isfinite(found.low):
        return f"{found.value:,.4g}"
    return f"{found.value:,.4g} [{found.low:,.4g}, {found.high:,.4g}]"


def _time_to_target(
    selection: Selection, on_steps: Sequence[Scored], on_seconds: Sequence[Scored]
) -> list[Panel]:
    target = selection.target if selection.target is not None else default_target(on_steps)
    found = {"steps": reached(on_steps, target), "seconds": reached(on_seconds, target)}
    help_ = "First result at or above it, one point for each run; the bar is the median."
    rows = []
    for name, steps in found["steps"].items():
        seconds = np.array([value for _, value in found["seconds"].get(name, [])])
        counts = np.array([value for _, value in steps])
        got = np.isfinite(counts)
        rows.append(
            [
                name,
                f"{int(got.sum())} of {len(counts)}",
                f"{np.median(counts[got]):,.0f}" if got.any() else "not reached",
                f"{np.nanmedian(seconds):,.1f}" if np.isfinite(seconds).any() else "not reached",
            ]
        )
    return [
        *(
            strips(
                (f"target-{axis}", f"{title} until a return of {target:,.4g}", help_),
                found[axis],
                _UNITS[axis],
            )
            for axis, title in (("steps", "Steps"), ("seconds", "Seconds"))
        ),
        Panel(
            "target-table",
            f"Runs that reach a return of {target:,.4g}",
            "Medians are over the runs that reach it.",
            columns=("group", "runs that reach it", "median steps", "median seconds"),
            rows=rows,
            wide=True,
        ),
    ]


def config_table(selection: Selection) -> Panel:
    """Config keys that differ between the selected runs, one column for each group."""
    panel = ("config-differences", "Config differences", "Keys that differ between these runs.")
    differing = differing_keys([run.trial for run in selection.runs])
    groups = selection.groups
    if not differing:
        return Panel(*panel, missing="All selected runs have the same config", wide=True)
    rows = []
    for key in differing:
        cells = []
        for runs in groups.values():
            texts = {flat_config(run.trial.config).get(key, NOT_SET) for run in runs}
            cells.append(", ".join(sorted(texts)))
        rows.append([key, *cells])
    return Panel(*panel, columns=("key", *groups), rows=rows, wide=True)
