"""The tab of DecentralizedAllReduce."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.dashboards.data.results import SECONDS, STEPS
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import named_lines, run_lines
from polopt.dashboards.views.drawing import Panel, escaped, new_figure, not_in_results
from polopt.dashboards.views.shares import (
    PARTS,
    PHASE_COLORS,
    WORKERS,
    driver_panels,
    increase_share,
    phase_times,
    share_areas,
    worker_bars,
)
from polopt.dashboards.views.workers import worker_panels

_MS = {part: f"optimizer/{part}_time_ms" for part in ("sample", "learn", "allreduce", "skew")}


def panels(selection: Selection) -> list[Panel]:
    """Shares of the phases, all-reduce and skew, ranks, broken rounds, efficiency."""
    run = selection.focused()
    if run is None:
        return []
    return [
        *_shares(selection, run),
        *_waits(selection, run),
        *_ranks(selection),
        efficiency(selection),
        phase_times("worker-times", selection, run, _MS, "optimizer/workers"),
        *worker_panels(selection, run, "env_steps_per_s"),
    ]


def _shares(selection: Selection, run: Run) -> list[Panel]:
    return [
        share_areas(
            (
                "worker-shares",
                "Workers' time",
                "All-reduce is the cost of agreeing on gradients; skew is the time that fast "
                "ranks wait for the slowest sampler.",
            ),
            selection,
            run,
            WORKERS,
            PARTS,
        ),
        *driver_panels(
            selection,
            run,
            ("group", "sample", "learn"),
            "Group: the driver forms the group and launches the round. Sample and learn: it waits "
            "for the ranks.",
        ),
        worker_bars(selection),
    ]


def _waits(selection: Selection, run: Run) -> list[Panel]:
    return [
        _pair(
            (
                "allreduce-learn",
                "All-reduce against learning",
                "Learning contains the all-reduce. Where both lines meet, communication "
                "dominates: use larger minibatches or fewer ranks.",
            ),
            selection,
            run,
            ("learn", "allreduce"),
        ),
        _pair(
            (
                "skew-sample",
                "Skew against sampling",
                "Skew near the sampling time means that one rank samples much longer than the "
                "others; see early-stopped fragments.",
            ),
            selection,
            run,
            ("sample", "skew"),
        ),
    ]


def _ranks(selection: Selection) -> list[Panel]:
    return [
        run_lines(
            (
                "ranks",
                "Ranks",
                "Members of the group. A star marks rounds that a fault broke and that were "
                "repeated.",
            ),
            selection,
            ["optimizer/num_ranks"],
            "ranks",
            shape="hv",
            from_zero=True,
        ),
        run_lines(
            (
                "early-stopped",
                "Share of early-stopped fragments",
                "Of all fragments since the last result. High values: ranks of unequal speed.",
            ),
            selection,
            ["optimizer/num_early_stopped", "optimizer/num_cut_short"],
            "share of fragments",
            transform=_early_share,
            from_zero=True,
        ),
    ]


def _pair(
    panel: tuple[str, str, str], selection: Selection, run: Run, parts: tuple[str, str]
) -> Panel:
    lines = {part: (_MS[part], PHASE_COLORS[part]) for part in parts}
    return named_lines(panel, selection, run, lines, "ms")


def _early_share(run: Run, stopped: np.ndarray[Any, Any]) -> Any:
    rounds, ranks = (run.trial.values(f"optimizer/num_{name}") for name in ("rounds", "ranks"))
    if rounds is None or ranks is None:
        return np.full(len(stopped), np.nan)
    share = increase_share(stopped, rounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ranks > 0, share / ranks, np.nan)


def efficiency(selection: Selection) -> Panel:
    """Steps per second of `n` ranks over `n` times those of one rank with the same config."""
    panel = (
        "efficiency",
        "Efficiency against one rank",
        "Steps/s with n ranks over n times the steps/s of one rank of the same preset and task. "
        "1: perfect scaling.",
    )
    rates = []
    for run in selection.runs:
        ranks, rate = run.trial.values("optimizer/num_ranks"), mean_rate(run)
        if ranks is not None and np.isfinite(ranks).any() and np.isfinite(rate):
            rates.append((run, int(np.nanmax(ranks)), rate))
    if not rates:
        return not_in_results(*panel, "optimizer/num_ranks")
    single: dict[tuple[str, str], list[float]] = {}
    for run, ranks_, rate in rates:
        if ranks_ == 1:
            single.setdefault((run.trial.trainable, run.task), []).append(rate)
    figure = new_figure("ranks", "efficiency")
    for run, ranks_, rate in rates:
        base = single.get((run.trial.trainable, run.task))
        if base is None:
            continue
        figure.add_scatter(
            x=[ranks_],
            y=[rate / (ranks_ * float(np.median(base)))],
            mode="markers",
            marker={"color": run.color, "size": 9},
            name=escaped(run.group),
            showlegend=False,
            text=[escaped(run.label)],
            hovertemplate="%{text}<br>%{y:.2f}<extra></extra>",
        )
    if not figure.data:
        return Panel(
            *panel, missing="No run with one rank is selected: train one with num_workers=1"
        )
    figure.add_hline(y=1.0, line={"dash": "dash", "color": "#888888"})
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(dtick=1)
    return Panel(*panel, figure=figure)


def mean_rate(run: Run) -> float:
    """Environment steps per second of training time over the whole run; NaN without results."""
    steps, seconds = run.trial.last(STEPS), run.trial.last(SECONDS)
    return steps / seconds if seconds > 0 else float("nan")
