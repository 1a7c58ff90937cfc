"""Shares of time of the driver and of workers, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated_channel import VirtualClock

from polopt.metrics import timers
from polopt.metrics.optimizer_stats import OptimizerStats
from polopt.metrics.record import Record
from polopt.metrics.timers import MAX_DURATIONS, LoadMeter, PhaseTimer
from polopt.metrics.worker_times import PARTS, WorkerTimes

#: Phases that these tests do not time.
NONE = {"evaluation": 0.0}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def spend(clock: VirtualClock, timer: PhaseTimer, *durations_s: float) -> None:
    for duration_s in durations_s:
        with timer:
            clock.advance(duration_s)


def started(
    clock: VirtualClock, *phases: str, worker_phases: tuple[str, ...] = ()
) -> OptimizerStats:
    """Returns the statistics after the first answer of a worker."""
    stats = OptimizerStats(phases, worker_phases, clock=clock)
    stats.worker_times.add(1, {})
    return stats


def answered(seconds: dict[str, float], env_steps: int = 0) -> Record:
    """Returns the record of a call."""
    record = Record()
    record.seconds, record.env_steps = seconds, env_steps
    return record


# ---- start-up ---------------------------------------------------------------------------------


def test_startup_is_a_phase_of_its_own(clock: VirtualClock) -> None:
    stats = OptimizerStats(("wait", "apply"), clock=clock)
    spend(clock, stats.timers["wait"], 6.0)  # processes start
    spend(clock, stats.timers["apply"], 1.0)
    with stats.timers["wait"]:
        clock.now_s += 3.0  # the first worker is up after 1 s, and then samples for 2 s
        stats.worker_times.add(1, {"sample": 1.5, "gradient": 0.5}, env_steps=20)
        stats.worker_times.add(2, {"sample": 3.0}, env_steps=20)
        clock.now_s += 1.0
    spend(clock, stats.timers["apply"], 5.0)
    report = stats.report()
    # Of 16 s, start-up takes 6 + 1 + 1 s, and the wait for workers takes 2 + 1 s.
    share = {"startup": 0.5, "wait": 3 / 16, "apply": 5 / 16, "report": 0.0, **NONE, "other": 0.0}
    assert report["driver"]["share"] == pytest.approx(share)
    assert (report["startup_s"], report["training_s"], report["interval_s"]) == (8.0, 8.0, 16.0)
    assert report["driver"]["p99_ms"]["wait"] == pytest.approx(3000.0)
    clock.now_s += 2.0
    report = stats.report()
    assert report["driver"]["share"]["startup"] == 0.0
    assert (report["startup_s"], report["training_s"], report["interval_s"]) == (8.0, 10.0, 2.0)


def test_startup_ends_within_the_phase_that_has_just_ended(clock: VirtualClock) -> None:
    stats = OptimizerStats(("wait", "apply"), clock=clock)
    spend(clock, stats.timers["wait"], 9.0)
    with stats.timers["apply"]:
        clock.advance(1.0)
        stats.add_record(1, answered({"sample": 4.0}), in_driver=False)
    # The sample began after 6 of the 10 s.
    share = stats.report()["driver"]["share"]
    expected = {"startup": 0.6, "wait": 0.3, "apply": 0.1, "report": 0.0, **NONE, "other": 0.0}
    assert share == pytest.approx(expected)


def test_rates_exclude_start_up(clock: VirtualClock) -> None:
    stats = OptimizerStats(("sample",), clock=clock)
    spend(clock, stats.timers["sample"], 10.0)
    stats.add_record(1, answered({"sample": 2.0}, env_steps=100), in_driver=False)
    stats.add_training(100, 4, {})
    report = stats.report((1,))
    # Start-up ends when the sample begins, so training has taken 2 s.
    assert report["env_steps_per_s"] == pytest.approx(50.0)
    assert report["updates_per_s"] == pytest.approx(2.0)
    assert report["workers"]["per_worker"][0]["env_steps_per_s"] == pytest.approx(50.0)


def test_all_time_is_start_up_before_the_first_answer(clock: VirtualClock) -> None:
    stats = OptimizerStats(("wait",), clock=clock)
    spend(clock, stats.timers["wait"], 5.0)
    for _ in range(2):
        share = stats.report()["driver"]["share"]
        expected = {"startup": 1.0, "wait": 0.0, "report": 0.0, **NONE, "other": 0.0}
        assert share == pytest.approx(expected, abs=1e-6)
        clock.now_s += 1.0
    # This call began before the last report, so start-up ends with the last report, after 6 s.
    stats.worker_times.add(1, {"sample": 30.0})
    spend(clock, stats.timers["wait"], 1.0)
    report = stats.report()
    assert report["driver"]["share"]["startup"] == 0.0
    assert (report["startup_s"], report["training_s"]) == (6.0, 2.0)


@pytest.mark.parametrize("count", ["add_record", "add_training"])
def test_first_counts_end_start_up_if_workers_report_no_times(
    clock: VirtualClock, count: str
) -> None:
    stats = OptimizerStats(clock=clock)
    clock.now_s += 3.0
    if count == "add_record":
        stats.add_record(1, Record(), in_driver=False)
    else:
        stats.add_training(1, 1, {})
    clock.now_s += 1.0
    assert stats.report()["driver"]["share"]["startup"] == pytest.approx(0.75)


def test_restored_run_continues_to_count_its_seconds(clock: VirtualClock) -> None:
    first = OptimizerStats(clock=clock)
    clock.now_s += 3.0
    first.worker_times.add(1, {})
    clock.now_s += 10.0
    state = first.get_state()
    second = OptimizerStats(clock=clock)
    clock.now_s += 1.0
    second.set_state(state)
    clock.now_s += 1.0
    second.worker_times.add(1, {})
    clock.now_s += 5.0
    assert (second.startup_s, second.training_s) == (5.0, 15.0)
    second.set_state(state)  # in a process that trains already
    clock.now_s += 1.0
    assert (second.startup_s, second.training_s) == (3.0, 11.0)


# ---- the driver -------------------------------------------------------------------------------


def test_driver_shares_are_of_wall_time_and_sum_to_one(clock: VirtualClock) -> None:
    stats = started(clock, "wait", "apply", worker_phases=("skew",))
    spend(clock, stats.timers["wait"], 1.0, 2.0)
    spend(clock, stats.timers["apply"], 5.0)
    stats.timers["skew"].push(100.0)  # a phase of workers, which takes no time of the driver
    clock.now_s += 2.0
    share = stats.report()["driver"]["share"]
    expected = {"startup": 0.0, "wait": 0.3, "apply": 0.5, "report": 0.0, **NONE, "other": 0.2}
    assert share == pytest.approx(expected)


def test_driver_shares_are_since_the_last_report(clock: VirtualClock) -> None:
    stats = started(clock, "wait", "apply")
    spend(clock, stats.timers["wait"], 40.0)
    stats.report()
    spend(clock, stats.timers["apply"], 3.0)
    clock.now_s += 1.0
    driver = stats.report()["driver"]
    share = {"startup": 0.0, "wait": 0.0, "apply": 0.75, "report": 0.0, **NONE, "other": 0.25}
    assert driver["share"] == pytest.approx(share)
    assert driver["p50_ms"] == pytest.approx({"wait": 0.0, "apply": 3000.0, "report": 0.0, **NONE})


def test_time_between_iterations_is_the_phase_report(clock: VirtualClock) -> None:
    stats = started(clock, "wait")
    stats.begin_iteration()
    stats.report()
    clock.now_s += 2.0
    stats.begin_iteration()
    spend(clock, stats.timers["wait"], 1.0)
    clock.now_s += 1.0
    driver = stats.report()["driver"]
    share = {"startup": 0.0, "wait": 0.25, "report": 0.5, **NONE, "other": 0.25}
    assert driver["share"] == pytest.approx(share)
    assert driver["p50_ms"]["report"] == pytest.approx(2000.0)


def test_overlapping_phases_still_sum_to_one(clock: VirtualClock) -> None:
    stats = started(clock, "outer", "inner")
    with stats.timers["outer"]:
        spend(clock, stats.timers["inner"], 4.0)
    share = stats.report()["driver"]["share"]
    expected = {"startup": 0.0, "outer": 0.5, "inner": 0.5, "report": 0.0, **NONE, "other": 0.0}
    assert share == pytest.approx(expected)


def test_percentiles_of_single_timings(clock: VirtualClock) -> None:
    stats = started(clock, "wait")
    durations_s = [0.001 * i for i in range(1, 102)]
    spend(clock, stats.timers["wait"], *durations_s)
    driver = stats.report()["driver"]
    assert driver["p50_ms"]["wait"] == pytest.approx(51.0)
    assert driver["p99_ms"]["wait"] == pytest.approx(100.0)


def test_percentiles_keep_a_bounded_number_of_timings() -> None:
    timer = PhaseTimer()
    for _ in range(MAX_DURATIONS):
        timer.push(1.0)
    for _ in range(MAX_DURATIONS):
        timer.push(3.0)
    assert timer.interval_s == 4.0 * MAX_DURATIONS
    assert timer.take_percentiles_ms() == (3000.0, 3000.0)
    assert (timer.interval_s, timer.take_percentiles_ms()) == (0.0, (0.0, 0.0))


# ---- workers ----------------------------------------------------------------------------------


def rounds(clock: VirtualClock, times: WorkerTimes, seconds: dict[int, float], count: int) -> None:
    """Simulates synchronous rounds: every worker answers when the slowest worker has sampled."""
    for _ in range(count):
        clock.now_s += max(seconds.values())
        for index, duration_s in seconds.items():
            times.add(index, {"sample": duration_s}, env_steps=10)


def test_workers_that_wait_for_a_slow_one_are_idle(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    rounds(clock, times, {1: 1.0, 2: 1.0, 3: 4.0}, count=1)
    times.report((1, 2, 3), 4.0)
    rounds(clock, times, {1: 1.0, 2: 1.0, 3: 4.0}, count=5)
    report = times.report((1, 2, 3), 20.0)
    assert [each["idle_share"] for each in report["per_worker"]] == [0.75, 0.75, 0.0]
    assert report["idle_share"] == {"mean": 0.5, "min": 0.0, "max": 0.75}
    assert report["share"]["sample"] == pytest.approx(0.5)
    assert report["share"]["idle"] == pytest.approx(0.5)
    assert report["p50_ms"]["sample"] == 1000.0
    assert report["p99_ms"]["idle"] == 3000.0


def test_rates_of_each_worker(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    clock.now_s += 1.0
    for _ in range(3):
        times.add(1, {"sample": 0.1, "gradient": 0.1}, env_steps=20)
    times.add(2, {"sample": 0.1}, env_steps=10)
    report = times.report((1, 2, 3), 10.0)
    assert report["env_steps_per_s"] == pytest.approx({"mean": 7.0 / 3, "min": 0.0, "max": 6.0})
    rates = [(each["index"], each["gradients_per_s"]) for each in report["per_worker"]]
    assert rates == [(1, pytest.approx(0.3)), (2, 0.0), (3, 0.0)]
    assert times.report((1, 2, 3), 10.0)["env_steps_per_s"]["max"] == 0.0


def test_parts_of_a_worker_are_disjoint_shares(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    times.add(1, {"sample": 3.0})
    clock.now_s += 10.0
    times.add(1, {"learn": 2.0, "allreduce": 1.0, "skew": 0.5})
    share = times.report((1,), 10.0)["share"]
    # The time of the worker is the 3 s before its first answer, and the 10 s after this answer.
    expected = {"sample": 3.0, "learn": 2.0, "allreduce": 1.0, "skew": 0.5}
    assert sum(share.values()) == pytest.approx(1.0)
    for part in PARTS[:-1]:
        assert share[part] == pytest.approx(expected.get(part, 0.0) / 13.0)
    assert share["idle"] == pytest.approx(6.5 / 13.0)


def test_phase_that_was_not_declared_counts_as_other(clock: VirtualClock) -> None:
    times = WorkerTimes(["exchange"], clock=clock)
    times.add(1, {"sample": 1.0, "exchange": 2.0, "undeclared": 3.0, "other": 4.0})
    report = times.report((1,), 10.0)
    expected = {"sample": 0.1, "exchange": 0.2, "other": 0.7}
    assert report["share"] == pytest.approx(dict.fromkeys(report["share"], 0.0) | expected)
    assert report["p50_ms"]["exchange"] == 2000.0


def test_time_before_the_first_answer_does_not_count(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    clock.now_s += 30.0  # the process starts
    times.add(1, {"sample": 1.0})
    assert times.report((1,), 30.0)["idle_share"]["max"] == 0.0


def test_local_worker_is_never_idle(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    times.report((0,), 1.0)
    for _ in range(3):
        clock.now_s += 10.0  # the driver learns
        times.add(0, {"sample": 1.0}, env_steps=8)
    report = times.report((0,), 33.0)
    assert report["share"] == {**dict.fromkeys(PARTS, 0.0), "sample": 1.0}
    assert report["idle_share"] == {"mean": 0.0, "min": 0.0, "max": 0.0}


def test_answers_that_arrive_together_keep_shares_in_range(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    times.add(1, {"sample": 3.0})
    times.report((1,), 1.0)
    clock.now_s += 1.0
    times.add(1, {"sample": 3.0, "gradient": 1.0})
    share = times.report((1,), 1.0)["share"]
    assert (share["sample"], share["gradient"], share["idle"]) == (0.75, 0.25, 0.0)


def test_share_without_a_new_answer_is_repeated(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    assert times.report((1,), 1.0)["share"]["idle"] == 1.0
    times.add(1, {"sample": 1.0})
    clock.now_s += 4.0
    times.add(1, {"sample": 1.0})
    # The worker was busy for 2 of 5 s.
    assert times.report((1,), 1.0)["idle_share"]["mean"] == pytest.approx(0.6)
    assert times.report((1,), 1.0)["idle_share"]["mean"] == pytest.approx(0.6)


def test_removed_worker_leaves_the_report(clock: VirtualClock) -> None:
    times = WorkerTimes(clock=clock)
    for index in (1, 2):
        times.add(index, {"sample": 1.0}, env_steps=5)
    report = times.report((2,), 1.0)
    assert [each["index"] for each in report["per_worker"]] == [2]
    times.add(2, {"sample": 1.0}, env_steps=5)
    assert times.report((2,), 1.0)["env_steps_per_s"]["min"] == 5.0


def test_report_of_no_workers_has_all_keys() -> None:
    def keys(value: Any) -> Any:
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None

    none, one = WorkerTimes().report((), 1.0), WorkerTimes().report((1,), 1.0)
    assert keys(none) == keys(one)
    assert sum(none["share"].values()) == 1.0


def test_load_is_mean_and_maximum_since_the_last_report() -> None:
    load = LoadMeter()
    for value in (1, 4, 1):
        load.add(value)
    assert load.report() == {"mean": 2.0, "max": 4}
    assert load.report() == {"mean": 0.0, "max": 0}


def test_percentiles_equal_those_of_numpy() -> None:
    durations_s = np.random.default_rng(0).exponential(size=37).tolist()
    expected = 1000.0 * np.percentile(durations_s, (50, 99))
    assert timers.percentiles_ms(durations_s) == pytest.approx(tuple(expected))


# ---- evaluation -------------------------------------------------------------------------------


def test_evaluation_is_not_training_time(clock: VirtualClock) -> None:
    stats = started(clock, "sample")
    with stats.timers["sample"]:
        clock.advance(2.0)
        stats.add_record(1, answered({}, env_steps=100), in_driver=False)
    spend(clock, stats.timers["evaluation"], 6.0)
    report = stats.report()
    assert report["env_steps_per_s"] == pytest.approx(50.0)
    assert (report["training_s"], report["interval_s"]) == (2.0, 8.0)
    expected = {"startup": 0.0, "sample": 0.25, "report": 0.0, "evaluation": 0.75, "other": 0.0}
    assert report["driver"]["share"] == pytest.approx(expected)
    spend(clock, stats.timers["evaluation"], 3.0)
    assert stats.get_state()["training_s"] == 2.0
    stats.set_state(stats.get_state())
    spend(clock, stats.timers["sample"], 5.0)
    assert stats.training_s == 7.0
