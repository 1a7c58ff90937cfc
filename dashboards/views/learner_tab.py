"""The tab of the learner: losses, entropy, KL, gradient norm, learning rate, values, rows."""

from __future__ import annotations

import numpy as np

from polopt.dashboards.data.colors import evaluation_dash
from polopt.dashboards.data.downsample import Array
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import Line, line_plot, run_lines, scale_of_runs
from polopt.dashboards.views.drawing import MOST_BANDS, Panel, not_in_results

_BLOCK = "learners/default_policy/"
_PREDICTED, _TARGET = _BLOCK + "vf_predicted_mean", _BLOCK + "vf_target_mean"
_PLOTS = {
    "policy_loss": ("Policy loss", "Near 0 by construction; a growing magnitude is a warning."),
    "vf_loss": ("Value loss", "Falls while the critic learns; returns that grow raise it again."),
    "total_loss": ("Total loss", "The weighted sum that is minimised."),
    "entropy": (
        "Entropy",
        "Of the action distribution. A fall to 0 early in training: exploration has ended.",
    ),
    "mean_kl_loss": ("KL divergence", "Between the policy that acted and the updated one."),
    "grad_norm": ("Gradient norm", "Before clipping. Spikes go with instability."),
    "default_optimizer_learning_rate": ("Learning rate", "As scheduled."),
    "vf_explained_var": ("Explained variance", "Of the value function: 1 is exact."),
    "clip_fraction": ("Clip fraction", "Share of rows whose ratio PPO clips."),
}


def panels(selection: Selection) -> list[Panel]:
    """A plot for each statistic of the learner, values against value targets, rows per update."""
    statistics = [
        run_lines((key, title, help_), selection, f"{_BLOCK}{key}", title.lower())
        for key, (title, help_) in _PLOTS.items()
    ]
    return [*statistics, _values(selection), _bias(selection), _rows(selection)]


def _values(selection: Selection) -> Panel:
    """The mean value and the mean value target of each run, in the color of its group."""
    panel = (
        "values",
        "Value predicted and return obtained",
        "Means over the rows that were learned from. Dotted, or with another dash: the value "
        "target, which is the discounted return with the value of what follows (of normalised "
        "rewards where the policy normalises them). Values above their targets for long: the "
        "critic is too optimistic.",
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
        "Mean value minus mean value target: above 0 the value function predicts too much.",
    )
    return run_lines(panel, selection, _PREDICTED, "value", transform=predicted_too_much)


def _rows(selection: Selection) -> Panel:
    panel = (
        "rows-per-update",
        "Rows per update",
        "Rows that the gradient of an update is the mean over, of all learners or workers "
        "together. 0: the result has no update.",
    )
    return run_lines(panel, selection, "optimizer/rows_per_update", "rows", from_zero=True)
