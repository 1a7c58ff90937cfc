"""Tests of timers, lag histograms, the episode window and learner statistics."""

from __future__ import annotations

import json
import math
import pickle
import time

import numpy as np
import pytest

from polopt.metrics import EpisodeStats, EpisodeWindow, LagHistogram, LearnerStats, PhaseTimer
from polopt.metrics.learner import LEARNER_KEYS


def episodes(*returns: float) -> EpisodeStats:
    """Returns episodes whose lengths are ten times their returns."""
    return EpisodeStats(returns, [int(10 * each) for each in returns])


# ---- PhaseTimer -------------------------------------------------------------------------------


def test_timer_measures_block() -> None:
    timer = PhaseTimer()
    assert (timer.mean_ms, timer.total_s) == (0.0, 0.0)
    with timer:
        time.sleep(0.01)
    assert timer.mean_ms >= 10.0
    assert timer.total_s == pytest.approx(timer.mean_ms / 1000.0)


def test_timer_counts_block_that_raises() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer:
        raise KeyError
    assert timer.total_s > 0.0


def test_timer_mean_over_window_total_over_all() -> None:
    timer = PhaseTimer(window=2)
    for duration_s in (10.0, 1.0, 3.0):
        timer.push(duration_s)
    assert timer.mean_ms == 2000.0
    assert timer.total_s == 14.0


def test_timer_mean_over_window_of_several_intervals() -> None:
    timer = PhaseTimer(window=2)
    for duration_s in (10.0, 1.0):
        timer.push(duration_s)
    timer.take_percentiles_ms()
    assert timer.mean_ms == 5500.0
    timer.push(3.0)
    assert timer.mean_ms == 2000.0


def test_phase_that_began_before_the_restart_is_no_peak() -> None:
    timer = PhaseTimer()
    with timer:
        timer.restart(time.perf_counter())
    timer.push_rows(512)
    assert timer.peak_rows_per_s == 0.0
    timer.push(0.5)
    timer.push_rows(100)
    assert timer.peak_rows_per_s == 200.0


def test_peak_throughput() -> None:
    timer = PhaseTimer()
    timer.push_rows(99)  # no phase was timed yet
    for duration_s, rows in ((1.0, 500), (1.0, 100), (3.0, 100)):
        timer.push(duration_s)
        timer.push_rows(rows)
    assert timer.peak_rows_per_s == 500.0
    timer.push(0.0)
    timer.push_rows(7)  # a duration of 0 has no throughput
    assert timer.peak_rows_per_s == 500.0


# ---- LagHistogram -----------------------------------------------------------------------------


def test_lag_since_last_report() -> None:
    lag = LagHistogram(bins=4)
    for updates in (0, 1, 1, 3, 9):
        lag.add(updates)
    assert lag.report() == {"mean": 2.8, "max": 9, "histogram": [1, 2, 0, 2]}
    assert lag.report() == {"mean": 0.0, "max": 0, "histogram": [0, 0, 0, 0]}
    lag.add(2)
    assert lag.report() == {"mean": 2.0, "max": 2, "histogram": [0, 0, 1, 0]}


def test_lag_memory_does_not_grow_without_reports() -> None:
    lag = LagHistogram()
    size = len(pickle.dumps(lag))
    for updates in range(10_000):
        lag.add(updates)
    assert len(pickle.dumps(lag)) < size + 100


def test_lag_report_is_json() -> None:
    lag = LagHistogram()
    lag.add(3)
    assert len(json.loads(json.dumps(lag.report()))["histogram"]) == 17


def test_negative_lag_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        LagHistogram().add(-1)


# ---- episodes ---------------------------------------------------------------------------------


def test_episodes_are_concatenated_in_order() -> None:
    both = EpisodeStats.concat([episodes(1.0, 2.0), EpisodeStats(), episodes(3.0)])
    assert both.returns == [1.0, 2.0, 3.0]
    assert both.lengths == [10, 20, 30]
    assert len(EpisodeStats.concat([]).returns) == 0


def test_window_reports_last_episodes() -> None:
    window = EpisodeWindow(window=3)
    window.add(episodes(100.0, 1.0))
    window.add(episodes(2.0, 6.0))
    report = window.report()
    assert report["episode_return_mean"] == 3.0
    assert (report["episode_return_min"], report["episode_return_max"]) == (1.0, 6.0)
    assert report["episode_len_mean"] == 30.0
    assert report["episode_return_mean_since_report"] == 109.0 / 4
    assert (report["num_episodes"], report["num_episodes_lifetime"]) == (4, 4)


def test_percentiles_and_histogram_of_the_window() -> None:
    window = EpisodeWindow(window=101)
    window.add(episodes(-50.0))
    window.add(episodes(*np.random.default_rng(0).permutation(101).astype(float)))
    report = window.report()
    assert [report[f"episode_return_p{p}"] for p in (5, 25, 50, 75, 95)] == [5, 25, 50, 75, 95]
    assert [report[f"episode_len_p{p}"] for p in (5, 95)] == [50.0, 950.0]
    assert (report["episode_len_min"], report["episode_len_max"]) == (0.0, 1000.0)
    # Each bin has a width of 5. The last bin counts 95 to 100, including 100.
    assert report["episode_return_histogram"] == [5] * 19 + [6]
    assert report["episode_len_histogram"] == [5] * 19 + [6]


@pytest.mark.parametrize("second", [1.0, math.nextafter(1.0, 2.0)])
def test_histogram_of_returns_that_hardly_differ(second: float) -> None:
    window = EpisodeWindow()
    window.add(episodes(1.0, second, second))
    counts = window.report()["episode_return_histogram"]
    assert len(counts) == 20
    assert counts[0] == (3 if second == 1.0 else 1)
    assert sum(counts) == 3


def test_episode_memory_does_not_grow_without_reports() -> None:
    window = EpisodeWindow(window=3)
    window.add(episodes(1.0, 2.0, 3.0))
    size = len(pickle.dumps(window))
    for _ in range(1000):
        window.add(episodes(1.0, 2.0, 3.0))
    assert len(pickle.dumps(window)) < size + 100
    assert window.report()["num_episodes"] == 3003


def test_window_is_kept_without_new_episodes() -> None:
    window = EpisodeWindow()
    window.add(episodes(4.0))
    window.report()
    report = window.report()
    assert report["episode_return_mean"] == 4.0
    assert math.isnan(report["episode_return_mean_since_report"])
    assert (report["num_episodes"], report["num_episodes_lifetime"]) == (0, 1)


def test_statistics_are_nan_before_first_episode() -> None:
    report = EpisodeWindow().report()
    counts = {"num_episodes": 0, "num_episodes_lifetime": 0}
    assert {key: report.pop(key) for key in counts} == counts
    for name in ("return", "len"):
        assert report.pop(f"episode_{name}_histogram") == [0] * 20
    assert all(math.isnan(value) for value in report.values())


def test_window_state_survives_json() -> None:
    window = EpisodeWindow(window=3)
    window.add(episodes(1.0, 2.0, 3.0, 4.0))
    window.report()
    restored = EpisodeWindow(window=3)
    restored.add(episodes(77.0))
    restored.report()
    restored.set_state(json.loads(json.dumps(window.get_state())))
    window.add(episodes(8.0))
    restored.add(episodes(8.0))
    assert restored.report() == window.report()


# ---- LearnerStats -----------------------------------------------------------------------------


def test_learner_stats_are_means_over_rows() -> None:
    stats = LearnerStats()
    stats.add({"policy_loss": 1.0, "entropy": 2.0}, rows=1)
    stats.add({"policy_loss": 5.0}, rows=3)
    report = stats.report()
    assert report["policy_loss"] == 4.0
    assert report["entropy"] == 2.0


def test_first_report_has_all_learner_keys() -> None:
    stats = LearnerStats([*LEARNER_KEYS, "of_a_plugin"])
    report = stats.report()
    assert list(report) == [*LEARNER_KEYS, "of_a_plugin"]
    assert all(map(math.isnan, report.values()))  # an entropy of 0 would look like a collapse
    stats.add({"of_a_plugin": 3.0}, rows=5)
    assert stats.report()["of_a_plugin"] == 3.0


def test_learner_stat_without_new_values_is_repeated() -> None:
    stats = LearnerStats()
    stats.add({"entropy": 2.0}, rows=5)
    stats.report()
    stats.add({"entropy": 100.0}, rows=0)  # zero rows do not count
    stats.add({"vf_loss": 1.0, "of_a_plugin": 3.0}, rows=5)
    report = stats.report()
    assert (report["entropy"], report["vf_loss"], report["of_a_plugin"]) == (2.0, 1.0, 3.0)
