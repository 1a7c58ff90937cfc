"""Tests what a simulation refuses, and what its commands print."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import worker_config
from simulated_toys import MANY, calibrated, outcome, with_costs

from polopt.common.config import ConfigError
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.simulation import calibration, predictions
from polopt.simulation.calibration import check_supported, sample_and_learn
from polopt.simulation.costs import Costs, Curve, Learning, MessageCosts
from polopt.simulation.plan_command import Choice, grown, rank, reason
from polopt.simulation.predict_function import predict
from polopt.simulation.predictions import (
    Machines,
    Prediction,
    bottleneck,
    predict_with,
    saturation,
)
from polopt.simulation.simulate_command import ADVICE, findings, numbers, report, table
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS


def prediction(workers: int, rate: float, **other: Any) -> Prediction:
    values: dict[str, Any] = dict.fromkeys(Prediction.__dataclass_fields__, 0.0)
    values |= {"workers": workers, "env_steps_per_s": rate, "low": 0.9 * rate, "high": 1.1 * rate}
    values |= {"phases": {"sample": 0.75, "idle": 0.25}, "bottleneck": "the cores"}
    return Prediction(**{**values, **other})


# ---- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "cost"), [(10, 1.0), (15, 1.5), (30, 4.0), (40, 6.0), (5, 0.5), (0, 0.0)]
)
def test_a_curve_is_linear_between_and_beyond_its_points(size: float, cost: float) -> None:
    assert Curve([(20, 2.0), (10, 1.0), (30, 4.0)])(size) == pytest.approx(cost)


def test_the_pieces_of_a_fragment_keep_mean_and_length() -> None:
    waits = np.random.default_rng(0).exponential(1.0, 4000)
    costs = Costs(0.1 * np.ones(4000), waits)
    rng = np.random.default_rng(1)
    drawn = [costs.pieces(rng, 40, 4) for _ in range(300)]
    assert {len(parts) for parts in drawn} == {4}
    assert {parts[-1][2] for parts in drawn} == {40}
    sums = [sum(wait_s for _, wait_s, _ in parts) for parts in drawn]
    assert np.mean(sums) == pytest.approx(40 * waits.mean(), rel=0.05)
    assert np.std(sums) == pytest.approx(40**0.5 * waits.std(), rel=0.2), "the tail is kept"
    assert sum(cpu_s for cpu_s, _, _ in drawn[0]) == pytest.approx(4.0)


def test_slow_steps_that_follow_each_other_stay_together() -> None:
    waits = np.zeros(3200)
    waits[::320] = 1.0
    together = np.repeat(waits[::32], 32)  # the same mean, in runs of 32 slow steps
    rng = np.random.default_rng(0)

    def deviation(trace: np.ndarray) -> float:
        costs = Costs(np.zeros(len(trace)), trace / trace.mean())
        return float(np.std([costs.pieces(rng, 160, 1)[0][1] for _ in range(400)]))

    assert deviation(together) > 2.0 * deviation(np.random.default_rng(1).permutation(together))


def test_the_bootstrap_draws_other_costs_with_the_same_mean() -> None:
    costs = Costs(
        np.ones(900), np.random.default_rng(0).exponential(1.0, 900), apply_s=1.0, spread=0.1
    )
    drawn = [costs.resampled(np.random.default_rng(seed)) for seed in range(200)]
    means = [one.step_wait_s.mean() for one in drawn]
    assert np.mean(means) == pytest.approx(costs.step_wait_s.mean(), rel=0.02)
    assert np.std(means) == pytest.approx(costs.step_wait_s.std() / 30.0, rel=0.4)
    assert np.std([one.apply_s for one in drawn]) == pytest.approx(0.1, rel=0.3)


def test_learning_depends_on_the_rows() -> None:
    costs = Costs(np.zeros(1), np.zeros(1), learning=(Learning(10, 1.0, 2), Learning(20, 3.0, 4)))
    assert costs.learning_of(15)[:3] == (15, pytest.approx(2.0), 3)
    assert costs.learning_of(40).seconds == pytest.approx(7.0)


# ---- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_gpus", 1.0, "the driver learns on a GPU"),
        ("num_gpus_per_worker", 0.5, "workers compute on a GPU"),
        ("num_workers_below", 2, "workers below them"),
    ],
)
def test_what_was_never_calibrated_is_refused(key: str, value: Any, reason: str) -> None:
    options = {"env": "CartPole-v1", "num_workers": 2, key: value}
    experiment = Experiment.parse(options, PRESETS["A3C"].preset)
    with pytest.raises(ConfigError, match=f"{key}.*{reason}"):
        check_supported(experiment)
    check_supported(Experiment.parse({**options, key: 0}, PRESETS["A3C"].preset))


def test_a_link_needs_two_nodes() -> None:
    with pytest.raises(ConfigError, match="nodes is 1"):
        predict("A3C", {"env": "CartPole-v1"}, latency_s=0.001)


def test_the_rate_of_one_worker_is_the_base_of_the_efficiency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predictions, "LEAST_ANSWERS", 60)
    monkeypatch.setattr(predictions, "MANY_ANSWERS", 60)
    calibration = calibrated("A3C", wait_s=np.random.default_rng(0).exponential(0.01, 500))
    (found,) = predict_with(calibration, [4], MANY, repeats=3)
    assert found.workers == 4
    assert found.low < found.env_steps_per_s < found.high
    assert found.efficiency == pytest.approx(1.0, abs=0.15)
    assert found.oversubscribed == 0.0
    with pytest.raises(ConfigError, match="got 0"):
        predict_with(calibration, [0], MANY)


def test_costs_of_another_strategy_lack_the_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(experiment: Any, config: Any, costs: Costs) -> Costs:
        return dataclasses.replace(costs, exchange_s=0.5)

    def exchange_s(preset: str, known_s: float) -> float:
        options = {"env": "CartPole-v1", "num_workers": 2, "model": {"fcnet_hiddens": (4,)}}
        experiment = Experiment.parse(options, PRESETS[preset].preset)
        costs = Costs(np.zeros(1), np.zeros(1), exchange_s=known_s)
        return calibration.calibrate(experiment, 0.02, messages=costs).costs.exchange_s

    monkeypatch.setattr(calibration, "exchange_of_two", measured)
    assert [exchange_s("A2C", 0.0), exchange_s("DDPPO", 0.0), exchange_s("DDPPO", 0.1)] == [
        0.0,
        0.5,
        0.1,
    ], "an all-reduce is never free"


def test_an_interval_covers_caches_that_lose_more_than_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predictions, "LEAST_ANSWERS", 100)
    monkeypatch.setattr(predictions, "MANY_ANSWERS", 100)
    waits = np.random.default_rng(0).exponential(0.01, 5000)
    message = MessageCosts(cold=2.0)
    calibration = calibrated(
        "A3C", wait_s=waits, compute_s=0.01, crowded=((2, 1.2),), message=message
    )
    two = Machines(cores=2.0)
    (found,) = predict_with(calibration, [4], two, repeats=2)
    assert found.oversubscribed == 2.5
    for factor in (1.1, 2.2):
        truth = outcome(with_costs(calibration, crowded=((2, factor),)), 4, two)
        assert found.low < truth.env_steps_per_s < found.high
    measured = outcome(calibration, 4, two).env_steps_per_s
    assert found.env_steps_per_s == pytest.approx(measured, rel=0.1), "only the interval changes"


def test_the_rate_saturates_where_its_plateau_meets_the_first_line() -> None:
    rates = [(1, 10.0), (2, 20.0), (4, 40.0), (8, 60.0), (16, 60.0)]
    assert saturation([prediction(*one) for one in rates]) == pytest.approx(6.0)
    assert saturation([prediction(*one) for one in rates[:3]]) is None
    assert saturation([prediction(1, 10.0)]) is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((4, 0.95, 0.2, 0.5, 0.0, 0.5), "the driver's messages"),
        ((4, 0.95, 0.6, 0.5, 0.0, 0.5), "the driver, which learns"),
        ((4, 0.50, 0.2, 0.9, 0.0, 0.5), "the cores"),
        ((4, 0.50, 0.2, 0.5, 0.9, 0.5), "the link"),
        ((4, 0.50, 0.2, 0.5, 0.0, 0.1), "the workers"),
        ((4, 0.50, 0.4, 0.5, 0.0, 0.5), "workers wait for learning"),
        ((4, 0.10, 0.0, 0.1, 0.0, 0.5), "the slowest worker"),
        ((1, 0.10, 0.0, 0.1, 0.0, 0.5), "the workers"),
    ],
)
def test_the_busiest_part_is_the_bottleneck(shares: tuple[Any, ...], expected: str) -> None:
    assert bottleneck(*shares) == expected
    assert expected in ADVICE


# ---- commands -----------------------------------------------------------------------------------


def test_numbers_of_workers_are_read_from_a_list() -> None:
    assert numbers("1, 2,4096") == [1, 2, 4096]
    for wrong in ("1,x", "0", "", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--workers"):
            numbers(wrong)


def test_the_report_says_where_the_rate_saturates_and_that_cores_are_oversubscribed() -> None:
    made = [prediction(1, 10.0), prediction(4, 20.0), prediction(8, 20.0, oversubscribed=2.5)]
    machines = MANY._replace(cores=4.0)
    text = "\n".join([*table(made), *findings(made, machines)])
    assert "saturates at about 2 workers" in text
    assert "oversubscribed from 8 workers" in text
    assert "more cores or nodes" in text
    assert "idle 25%, sample 75%" in text
    assert "still grows" in findings([prediction(1, 10.0), prediction(2, 20.0)], machines)[0]
    content = json.loads(json.dumps(report("A3C", MANY, made)))
    assert content["predictions"][1]["workers"] == 4
    assert {"env_steps_per_s", "low", "high"} <= set(content["predictions"][1])
    assert content["predictions"] == [dataclasses.asdict(one) for one in made]


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (4, [1, 2, 4])])
def test_a_plan_tries_no_more_workers_than_allowed(most: int, expected: list[int]) -> None:
    sleeping = calibrated("A3C", wait_s=0.01)
    found = grown("A3C", (), sleeping, 2.0, 0.1, most)
    assert [choice.workers for choice in found] == expected


def test_equal_rates_are_ranked_by_lag() -> None:
    def choice(preset: str, rate: float, lag: float, workers: int = 4) -> Choice:
        return Choice(preset, ("a=1",), workers, rate, rate, rate, lag, "the cores")

    ranked = rank([choice("A3C", 99.0, 7.0), choice("A2C", 97.0, 0.0), choice("DQN", 50.0, 0.0)])
    assert [one.preset for one in ranked] == ["A2C", "A3C", "DQN"]
    assert "highest rate" in reason(ranked[0], ranked[0])
    assert "higher lag" in reason(ranked[1], ranked[0])
    assert "52% of the first" in reason(ranked[2], ranked[0])
    assert ranked[0].command("Acrobot-v1") == "polopt train A2C env=Acrobot-v1 a=1 num_workers=4"


# ---- calibrations and benchmarks ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["a2c", DQNPolicy])
def test_the_work_of_a_worker_on_one_core_is_measured(policy: Any) -> None:
    """DQN gives gradients, but not of fragments."""
    worker = RolloutWorker(worker_config(policy), 1)
    before = os.sched_getaffinity(0)
    assert 0.0 < sample_and_learn(worker, min(before), 0.0) < 10.0
    assert os.sched_getaffinity(0) == before
    worker.stop()


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("predicted_rates")


def test_pairs_of_an_earlier_model_are_kept_beside_the_new_ones(benchmark: Any) -> None:
    row: dict[str, Any] = {"rate": 110.0, "low": 1.0, "high": 2.0, "one_worker": 60.0, "lag": 0.0}
    row |= {"bottleneck": "the workers", "at": 1}
    run = {"rate": 100.0, "lag": 0.0, "at": 2, "others": 0.0}
    names = [f"{kind} sync_samples constant 8" for kind in ("predicted", "measured")]
    store: dict[str, Any] = dict(zip(names, (row, run), strict=True))
    assert benchmark.to_predict(store, "sync_samples", "constant", [8]) == [8]
    new = {**row, "model": benchmark.MODEL, "rate": 104.0, "at": 3}
    benchmark.put_prediction(store, ("sync_samples", "constant", 8), new)
    assert benchmark.to_predict(store, "sync_samples", "constant", [8]) == []
    assert not benchmark.pairs_of(store), "the measurement was made before the prediction"
    assert [round(pair.error, 2) for pair in benchmark.pairs_of(store, "earlier ")] == [0.1]
    store[names[1]] = {**run, "at": 4, "others": 1.5}
    assert not benchmark.is_good(store[names[1]]), "it is measured again"
    assert any("(other programs ran) | +4%" in line for line in benchmark.table(store))
    benchmark.put_prediction(store, ("sync_samples", "constant", 8), new)
    assert len(benchmark.pairs_of(store, "earlier ")) == 1, "the same model has no earlier pair"


def test_a_prediction_after_a_short_calibration_is_made_again(benchmark: Any) -> None:
    row = {"model": benchmark.MODEL, "rate": 104.0}
    store = {"predicted sync_samples heavy 8": row}
    assert benchmark.to_predict(store, "sync_samples", "heavy", [8]) == [8]
    row["calibration_s"] = benchmark.CALIBRATION_S["heavy"]
    assert benchmark.to_predict(store, "sync_samples", "heavy", [8]) == []


def test_the_knee_is_where_the_plateau_meets_the_first_line(benchmark: Any) -> None:
    assert benchmark.knee({1: 10.0, 2: 20.0, 4: 39.0, 8: 60.0, 16: 60.0}) == pytest.approx(6.0)
    assert benchmark.knee({1: 10.0, 2: 20.0, 4: 40.0}) is None


def test_a_task_is_planned_and_its_grid_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    grids: Any = importlib.import_module("planned_first")
    first = grids.read_way(
        "polopt train A3C env=Sleeping-v0 env_config.sleep=heavy num_envs_per_worker=16 "
        "rollout_fragment_length=40 num_workers=4"
    )
    options = {"num_envs_per_worker": 16, "rollout_fragment_length": 40, "num_workers": 4}
    assert first == grids.Way("A3C", options)
    with pytest.raises(ValueError, match="no command line"):
        grids.read_way("no strategy fits")
    store: dict[str, Any] = {}
    asked: list[tuple[str, float]] = []
    ways = grids.grid("Acrobot-v1")
    assert max(way.options["num_workers"] for way in grids.grid(grids.SLEEPING)) == 16
    rates = dict(zip(map(str, ways), range(100, 1000), strict=False)) | {str(first): 115.0}
    failing, others = {str(ways[3])}, 0.0

    def measure(way: Any, seconds: float) -> dict[str, Any]:
        asked.append((str(way), seconds))
        if str(way) in failing:
            raise RuntimeError("no update within a minute")
        return {"rate": rates[str(way)], "others": others}

    def task() -> None:
        row = {"preset": "A3C", "options": options, "predicted": 117.0}
        grids.run_task("Acrobot", store, ways, lambda: row, measure, 2.0, lambda: None)

    task()
    best = [str(way) for way in ways[: -grids.BEST - 1 : -1]]
    assert asked[-4:] == [(str(first), 6.0), *((way, 6.0) for way in best)]
    assert "no update" in store[f"grid Acrobot: {ways[3]}"]["failed"], "the others are measured"
    failing.clear()
    count = len(asked)
    task()
    assert asked[count:] == [(str(ways[3]), 2.0)], "only what failed is repeated"
    store[f"grid Acrobot: {ways[0]}"]["others"] = 1.0
    task()
    assert asked[count + 1 :] == [(str(ways[0]), 2.0)], "other programs ran meanwhile"
    found = grids.verdict("Acrobot", store)
    assert (found["best"], found["best_rate"], found["good"]) == (best[0], 123, True)
    store[f"again Acrobot: {first}"] = {"rate": 110.0}
    assert not grids.verdict("Acrobot", store)["good"]
    del store[f"again Acrobot: {best[1]}"]
    assert grids.verdict("Acrobot", store) is None, "the task is not complete"


def test_predictions_were_stored_before_the_measurements(benchmark: Any) -> None:
    store = benchmark.read_runs(benchmark.STORE)
    cases = [name.partition(" ")[2] for name in store if name.startswith("measured ")]
    assert len(cases) > 100
    assert all(
        store[f"predicted {case}"]["at"] <= store[f"measured {case}"]["at"] for case in cases
    )
