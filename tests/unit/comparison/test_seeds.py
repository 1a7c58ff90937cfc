"""Which seeds run, in which order, and what is left after a kill. Tune is replaced by a loop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from comparison_helpers import FakeTune, result_of, small

from polopt.common.config import ConfigError
from polopt.comparison.records import SEEDS_FILE, ComparisonFiles, decisions_of

SCORES = np.random.default_rng(0).normal([[0.0], [1.2]], size=(2, 20))
CRASHED = {("lr=0.001", 3), ("lr=0.01", 6)}


def score(variant: str, seed: int) -> float | None:
    """Returns the score of a seed, with two crashes."""
    if (variant, seed) in CRASHED:
        return None
    return float(SCORES[int(variant == "lr=0.01"), seed])


def test_seeds_run_look_by_look(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=15)
    tune = FakeTune(plan, files, score)
    assert tune.run()
    assert tune.started[:4] == [(name, seed) for seed in (0, 1) for name in plan.names]
    assert len(tune.started) in (10, 20, 30)
    assert len(files.records) == len(tune.started), "each seed runs once"
    (pair,) = decisions_of(files).pairs
    assert pair.answer == "better"
    assert pair.better == "lr=0.01"
    assert 2 * pair.seeds == len(tune.started), "no seed runs after the decision"


def test_next_look_waits_for_all_seeds(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=10)
    tune = FakeTune(plan, files, lambda variant, seed: 1.0)
    assert not tune.run(parallel=30, most=9)
    assert len(tune.started) == 10


def test_killed_anywhere_and_continued_gives_the_same_decisions(tmp_path: Path) -> None:
    """Kills after each number of seeds, twice, with different numbers of parallel trials."""
    plan, files = small(tmp_path / "whole", max_seeds=15)
    FakeTune(plan, files, score).run()
    whole = decisions_of(files)
    assert any(one.error for one in files.records)
    for kill in range(len(files.records)):
        folder = tmp_path / str(kill)
        for most in (kill, 2):
            plan, part = small(folder, max_seeds=15)
            FakeTune(plan, part, score).run(parallel=1 + kill % 3, most=most)
            with (folder / SEEDS_FILE).open("a") as file:
                file.write('{"variant": "' + 9999 * "x")  # killed while it wrote a record
        plan, part = small(folder, max_seeds=15)
        assert FakeTune(plan, part, score).run(parallel=4)
        assert decisions_of(part) == whole
        assert decisions_of(ComparisonFiles(folder)) == whole
        assert len(part.plans) == 1


def test_failed_seeds_count_and_do_not_run_again(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5, failed=-100.0)
    tune = FakeTune(plan, files, lambda variant, seed: None if variant == "lr=0.01" else 1.0)
    assert tune.run()
    assert len(tune.started) == 10
    assert {one.error for one in files.of("lr=0.01")} == {"ValueError: crashed"}
    assert decisions_of(files).pairs[0].differences == (101.0,)


def test_seed_without_a_finite_metric_has_failed(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    FakeTune(plan, files, lambda variant, seed: float("nan")).run(most=1)
    (record,) = files.records
    assert record.score is None
    assert record.error == "no result has a finite value of the metric"
    json.loads((tmp_path / SEEDS_FILE).read_text())
    assert record.curve == [(100.0, 1.0, None)]


def test_seed_that_a_signal_ends_has_no_record(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    tune = FakeTune(plan, files, score)
    tune.seeds.suggest("first")
    tune.is_stopping = True
    assert tune.seeds.suggest("second") is None
    trial = type("Trial", (), {"trial_id": "first", "local_path": "t", "last_result": None})
    tune.seeds.add_result(trial, result_of(50, 1.0))
    tune.seeds.end(trial, "")
    assert not files.records


def test_seed_that_ends_itself_before_its_budget_has_failed(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    tune = FakeTune(plan, files, score)
    tune.seeds.suggest("first")
    trial = type("Trial", (), {"trial_id": "first", "local_path": "t", "last_result": None})
    tune.seeds.add_result(trial, result_of(50, 1.0))
    tune.seeds.end(trial, "")
    assert files.records[0].error == "the run ended before its budget"


def test_added_seeds_are_marked_and_change_no_decision(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=10)
    FakeTune(plan, files, lambda variant, seed: float(seed)).run()
    before = decisions_of(files)
    assert before.pairs[0].answer == "not decided"
    tune = FakeTune(plan, files, lambda v, seed: 1e6 * (v == "lr=0.01"), add_seeds=3)
    assert tune.run()
    assert sorted(tune.started) == [(name, seed) for name in plan.names for seed in (10, 11, 12)]
    assert [one.added for one in files.of("lr=0.01")] == [False] * 10 + [True] * 3
    assert decisions_of(files) == before


def test_second_plan_is_kept_beside_the_first(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    FakeTune(plan, files, score).run(most=4)
    small(tmp_path, max_seeds=5)
    again, files = small(tmp_path, max_seeds=10)
    assert [entry["seeds_known"] for entry in files.plans] == [0, 4]
    assert [entry["plan"]["looks"] for entry in files.plans] == [[5], [5, 10]]
    assert files.plans[0]["hash"] != files.plans[1]["hash"]
    assert again.rules.looks == (5, 10)
    with pytest.raises(ConfigError, match="holds a comparison with budget"):
        small(tmp_path, max_seeds=5, budget=200)
    with pytest.raises(ConfigError, match="holds a comparison with variants"):
        small(tmp_path, max_seeds=5, vary={"lr": [0.001, 0.02]})


def test_lower_is_better(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5, mode="min")
    FakeTune(plan, files, lambda v, seed: seed + (10.0 if v == "lr=0.01" else 0.0)).run()
    (pair,) = decisions_of(files).pairs
    assert pair.better == "lr=0.001"
    assert pair.differences == (-10.0,)


def test_worst_score_of_a_lower_metric_is_the_highest(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5, mode="min")
    FakeTune(plan, files, lambda v, seed: None if v == "lr=0.01" and not seed else seed).run()
    assert decisions_of(files).pairs[0].differences[0] == pytest.approx(-4 / 5)


def test_comparison_runs_in_one_process(tmp_path: Path) -> None:
    _, files = small(tmp_path, max_seeds=5)
    with files.locked(), pytest.raises(ConfigError, match="another process"):  # noqa: SIM117
        with ComparisonFiles(tmp_path).locked():
            pass
    with ComparisonFiles(tmp_path).locked():
        pass


def test_records_are_read_as_written(tmp_path: Path) -> None:
    plan, files = small(tmp_path, max_seeds=5)
    FakeTune(plan, files, score).run()
    read = ComparisonFiles(tmp_path).records
    assert json.dumps(list(map(asdict, read))) == json.dumps(list(map(asdict, files.records)))
    (tmp_path / SEEDS_FILE).write_text("{}\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        ComparisonFiles(tmp_path)
