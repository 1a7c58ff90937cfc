"""Statistics over seeds agree with rliable and with closed forms. Also tests of downsampling."""

from __future__ import annotations

import numpy as np
import pytest

from polopt.dashboards.data.downsample import downsample, downsample_rows
from polopt.dashboards.data.statistics import (
    bootstrap_band,
    estimate,
    first_reach,
    interquartile_mean,
    median_reach,
    probability_of_improvement,
    resampled,
)

# Two groups on two tasks, with one tie. rliable 1.2.0 computed the numbers in the tests below with
# metrics.aggregate_iqm, metrics.probability_of_improvement and library.get_interval_estimates
# (20,000 and 5,000 stratified resamples). Shape [runs, tasks].
A = np.array([
    [140.8, 48.9], [108.4, 88.6], [90.9, 95.7], [59.6, 95.4], [82.7, 166.5], [104.5, 92.9],
    [94.4, 86.6], [78.9, 92.2], [109.6, 95.2], [119.2, 96.0],
])  # fmt: skip
B = np.array([
    [140.8, 148.6], [123.6, 97.4], [105.4, 123.5], [158.4, 103.3], [103.9, 135.1],
    [87.8, 102.7], [132.1, 124.5], [112.3, 126.8],
])  # fmt: skip


def test_interquartile_mean_is_that_of_rliable() -> None:
    assert estimate(list(A.T)).value == pytest.approx(94.58)
    assert estimate(list(B.T)).value == pytest.approx(119.0125)


def test_bootstrap_interval_is_that_of_rliable() -> None:
    _, low, high = bootstrap_band([task[:, None] for task in A.T], resamples=20_000)
    # Both bootstraps are random. With 20,000 resamples, the bounds vary by about 0.2.
    assert (low[0], high[0]) == pytest.approx((88.93, 101.92), abs=0.6)
    _, low, high = bootstrap_band([task[:, None] for task in B.T], resamples=20_000)
    assert (low[0], high[0]) == pytest.approx((107.70, 131.31), abs=0.8)


def test_probability_of_improvement_is_that_of_rliable() -> None:
    found = probability_of_improvement(list(A.T), list(B.T), resamples=5000)
    assert found.value == pytest.approx(0.178125)
    assert (found.low, found.high) == pytest.approx((0.05, 0.35), abs=0.02)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], 0.0), ([1, 2], [1, 2], 0.5), ([2, 2], [2, 1], 0.75)],
)
def test_probability_of_improvement_counts_pairs(
    x: list[float], y: list[float], expected: float
) -> None:
    found = probability_of_improvement([np.array(x)], [np.array(y)])
    assert found.value == expected
    assert np.isnan(found.low)  # an interval needs five runs


def test_interquartile_mean_drops_outer_quarters() -> None:
    assert interquartile_mean(np.array([-1e9, 1, 3, 1e9])) == 2.0


def test_bootstrap_is_stratified_by_task() -> None:
    # The runs of each task are equal. Without stratification, the interval would have a width.
    tasks = [np.zeros((6, 1)), np.full((6, 1), 10.0)]
    value, low, high = bootstrap_band(tasks)
    assert value == low == high == 5.0


def test_band_of_blocks_equals_band_of_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 5000))
    _, low, high = bootstrap_band([scores], resamples=300)  # several blocks
    _, low_end, high_end = bootstrap_band([scores[:, -3:]], resamples=300)
    np.testing.assert_allclose([low[-3:], high[-3:]], [low_end, high_end])


def test_estimate_below_five_runs_has_no_interval() -> None:
    assert np.isnan(estimate([np.arange(4.0)]).low)
    assert np.isfinite(estimate([np.arange(5.0)]).low)
    assert np.isnan(estimate([np.arange(9.0), np.arange(4.0)]).low)


@pytest.mark.parametrize(
    ("found", "median"),
    [((1.0, 3.0), 2.0), ((3.0, 1.0, 2.0), 2.0), ((1.0, np.nan), np.inf), ((1, 2, np.nan), 2.0)],
)
def test_median_counts_runs_that_do_not_reach_it(found: tuple[float, ...], median: float) -> None:
    assert median_reach(np.array(found)).value == median


def test_first_reach_is_the_first_result_at_target() -> None:
    at, scores = np.array([10, 20, 30]), np.array([np.nan, 5.0, 4.0])
    assert first_reach(at, scores, 5.0) == 20
    assert np.isnan(first_reach(at, scores, 6.0))


def test_resampled_run_ends_unless_it_holds() -> None:
    at, scores = np.array([10.0, 20, 30]), np.array([np.nan, 2.0, 4.0])
    grid = np.array([10.0, 25, 40])
    np.testing.assert_equal(resampled(at, scores, grid, hold=False), [np.nan, 3, np.nan])
    np.testing.assert_equal(resampled(at, scores, grid, hold=True), [np.nan, 3, 4])
    assert np.isnan(resampled(at, np.full(3, np.nan), grid, hold=True)).all()


def test_downsample_keeps_extremes_of_each_column() -> None:
    x = np.arange(10_000.0)
    y = np.zeros(10_000)
    y[1234], y[5678] = 7.0, -3.0
    curve = downsample(x, y, columns=100)
    assert len(curve.x) == 100
    assert (curve.high.max(), curve.low.min()) == (7.0, -3.0)
    assert curve.mean.max() == pytest.approx(0.07)
    assert (np.diff(curve.x) > 0).all()


def test_downsample_keeps_short_curves_and_drops_nan() -> None:
    curve = downsample(np.array([1.0, 2, 3]), np.array([5.0, np.nan, 6]))
    assert curve.exact
    assert (curve.x.tolist(), curve.mean.tolist()) == ([1, 3], [5, 6])


def test_downsample_of_equal_x_is_one_column() -> None:
    curve = downsample(np.zeros(2000), np.arange(2000.0), columns=10)
    assert (curve.low.tolist(), curve.high.tolist()) == ([0], [1999])


def test_downsampled_rows_are_means_of_columns() -> None:
    rows = np.stack([np.arange(1000.0), np.ones(1000)], axis=1)
    x, means = downsample_rows(np.arange(1000.0), rows, columns=10)
    assert x.shape == (10,)
    np.testing.assert_allclose(means[0], [49.5, 1.0])


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 5, 8, 11])
def test_statistics_equal_those_of_scipy(runs: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(runs)
    scores, others = rng.integers(0, 9, (runs, 6)), rng.integers(2, 11, (5, 6))  # with ties
    for axis in (0, 1):
        expected = stats.trim_mean(scores, 0.25, axis=axis)
        np.testing.assert_allclose(interquartile_mean(scores, axis), expected)
    found = probability_of_improvement([scores[:, 0]], [others[:, 0]]).value
    expected = stats.mannwhitneyu(scores[:, 0], others[:, 0]).statistic / (runs * 5)
    assert found == pytest.approx(expected)


def test_interval_equals_that_of_scipy() -> None:
    """Both bootstraps use the same random numbers."""
    stats = pytest.importorskip("scipy.stats")
    scores = np.random.default_rng(3).normal(size=(9, 20))
    _, low, high = bootstrap_band([scores], resamples=200)
    found = stats.bootstrap(
        (scores,), lambda drawn, axis: stats.trim_mean(drawn, 0.25, axis), axis=0,
        n_resamples=200, method="percentile", random_state=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose([low, high], [found.low, found.high])
