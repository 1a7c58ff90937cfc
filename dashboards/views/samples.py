"""The tab of SyncSamples and AsyncSamples."""

from __future__ import annotations

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import heat_map, named_lines, run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.shares import driver_panels, driver_times, worker_bars
from polopt.dashboards.views.workers import worker_panels

PHASES = ("broadcast", "sample", "learn")
_LEARNER = "learners/default_policy"


def panels(selection: Selection) -> list[Panel]:
    """Shares of broadcast, sample and learn, rates against peaks, lag, PPO's diagnostics."""
    run = selection.focused()
    if run is None:
        return []
    idle = (
        "With synchronous sampling workers are idle while the driver learns, and the driver while "
        "workers sample: the larger share is what to speed up."
    )
    return [
        *driver_panels(selection, run, PHASES, idle),
        _rates(selection, run),
        run_lines(
            (
                "early-stopped",
                "Early-stopped fragments",
                "Fragments of slow workers that were ended before their full length, in all.",
            ),
            selection,
            ["optimizer/num_early_stopped", "optimizer/num_cut_short"],
            "fragments",
        ),
        heat_map(
            (
                "policy-lag-rollouts",
                "Policy lag in rollouts",
                "How many rollouts were learned from since the weights that acted. 0 for "
                "synchronous sampling.",
            ),
            selection,
            run,
            "optimizer/policy_lag_rollouts/histogram/",
            y_title="lag (rollouts)",
        ),
        *_ppo(selection),
        worker_bars(selection),
        driver_times(selection, run, PHASES),
        *worker_panels(selection, run, "env_steps_per_s"),
    ]


def _rates(selection: Selection, run: Run) -> Panel:
    return named_lines(
        (
            "rates",
            "Realised rate against peaks",
            "Peaks are the best rates of sampling and learning alone. A realised rate near the "
            "lower peak means that this side limits the run.",
        ),
        selection,
        run,
        {
            "realised": ("optimizer/env_steps_per_s", "#2f7ed8"),
            "sampling, peak": ("optimizer/sample_peak_throughput", "#19a979"),
            "learning, peak": ("optimizer/learn_peak_throughput", "#e8743b"),
        },
        "env steps/s",
    )


def _ppo(selection: Selection) -> list[Panel]:
    return [
        run_lines(
            (
                "kl",
                "KL divergence",
                "Between the policy that acted and the updated one. Rising KL: lower the learning "
                "rate or the number of epochs.",
            ),
            selection,
            [f"{_LEARNER}/mean_kl_loss"],
            "KL",
        ),
        run_lines(
            (
                "clip-fraction",
                "Clip fraction",
                "Share of rows whose probability ratio is clipped (PPO). Above about 0.3 the "
                "update is too large, near 0 the clip has no effect.",
            ),
            selection,
            [f"{_LEARNER}/clip_fraction"],
            "share of rows",
        ),
        run_lines(
            (
                "explained-variance",
                "Explained variance of the value function",
                "1: the critic predicts returns exactly; 0 or less: no better than a constant.",
            ),
            selection,
            [f"{_LEARNER}/vf_explained_var"],
            "explained variance",
        ),
    ]
