"""The tab of AsyncGradients and SyncGradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import heat_map, named_lines, run_lines
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.shares import (
    driver_panels,
    driver_times,
    increase_share,
    per_second,
    worker_bars,
)
from polopt.dashboards.views.workers import worker_panels

PHASES = ("wait", "apply", "dispatch")


def panels(selection: Selection) -> list[Panel]:
    """Shares of wait, apply and dispatch, gradient lag, stale gradients, workers' rates."""
    run = selection.focused()
    if run is None:
        return []
    busy = (
        "1 - wait is how busy the driver is. Near 100 percent busy, more workers do not help: "
        "gradients queue and get stale."
    )
    return [
        *driver_panels(selection, run, PHASES, busy),
        _lag_map(selection, run),
        _gradient_counts(selection, run),
        *_rates(selection),
        worker_bars(selection),
        driver_times(selection, run, PHASES),
        *worker_panels(selection, run),
    ]


def _rates(selection: Selection) -> list[Panel]:
    return [
        run_lines(
            (
                "gradient-rate",
                "Gradients applied per second",
                "Of the driver, from all workers.",
            ),
            selection,
            ["optimizer/num_gradients_accepted", "optimizer/num_gradients"],
            "gradients/s",
            transform=per_second,
            from_zero=True,
        ),
        run_lines(
            (
                "stale-share",
                "Share of stale gradients",
                "Of the gradients that arrived: older than max_policy_lag, dropped or scaled down.",
            ),
            selection,
            ["optimizer/num_gradients_stale", "optimizer/num_stale_gradients"],
            "share",
            transform=_stale_share,
            from_zero=True,
        ),
    ]


def _lag_map(selection: Selection, run: Run) -> Panel:
    limit = run.trial.config.get("max_policy_lag")
    has_limit = isinstance(limit, int | float) and not isinstance(limit, bool)
    return heat_map(
        (
            "gradient-lag",
            "Gradient lag",
            "Updates between the weights that a gradient was computed with and its use. The last "
            "bin holds all larger lags.",
        ),
        selection,
        run,
        "optimizer/gradient_lag/histogram/",
        y_title="lag (updates)",
        limit=float(limit) if has_limit and limit is not None else None,
        limit_name=f"max_policy_lag {limit}",
    )


def _gradient_counts(selection: Selection, run: Run) -> Panel:
    new = "optimizer/num_gradients_accepted" in run.trial.rows.names()
    lines = (
        {
            "accepted": ("optimizer/num_gradients_accepted", "#19a979"),
            "stale": ("optimizer/num_gradients_stale", "#e4508f"),
            "skipped": ("optimizer/num_gradients_skipped", "#d9a514"),
        }
        if new
        else {
            "received": ("optimizer/num_gradients", "#19a979"),
            "stale": ("optimizer/num_stale_gradients", "#e4508f"),
        }
    )
    return named_lines(
        (
            "gradient-counts",
            "Accepted, stale and skipped gradients",
            "Since the start of the run. Skipped: the gradient was not finite.",
        ),
        selection,
        run,
        lines,
        "gradients",
    )


def _stale_share(run: Run, stale: np.ndarray[Any, Any]) -> Any:
    # Stale gradients that are scaled are accepted as well: the share is of those that arrived.
    arrived = run.trial.values("optimizer/num_gradients")
    if arrived is None:
        accepted = run.trial.values("optimizer/num_gradients_accepted")
        arrived = None if accepted is None else accepted + stale
    return increase_share(stale, arrived) if arrived is not None else np.full(len(stale), np.nan)
