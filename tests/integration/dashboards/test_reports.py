"""Tests of reports of many runs, and of the CSV files that `--figures` writes."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_helpers import select, write_sweep
from dashboard_results import write_examples

from polopt.dashboards import report
from polopt.dashboards.data.trials import RETURN


def test_length_of_a_report_is_bounded(results: Path, tmp_path: Path) -> None:
    plots = {}
    for trials in (6, 7, 12):
        write_sweep(results, trials)
        report.write_report(results, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text()
        plots[trials] = text.count("draw('p")
        assert ("groups with lower returns. polopt dashboard" in text) == (trials > 6)
        titles = set(re.findall(r'<h2 id="s\d+">SyncSamples: ([^<]*)', text))
        # Returns rise with the learning rate, which is 0.001, 0.002 and so on. The report has the
        # six groups with the highest returns.
        lowest = (trials - 6) * 0.001 + 0.0005
        kept = {run.group for run in select(results).runs if run.trial.config["lr"] > lowest}
        assert titles == kept
    assert plots[6] == plots[7] == plots[12] > 20


def test_report_writes_csv_of_each_plot(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(results, seeds=1, iterations=4)

    def without_browser(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome")

    monkeypatch.setattr("plotly.io.write_images", without_browser)
    figures = tmp_path / "figures"
    (note,) = report.write_report(results, tmp_path / "report.html", figures)
    assert "Kaleido requires Google Chrome" in note
    with (figures / "compare-return-steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["curve"] for row in rows} >= {"A3C (n=1)", "SyncPPO (n=1)"}
    trial = next(run.trial for run in select(results).runs if run.group == "A3C")
    returns = trial.values(RETURN)
    assert returns is not None
    found = [float(row["y"]) for row in rows if row["curve"] == "A3C (n=1)"]
    np.testing.assert_allclose(found, returns[1:])
    with (figures / "async-gradients-gradient-lag.csv").open() as file:
        assert {*csv.DictReader(file).fieldnames} == {"curve", "x", "y", "z"}  # type: ignore[misc]
