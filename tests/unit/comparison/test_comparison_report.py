"""The report of a comparison, its paragraph, and its tab on the dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comparison_helpers import FakeTune, small

from polopt.comparison.compare_function import write_report
from polopt.comparison.comparison_report import lines, make_report
from polopt.comparison.decisions_tab import panels, tabs_of
from polopt.comparison.records import DECISIONS_FILE, SEEDS_FILE, ComparisonFiles, record_of

Selection = pytest.importorskip("polopt.dashboards.data.selection").Selection
tabs = pytest.importorskip("polopt.dashboards.views.tabs")


def score(variant: str, seed: int) -> float | None:
    """Returns scores that differ by 10. One seed crashes."""
    if (variant, seed) == ("lr=0.001", 4):
        return None
    return seed + (10.0 if variant == "lr=0.01" else 0.0)


@pytest.fixture
def ended(tmp_path: Path) -> ComparisonFiles:
    """A comparison that its first look has decided."""
    plan, files = small(tmp_path, max_seeds=10, equal_within=0.5)
    FakeTune(plan, files, score).run()
    return files


def test_report_has_answer_seeds_and_cost(ended: ComparisonFiles) -> None:
    report = write_report(ended)
    assert json.loads((ended.folder / DECISIONS_FILE).read_text()) == json.loads(json.dumps(report))
    (pair,) = report["pairs"]
    assert (pair["text"], pair["seeds"]) == ("lr=0.01 better", 5)
    assert pair["improvement"]["value"] == 0.0, "no seed of the first variant is better"
    assert (report["seeds_used"], report["seeds_saved"]) == (10, 10)
    variant = report["variants"]["lr=0.001"]
    assert variant["failed"] == [{"seed": 4, "error": "ValueError: crashed"}]
    assert variant["steps"] == 400, "the seed that crashed made no step"
    text = "\n".join(lines(report))
    assert "lr=0.001 and lr=0.01  lr=0.01 better" in text
    assert "warning" not in text


def test_paragraph_names_method_results_and_sources(ended: ComparisonFiles) -> None:
    text = make_report(ended)["paragraph"]
    for part in (
        "after 100 environment steps",
        "after 5, 10 seeds",
        "family-wise level of 0.05",
        "Marcus et al., 1976",
        "equal within 0.5",
        "Schuirmann",
        "the worst score (1 of 10)",
        "lr=0.001 and lr=0.01: lr=0.01 better (after 5 seeds each)",
        "Agarwal et al., 2021",
        f"plan {ended.plans[0]['hash']}, written before the first run",
    ):
        assert part in text


def test_second_plan_and_added_seeds_are_in_the_report(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    FakeTune(plan, files, score).run()
    plan, files = small(tmp_path, max_seeds=5, level=0.1)
    FakeTune(plan, files, score, add_seeds=1).run()
    second, added = make_report(files)["warnings"]
    assert second.startswith("Plan 2 (")
    assert "when 10 seeds were known. The level does not hold" in second
    assert added.startswith("2 seeds were added by hand")


def test_running_comparison_says_what_is_open(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    FakeTune(plan, files, score).run(most=3)
    report = make_report(files)
    assert not report["ended"]
    assert report["pairs"][0]["text"] == "not decided yet"
    assert all(panel.title for panel in panels(tmp_path, Selection(())))


def test_score_is_interpolated_at_the_budget() -> None:
    curve = [(50.0, 1.0, 10.0), (90.0, 2.0, 20.0), (110.0, 3.0, 40.0), (200.0, 9.0, 99.0)]
    record = record_of(curve, 0, 100.0, variant="A", number=0, seed=0)
    assert record.score == 30.0
    assert record.curve[-1] == (100.0, 2.5, 30.0)
    assert record.steps == 200.0, "the cost is that of the whole run"
    assert record_of(curve, 1, 6.0, variant="A", number=0, seed=0).score == 69.5
    assert record_of(curve, 0, 20.0, variant="A", number=0, seed=0).score == 10.0


def test_late_first_results_are_in_the_report(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5, budget=60)
    FakeTune(plan, files, score).run()
    assert make_report(files)["warnings"] == [
        "9 seeds have no result before the budget, so their scores were measured after it. A "
        "longer budget avoids this."
    ]


def test_tab_shows_a_comparison(ended: ComparisonFiles) -> None:
    runs: Any = [SimpleNamespace(trial=SimpleNamespace(folder=ended.folder / "trial"))]
    (tab,) = tabs_of(runs)
    assert tab.title == "Decisions"
    found = {panel.key: panel for panel in tab.build(Selection(()))}
    assert [row[1] for row in found["decisions"].rows] == ["lr=0.01 better"]
    assert len(found["variants"].rows) == 2
    assert len(found["looks"].figure.data) == 2, "a pair and the boundary"
    assert [len(trace.x) for trace in found["scores"].figure.data] == [4, 5]
    assert found["curves-steps"].figure.data
    assert "Schuirmann" in found["paragraph"].note
    assert not tabs_of([SimpleNamespace(trial=SimpleNamespace(folder=Path("/no/trial")))])


def test_tab_of_a_damaged_comparison_says_so(ended: ComparisonFiles) -> None:
    (ended.folder / SEEDS_FILE).write_text("nothing\n")
    (panel,) = panels(ended.folder, Selection(()))
    assert "cannot be read" in panel.missing


def test_page_asks_add_ons_for_tabs(ended: ComparisonFiles) -> None:
    trial = SimpleNamespace(folder=ended.folder / "trial", optimizer="")
    assert "Decisions" in [tab.title for tab in tabs.tabs_of([SimpleNamespace(trial=trial)])]
