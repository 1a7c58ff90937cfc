"""The report holds every figure, escapes what results contain, and refuses folders without runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import select
from dashboard_results import write_trial

from polopt.common.config import ConfigError
from polopt.dashboards import report
from polopt.dashboards.views.tabs import tabs_of

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def test_figures_hold_no_html_of_results(results: Path) -> None:
    for seed in range(2):
        params = {"env": HOSTILE, "lr": HOSTILE if seed else 0.1, "max_policy_lag": 3}
        write_trial(results, "async_gradients", seed, 5, deaths=(2,), params=params)
        write_trial(results, "decentralized_allreduce", seed, 5, params=params, num_workers=1)
    selection = select(results)
    texts = [
        json.dumps(panel.figure.to_dict(), default=str)
        for tab in tabs_of(selection.runs)
        for panel in tab.panels(selection)
        if panel.figure is not None
    ]
    assert any("&lt;img" in text for text in texts)
    assert not any("<img" in text or "<script" in text for text in texts)


def test_report_holds_everything_and_escapes(results: Path, tmp_path: Path) -> None:
    for seed in range(2):
        write_trial(results, "async_gradients", seed, 5, params={"env": HOSTILE, "lr": seed})
    folder = write_trial(results, "sync_samples", 0, 5, params={HOSTILE: HOSTILE})
    lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    lines[-1]["fault_tolerance"] |= {"last_death": HOSTILE, "num_remote_worker_restarts": 1}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "report.html"
    assert report.write_report(results, output) == []
    text = output.read_text()
    assert "<img" not in text.replace(_plotly(), "")
    assert "</script><script>alert" not in text
    assert "&lt;img src=x" in text
    assert text.count("<html") == 1
    for attribute in ('src="', 'href="http', "@import"):
        assert attribute not in text.replace(_plotly(), "")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_report_refuses_missing_empty_and_unwritable_directories(
    results: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        report.write_report(results, tmp_path / "report.html")
    results.mkdir()
    with pytest.raises(ConfigError, match="no trials"):
        report.write_report(results, tmp_path / "report.html")
    write_trial(results, "sync_samples", 0, 2)
    with pytest.raises(ConfigError, match=r"cannot write .*missing"):
        report.write_report(results, tmp_path / "missing" / "report.html")


def test_error_without_text_does_not_stop_the_report(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("plotly.io.write_images", fail)
    write_trial(results, "sync_samples", 1, 4)
    (note,) = report.write_report(results, tmp_path / "report.html", tmp_path / "figures")
    assert note.startswith("no PNG files: RuntimeError (")
