"""The tab Learner: losses, entropy, KL, gradient norm, values and rows per update."""

from __future__ import annotations

import numpy as np

from polopt.dashboards.data.colors import evaluation_dash
from polopt.dashboards.data.downsample import Array
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import Line, line_plot, run_lines, scale_of_runs
from polopt.dashboards.views.drawing import MOST_BANDS, Panel, not_in_results

_BLOCK = "learners/default_policy/"
_PREDICTED, _TARGET = _BLOCK + "vf_predicted_mean", _BLOCK + "vf_target_mean"
#: The largest number of plots of statistics that are not in `_PLOTS`.
_MOST_FURTHER = 20
_FURTHER_HELP = "A statistic that the policy of these runs computes."
_PLOTS = {
    "policy_loss": (
        "Policy loss",
        "If advantages are standardised, as in PPO, the policy loss is close to 0, and a growing "
        "magnitude is a warning sign. In SAC and TD3, it falls when the predicted returns rise.",
    ),
    "vf_loss": (
        "Value loss",
        "The value loss falls while the critic learns. It rises again when returns grow.",
    ),
    "total_loss": ("Total loss", "The weighted sum of the losses, which the learner minimises."),
    "entropy": (
        "Entropy",
        "The entropy of the action distribution. With discrete actions, a fall to 0 early in "
        "training means that exploration has ended. With continuous actions, the entropy may be "
        "negative.",
    ),
    "mean_kl_loss": (
        "KL divergence",
        "The divergence between the old policy and the updated policy. In PPO, the old policy is "
        "the policy that chose the actions.",
    ),
    "grad_norm": (
        "Gradient norm",
        "The norm of the gradient before clipping. Spikes are a sign of instability.",
    ),
    "default_optimizer_learning_rate": (
        "Learning rate",
        "The current learning rate, which follows the schedule.",
    ),
    "vf_explained_var": (
        "Explained variance",
        "The explained variance of the value function. 1 means that predictions are exact up to a "
        "constant error. 0 means that they are not better than a constant.",
    ),
    "clip_fraction": ("Clip fraction", "The share of rows whose probability ratio is clipped."),
}


def panels(selection: Selection) -> list[Panel]:
    """Returns the panels of the tab."""
    statistics = [
        run_lines((key, title, help_), selection, f"{_BLOCK}{key}", title.lower())
        for key, (title, help_) in _PLOTS.items()
    ]
    further = [
        run_lines(
            (f"learner-{key}", key.replace("_", " ").capitalize(), _FURTHER_HELP),
            selection,
            f"{_BLOCK}{key}",
            key,
        )
        for key in _further(selection)
    ]
    return [*statistics, _values(selection), _bias(selection), _rows(selection), *further]


def _further(selection: Selection) -> list[str]:
    """The keys of the statistics that only some policies compute, in alphabetical order."""
    names = {
        name
        for run in selection.runs
        for name in run.trial.rows.names()
        if name.startswith(_BLOCK) and np.isfinite(run.trial.last(name))
    }
    known = {_PREDICTED, _TARGET, *(f"{_BLOCK}{key}" for key in _PLOTS)}
    return [name.removeprefix(_BLOCK) for name in sorted(names - known)][:_MOST_FURTHER]


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
    panel = (
        "rows-per-update",
        "Rows per update",
        "The number of rows in the gradient of an update, summed over all learners or workers. 0 "
        "means that the interval had no update.",
    )
    return run_lines(panel, selection, "optimizer/rows_per_update", "rows", from_zero=True)
