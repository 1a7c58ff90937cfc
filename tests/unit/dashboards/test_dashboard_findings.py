"""The findings of the diagnosis at the top of each tab."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_helpers import by_key, select
from dashboard_results import write_trial

from polopt.dashboards import report
from polopt.dashboards.data.diagnosis import Finding
from polopt.dashboards.data.trials import Trial
from polopt.dashboards.views.tabs import findings_panel, tabs_of


def test_findings_are_at_the_top_of_each_tab(results: Path, tmp_path: Path) -> None:
    for seed in range(3):
        faults = tuple(range(2, 3 + 2 * seed)) if seed else ()
        write_trial(results, "async_gradients", seed, 9, env_faults=faults)
    write_trial(results, "sync_samples", 0, 9)
    selection = select(results)
    focus = next(str(run.trial.folder) for run in selection.runs if run.seed == "2")
    for tab in tabs_of(selection.runs):
        first = tab.panels(replace(selection, focus=focus))[0]
        if tab.optimizer == "sync_samples":
            assert first.key != "findings"
            continue
        ((text, change, runs),) = first.findings
        assert text.startswith("5 environment faults: ValueError: reward")  # of the run in focus
        assert "fix the environment" in change
        assert runs == "A3C (2 of 3)"
    report.write_report(results, tmp_path / "report.html")
    assert "5 environment faults: ValueError: reward" in (tmp_path / "report.html").read_text()


def test_equal_findings_of_groups_are_one_entry_with_the_worst_first(results: Path) -> None:
    for number in range(20):
        params = {"lr": round(0.1 * number, 1)}
        faults = (2,) if number != 7 else (2, 3, 4)
        write_trial(results, "sync_samples", 0, 5, env_faults=faults, params=params)
    write_trial(results, "sync_samples", 1, 5, params={"lr": 0.7})
    panel = by_key(tabs_of(select(results).runs)[0].panels(select(results)))["findings"]
    assert panel.title == "What is wrong"
    ((text, _, groups),) = panel.findings
    assert text.startswith("3 environment faults")
    assert groups.startswith("SyncPPO, lr 0.7 (1 of 2); also SyncPPO, lr ")
    assert groups.endswith("; and 17 more")
    assert groups.count("SyncPPO") == 3


def test_changes_that_differ_are_different_entries(results: Path) -> None:
    """With `sync_samples`, the other workers wait for the slow worker. With `async_gradients`, they
    do not wait. The findings therefore propose different changes."""
    for optimizer in ("sync_samples", "async_gradients"):
        write_trial(results, optimizer, 0, 12, num_workers=4, slow=1.0)
    selection = select(results)
    findings = findings_panel(selection)[0].findings
    slow = [(change, groups) for text, change, groups in findings if "times slower" in text]
    assert len(slow) == 2
    assert {groups for _, groups in slow} == {"A3C", "SyncPPO"}


def test_list_of_findings_is_bounded(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trial(results, "sync_samples", 0, 3)
    found = [Finding("env-faults", f"text {i}", f"change {i}", float(i)) for i in range(20)]
    monkeypatch.setattr(Trial, "findings", found)
    (panel,) = findings_panel(select(results))
    assert panel.title == "What is wrong: the first 12 of 20"
    assert [text for text, _, _ in panel.findings] == [f"text {19 - i}" for i in range(12)]
