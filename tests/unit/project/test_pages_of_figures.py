"""Pages with figures say what the committed raw results say."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from source_tree import ROOT

import polopt
from polopt.trainers.presets import PRESETS

BENCHMARKS = ROOT / "benchmarks"
STORES = BENCHMARKS / "results"
#: For each script that writes tables into a page, the file of its raw results.
SCRIPTS = {
    "aggregation": "aggregation.jsonl",
    "ceiling": "ceiling.jsonl",
    "comparison_levels": "comparison_levels.jsonl",
    "early_stop": "early_stop.jsonl",
    "imposed_lag": "imposed_lag.jsonl",
    "many_agents": "many_agents.jsonl",
    "planned_first": "planned_first.jsonl",
    "predicted_rates": "predicted_rates.jsonl",
    "products": "products.jsonl",
    "replay_buffer": "replay_buffer.jsonl",
    "replay_updates": "replay_updates.jsonl",
    "results": "tasks.jsonl",
    "scaling": "scaling.jsonl",
    "step_parts": "step_parts.jsonl",
    "suite": "suite.jsonl",
    "variants": "variants.jsonl",
}


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with mock.patch.dict(os.environ):  # a script sets variables when it is imported
        yield importlib.import_module(request.param)


def stored(path: Path) -> dict[str, Any]:
    return dict(importlib.import_module("stored_runs").read_runs(path))


@pytest.mark.parametrize("script", SCRIPTS, indirect=True)
def test_page_has_the_tables_of_the_raw_results(script: Any) -> None:
    """If this fails, the option `--page` of the script writes the page, or a measurement was not
    committed."""
    text = script.PAGE.read_text()
    assert script.page(stored(STORES / SCRIPTS[script.__name__]), text) == text


@pytest.mark.parametrize(
    ("script", "run"),
    [
        ("comparison_levels", "tie of two, normal"),
        ("imposed_lag", "CartPole-v1/ppo/0/0"),
        ("products", "64x64x64"),
        ("results", "CartPole-v1/cartpole_ppo/0"),
    ],
    indirect=["script"],
)
def test_a_changed_raw_result_changes_the_page(script: Any, run: str) -> None:
    store = stored(STORES / SCRIPTS[script.__name__])
    if "answers" in store[run]:
        store[run]["answers"] = ["B"] * len(store[run]["answers"])
    elif script.__name__ == "products":
        store[run]["numpy"] = [1.0]
    else:
        store[run]["return"] += 1000.0
    text = script.PAGE.read_text()
    assert script.page(store, text) != text


def doubled(value: Any) -> Any:
    """The same results with all numbers twice as large."""
    if isinstance(value, dict):
        return {name: doubled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [doubled(one) for one in value]
    return 2 * value if isinstance(value, float | int) else value


@pytest.mark.parametrize(
    "script",
    [
        "ceiling",
        "early_stop",
        "replay_buffer",
        "replay_updates",
        "scaling",
        "step_parts",
        "variants",
    ],
    indirect=True,
)
def test_each_stored_run_has_its_row(script: Any) -> None:
    store = stored(STORES / SCRIPTS[script.__name__])
    text = script.PAGE.read_text()
    for run in store.keys() - {"about"}:
        assert script.page({**store, run: doubled(store[run])}, text) != text, run


@pytest.mark.parametrize("script", ["suite"], indirect=True)
def test_a_measured_case_replaces_its_rows(script: Any) -> None:
    text = script.PAGE.read_text()
    turns = {str(turn): {"rate": rate} for turn, rate in enumerate((90.0, 100.0, 110.0))}
    case = next(case for case in script.CASES if case.name == "ddppo")
    sides = [{"peer": "polopt", "case": case.ours, "turns": turns, "error": ""}]
    for opponent in case.opponents:
        slower = {turn: {"rate": one["rate"] / 2} for turn, one in turns.items()}
        sides.append(
            {"peer": opponent.peer, "case": opponent.cases[0], "turns": slower, "error": ""}
        )
    page = script.page({"ddppo": {"commit": "abc1234", "sides": sides}}, text)
    old = [line for line in text.splitlines() if line.startswith(f"| {case.what} |")]
    new = [line for line in page.splitlines() if line.startswith(f"| {case.what} |")]
    assert len(new) == len(old) == len(case.opponents)
    assert "| 100 (90 to 110) |" in new[0]
    assert "| 2.0 (2.0 to 2.0) |" in new[0]
    assert "`ddppo` (commit abc1234)" in page
    kept = set(page.splitlines()) - set(new)
    others = {line for line in text.splitlines() if not line.startswith("Raw results of each turn")}
    assert others - set(old) <= kept, "other rows stay"
    assert script.page({"ddppo": {"commit": "abc1234", "sides": sides}}, page) == page


@pytest.mark.parametrize("script", ["results"], indirect=True)
def test_every_preset_has_a_seed_that_reached_its_goal(script: Any) -> None:
    store = stored(script.STORE)
    rows = [row.strip("| ").split(" | ") for row in script.validated(store)[2:]]
    reached = {row[0].strip("`") for row in rows if not row[5].startswith("0 of")}
    assert reached == {*PRESETS}
    lost = {run: stored for run, stored in store.items() if "/cartpole_a2c/" not in run}
    assert not any("`cartpole_a2c`" in row for row in script.validated(lost))


@pytest.mark.parametrize("script", ["results"], indirect=True)
def test_reproduce_has_the_returns_of_the_raw_results(script: Any) -> None:
    assert script.published(stored(script.STORE)) == script.PUBLISHED.read_text()


@pytest.mark.parametrize("script", ["many_agents"], indirect=True)
def test_table_of_several_agents_is_that_of_the_raw_results(script: Any) -> None:
    assert script.table(stored(script.STORE)) in script.PAGE.read_text()


def test_every_stored_run_names_its_commit() -> None:
    for name in ("results/tasks.jsonl", "results/comparison_levels.jsonl"):
        for line in (BENCHMARKS / name).read_text().splitlines():
            run = json.loads(line)
            assert run["run"] == "about" or run["commit"], run["run"]


@pytest.mark.parametrize("name", ["cartpole", "halfcheetah"])
def test_log_of_a_comparison_is_that_on_the_page(name: str) -> None:
    page = (ROOT / "docs/comparisons.md").read_text()
    log = (STORES / f"{name}_comparison" / "log.txt").read_text()
    end = log[log.rindex("metric      ") : log.rindex("comparison  out")]
    assert len(end.splitlines()) > 5
    assert f"```\n{end}```" in page


@pytest.mark.parametrize("name", ["cartpole", "halfcheetah"])
def test_decisions_of_a_comparison_follow_from_its_seeds(name: str) -> None:
    folder = STORES / f"{name}_comparison"
    report = json.loads((folder / "decisions.json").read_text())
    seeds = [json.loads(line) for line in (folder / "seeds.jsonl").read_text().splitlines()]
    plan, scores = report["plan"], {variant: [] for variant in report["plan"]["variants"]}
    for seed in sorted(seeds, key=lambda seed: seed["number"]):
        scores[seed["variant"]].append(seed["score"])
    rules = polopt.DecisionRules(
        looks=tuple(plan["looks"]),
        level=plan["level"],
        equal_within=plan["equal_within"],
        draw_seed=plan["draw_seed"],
    )
    found = [
        (pair.answer, pair.better, pair.seeds, list(pair.p_values))
        for pair in polopt.decide(scores, rules).pairs
    ]
    stored_pairs = [
        (pair["answer"], pair["better"], pair["seeds"], pair["p_values"])
        for pair in report["pairs"]
    ]
    assert found == stored_pairs
