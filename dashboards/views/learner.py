"""The tab of the learner: losses, entropy, KL, gradient norm, learning rate."""

from __future__ import annotations

from polopt.dashboards.data.selection import Selection
from polopt.dashboards.views.charts import run_lines
from polopt.dashboards.views.drawing import Panel

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
    """A plot for each statistic of the learner."""
    return [
        run_lines(
            (key, title, help_),
            selection,
            f"learners/default_policy/{key}",
            title.lower(),
        )
        for key, (title, help_) in _PLOTS.items()
    ]
