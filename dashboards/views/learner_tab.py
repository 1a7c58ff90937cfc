"""The tab Learner: losses, entropy, KL, gradient norm, values and rows per update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polopt.dashboards.data.colors import evaluation_dash
from polopt.dashboards.data.downsample import Array
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.tab import OptimizerTab, Plot
from polopt.dashboards.views.charts import Line, line_plot, part_lines, run_lines, scale_of_runs
from polopt.dashboards.views.drawing import MOST_BANDS, Panel, not_in_results
from polopt.metrics import learner
from polopt.metrics.number import Number, within

_BLOCK = "learners/default_policy"
_PREDICTED, _TARGET = f"{_BLOCK}/vf_predicted_mean", f"{_BLOCK}/vf_target_mean"
#: The largest number of plots of statistics that only some policies compute.
_MOST_FURTHER = 20


def panels(selection: Selection) -> list[Panel]:
    """Returns the panels of the tab. If the run in focus has policies with names, they show the
    policies of this run."""
    if of_policies := _policies(selection):
        return [*of_policies, _rows(selection)]
    common = within(_BLOCK, learner.NUMBERS)
    values = {_PREDICTED, _TARGET}
    return [
        *(_statistic(selection, each, "") for each in common if each.key not in values),
        _values(selection),
        _bias(selection),
        _rows(selection),
        *(_statistic(selection, each, "learner-") for each in _further(selection, common)),
    ]


def _policies(selection: Selection) -> list[Panel]:
    """Draws each statistic of the run in focus with a line for each policy. Empty for a run with
    one policy without a name."""
    run = selection.focused()
    found: dict[str, dict[str, str]] = {}
    for name in run.trial.rows.names() if run is not None else ():
        block, _, path = name.partition("/")
        policy, _, statistic = path.partition("/")
        if block == "learners" and policy not in ("default_policy", "__all_modules__"):
            found.setdefault(statistic, {})[policy] = name
    panels = []
    for statistic, keys in sorted(found.items())[:_MOST_FURTHER]:
        number = OptimizerTab("", "").number(f"{_BLOCK}/{statistic}")
        unit = number.unit or number.heading.lower()
        plot = Plot(f"policies-{statistic}", number.heading, number.sentence, unit, {})
        assert run is not None
        panels.append(part_lines(selection, run, plot, keys))
    return panels


def _statistic(selection: Selection, number: Number, prefix: str) -> Panel:
    key = prefix + number.key.removeprefix(f"{_BLOCK}/")
    panel = (key, number.heading, number.sentence)
    return run_lines(panel, selection, number.key, number.unit or number.heading.lower())


def _further(selection: Selection, common: Sequence[Number]) -> list[Number]:
    """The statistics that only some policies compute, in alphabetical order."""
    found = {
        name: run.trial.optimizer_tab.number(name)
        for run in selection.runs
        for name in run.trial.rows.names()
        if name.startswith(f"{_BLOCK}/") and np.isfinite(run.trial.last(name))
    }
    known = {number.key for number in common}
    return [found[name] for name in sorted(found.keys() - known)][:_MOST_FURTHER]


def _values(selection: Selection) -> Panel:
    """Draws the mean value and the mean value target of each run, in the color of its group."""
    panel = (
        "values",
        "Predicted value and value target",
        "Means over the rows that the learner used. Each run has two lines. The second line, "
        "dotted or dash-dotted, is the value target: an estimate of the discounted return, which "
        "the critic learns to predict. If the "
        "policy normalises rewards, values and targets are in normalised rewards. Values that stay "
        "above their targets mean that the critic is too optimistic.",
    )
    drawn = []
    for run in selection.runs:
        x = selection.x_of(run)
        columns = run.trial.rows.columns([_PREDICTED, _TARGET])
        if x is not None and len(columns) == 2:
            drawn.append((run, x, columns))
    if not drawn:
        return not_in_results(*panel, _PREDICTED, _TARGET)
    return line_plot(
        panel,
        selection,
        [run for run, _, _ in drawn],
        [
            Line(x, columns[name], label, label, run.color, dash)
            for run, x, columns in drawn
            for name, label, dash in (
                (_PREDICTED, f"{run.group}, predicted", run.look.dash),
                (_TARGET, f"{run.group}, target", evaluation_dash(run.look.dash)),
            )
        ],
        "value",
        scale_of_runs(
            selection, [(run, np.concatenate(list(columns.values()))) for run, _, columns in drawn]
        ),
        bands=len(drawn) <= MOST_BANDS // 2,
    )


def _bias(selection: Selection) -> Panel:
    def predicted_too_much(run: Run, predicted: Array) -> Array:
        target = run.trial.values(_TARGET)
        return np.full(len(predicted), np.nan) if target is None else predicted - target

    panel = (
        "value-bias",
        "Bias of the values",
        "The mean value minus the mean value target. Above 0, the predictions are too high.",
    )
    return run_lines(panel, selection, _PREDICTED, "value", transform=predicted_too_much)


def _rows(selection: Selection) -> Panel:
    number = OptimizerTab("", "").number("optimizer/rows_per_update")
    panel = ("rows-per-update", number.heading, number.sentence)
    return run_lines(panel, selection, number.key, number.unit, from_zero=True)
