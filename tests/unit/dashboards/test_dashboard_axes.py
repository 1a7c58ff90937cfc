"""Ranges and axes of plots, and smoothed curves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_helpers import by_key, curves, of_optimizer, rows_of, select
from dashboard_results import write_examples, write_trial

from polopt.dashboards.data.scales import smoothed
from polopt.dashboards.data.selection import Selection
from polopt.dashboards.views import (
    compare_tab,
    experiments_tab,
    faults_tab,
    learner_tab,
)
from polopt.dashboards.views.tabs import tabs_of


def test_group_with_large_returns_leaves_the_range_of_the_others(results: Path) -> None:
    for optimizer, level in (("sync_samples", 480.0), ("async_gradients", 300.0)):
        write_trial(results, optimizer, 0, 20, level=level)
    write_trial(results, "decentralized_allreduce", 0, 20, level=480e4)
    selection = select(results)
    note = "1 of 3 runs leaves the range. A double click shows all values."
    for panels, key in ((compare_tab.panels, "return-steps"), (experiments_tab.panels, "returns")):
        panel = by_key(panels(selection))[key]
        assert panel.figure is not None
        assert 200.0 < panel.figure.layout.yaxis.range[1] < 600.0
        assert panel.note == note
        whole = by_key(panels(replace(selection, robust=False)))[key]
        assert whole.figure is not None
        assert (whole.figure.layout.yaxis.range, whole.note) == (None, "")
        # All points are drawn in both cases, because a double click shows all points.
        assert len(whole.figure.data) == len(panel.figure.data)
    # Numbers of steps and of faults are shown in full.
    assert by_key(experiments_tab.panels(selection))["steps"].note == ""


@pytest.mark.parametrize("seeds", [1, 5])
def test_extreme_group_leaves_the_range_of_final_scores(results: Path, seeds: int) -> None:
    for seed in range(seeds):
        for optimizer, level in (("sync_samples", 480.0), ("async_gradients", 300.0)):
            write_trial(results, optimizer, seed, 20, level=level)
        write_trial(results, "decentralized_allreduce", seed, 20, level=-480e4)
        write_trial(results, "async_samples", seed, 20, level=480e4)
    selection = select(results)
    panel = by_key(compare_tab.panels(selection))["final-score"]
    assert panel.figure is not None
    low, high = panel.figure.layout.xaxis.range
    shown = {mark.name.split(" (")[0]: mark.x[0] for mark in panel.figure.data}
    assert low < min(shown["SyncPPO"], shown["A3C"])
    assert max(shown["SyncPPO"], shown["A3C"]) < high < 600.0
    assert shown["IMPALA"] > 1e5
    assert panel.note == "1 of 4 groups leaves the range. A double click shows all values."
    whole = by_key(compare_tab.panels(replace(selection, robust=False)))["final-score"]
    assert whole.figure is not None
    assert (whole.figure.layout.xaxis.range, whole.note) == (None, "")


def test_plain_runs_have_no_range_and_no_note(results: Path) -> None:
    write_examples(results, seeds=2, iterations=12)
    selection = select(results)
    for tab in tabs_of(selection.runs):
        for panel in tab.panels(selection):
            assert panel.note == "", (tab.key, panel.key, panel.note)


def test_losses_have_a_logarithmic_axis_and_mixed_signs_do_not(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 6, deaths=(3,))
    lines = rows_of(folder)
    lines[2]["learners"]["default_policy"]["mean_kl_loss"] = 0.0
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    selection = select(results, log=True)
    panels = by_key(learner_tab.panels(selection))
    types = {key: panel.figure.layout.yaxis.type for key, panel in panels.items() if panel.figure}
    assert types["vf_loss"] == types["mean_kl_loss"] == types["values"] == "log"
    assert types["policy_loss"] is None
    assert "values are below 0" in panels["policy_loss"].note
    assert panels["mean_kl_loss"].note == "1 of 6 values are not above 0 and not drawn."
    assert len(curves(panels["mean_kl_loss"])["SyncPPO"].y) == 5
    assert panels["vf_loss"].note == ""
    returns = by_key(compare_tab.panels(selection))["return-steps"].figure
    assert returns is not None
    assert returns.layout.yaxis.type == "log"
    counts = by_key(faults_tab.panels(selection))["worker-restarts"]
    assert counts.figure is not None
    assert (counts.figure.layout.yaxis.type, counts.note) == (None, "")


def test_band_of_a_logarithmic_axis_is_above_zero(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 9, level=1.0)
        write_trial(results, "decentralized_allreduce", seed, 9)
        write_trial(results, "async_gradients", seed, 9, params={"env": "Other-v1"})
    # With two tasks, returns are normalised, and the lowest return is 0.
    panel = by_key(compare_tab.panels(select(results, log=True)))["return-steps"]
    for trace in curves(panel).values():
        assert np.all(np.asarray(trace.y) > 0.0), trace.name
    assert "values are not above 0 and not drawn" in panel.note


def test_smoothed_curve_has_the_measured_one_behind_it(results: Path) -> None:
    folder = write_trial(results, "async_gradients", 0, 9)
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 9)
    losses = np.array([row["learners"]["default_policy"]["vf_loss"] for row in rows_of(folder)])
    selection = select(results, smoothing=0.8)
    panel = by_key(learner_tab.panels(selection))["vf_loss"]
    assert panel.figure is not None
    drawn = [trace for trace in panel.figure.data if trace.legendgroup == "A3C"]
    faint, curve = drawn
    np.testing.assert_allclose(faint.y, losses)
    np.testing.assert_allclose(curve.y, smoothed(losses, 0.8))
    assert faint.line.color.endswith("0.4)")
    assert (faint.showlegend, curve.showlegend) == (False, True)
    assert panel.note == "Smoothed with weight 0.8. Faint lines show the measured values."


def test_means_over_runs_counts_and_shares_are_not_smoothed(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 9, deaths=(3,))
    plain, smooth = select(results), select(results, smoothing=0.8)

    def points(selection: Selection, panels: Any, key: str) -> list[tuple[str, list[float]]]:
        panel = by_key(panels(selection))[key]
        assert panel.figure is not None
        assert panel.note == ""
        return [(trace.name, list(trace.y)) for trace in panel.figure.data]

    for panels, key in (
        (compare_tab.panels, "return-steps"),
        (experiments_tab.panels, "steps"),
        (faults_tab.panels, "worker-restarts"),
        (lambda selection: list(of_optimizer(selection).values()), "driver-shares"),
    ):
        assert points(smooth, panels, key) == points(plain, panels, key)
    write_trial(results, "async_gradients", 0, 9)
    note = by_key(compare_tab.panels(select(results, smoothing=0.8)))["return-steps"].note
    assert note.startswith(
        "Curves of single runs, except evaluations, are smoothed with weight 0.8"
    )
