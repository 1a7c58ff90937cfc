"""Tests of smoothing against closed forms, of logarithmic axes and of robust ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polopt.dashboards.data.scales import (
    OUTLIER_FACTOR,
    Scale,
    above_zero,
    robust_range,
    scale_of,
    scale_of_intervals,
    smoothed,
)

Array = np.ndarray[Any, Any]
NAN = float("nan")


def test_weight_zero_leaves_values_as_they_are() -> None:
    values = np.array([3.0, -1e30, NAN, 0.1, 7.0])
    np.testing.assert_array_equal(smoothed(values, 0.0), values)


@pytest.mark.parametrize("weight", [0.3, 0.9, 0.99])
def test_smoothed_constant_is_the_constant(weight: float) -> None:
    np.testing.assert_array_equal(smoothed(np.full(300, 0.1), weight), 0.1)


@pytest.mark.parametrize("weight", [0.5, 0.9])
def test_smoothed_step_has_its_closed_form(weight: float) -> None:
    """After m zeros and n ones, the weights of the ones sum to (1 - w^n) / (1 - w^(m + n))."""
    zeros, ones = 4, 30
    found = smoothed(np.repeat([0.0, 1.0], [zeros, ones]), weight)
    after = np.arange(1, ones + 1)
    np.testing.assert_array_equal(found[:zeros], 0.0)
    np.testing.assert_allclose(
        found[zeros:], (1.0 - weight**after) / (1.0 - weight ** (zeros + after))
    )


def test_weights_of_an_average_fall_by_the_weight_and_sum_to_one() -> None:
    weight, count = 0.8, 6
    weights = np.array([smoothed(row, weight)[-1] for row in np.eye(count)])
    np.testing.assert_allclose(weights[:-1] / weights[1:], weight)
    np.testing.assert_allclose(weights.sum(), 1.0)


def test_gaps_stay_gaps_and_have_no_weight() -> None:
    values = np.array([NAN, 1.0, 2.0, NAN, np.inf, 4.0])
    found = smoothed(values, 0.7)
    np.testing.assert_array_equal(np.isnan(found), [True, False, False, True, True, False])
    np.testing.assert_array_equal(found[[1, 2, 5]], smoothed(np.array([1.0, 2.0, 4.0]), 0.7))
    assert np.isnan(smoothed(np.full(3, NAN), 0.7)).all()
    assert not len(smoothed(np.empty(0), 0.7))


def test_logarithmic_axis_counts_the_zeros_that_it_lacks() -> None:
    values = np.array([0.0, 1e-9, 2.0, NAN, 0.0, 5.0])
    scale = scale_of({"a": [values[:3]], "b": [values[3:]]}, log=True, robust=True)
    assert scale == Scale(log=True, note="2 of 5 values are not above 0 and not drawn.")
    np.testing.assert_array_equal(above_zero(values), [NAN, 1e-9, 2.0, NAN, NAN, 5.0])
    assert scale_of({"a": [np.array([1.0, 3.0])]}, log=True, robust=True) == Scale(log=True)


def test_values_below_zero_keep_the_axis_linear() -> None:
    scale = scale_of({"a": [np.array([-3.0, 1.0, 2.0])]}, log=True, robust=True)
    assert scale == Scale(note="The axis is linear, because 1 of 3 values are below 0.")
    zeros = scale_of({"a": [np.zeros(3)]}, log=True, robust=True)
    assert zeros == Scale(note="The axis is linear, because no value is above 0.")
    assert scale_of({"a": [np.full(3, NAN)]}, log=True, robust=True) == Scale()


def test_rounding_below_zero_counts_as_zero() -> None:
    kl = np.array([-1e-10, 0.01, 0.02])
    scale = scale_of({"a": [kl]}, log=True, robust=True)
    assert scale == Scale(log=True, note="1 of 3 values are not above 0 and not drawn.")
    # A value that is small only compared with another run does not count as zero.
    groups = {"a": [np.array([-0.5, 3.0])], "large": [np.array([1e9, 2e9])]}
    assert not scale_of(groups, log=True, robust=True).log


def curve(top: float, low: float = 0.0) -> Array:
    return np.linspace(low, top, 50)


PLAIN: dict[str, dict[str, list[Array]]] = {
    "one run": {"a": [curve(1e6)]},
    "seeds": {"a": [curve(100.0), curve(500.0)], "b": [curve(20.0), curve(30.0)]},
    "just not an outlier": {"a": [curve(1.0)], "b": [curve(OUTLIER_FACTOR)]},
    "one group learns": {"a": [curve(10.0)], "b": [curve(9.3)], "c": [curve(500.0)]},
    "costs": {"a": [curve(-150.0, -1600.0)], "b": [curve(-1500.0, -1700.0)]},
    "constants apart": {"a": [np.full(9, 1e-4)], "b": [np.full(9, 1e-3)]},
    "two kinds of losses": {str(i): [curve(0.01 if i < 10 else 3.0)] for i in range(16)},
    "mostly zeros": {"a": [np.zeros(9)], "b": [np.zeros(9)], "c": [curve(5.0)]},
    "an offset": {"a": [curve(1001.0, 1000.0)], "b": [curve(1050.0, 1000.0)]},
    "no values": {"a": [np.full(9, NAN)], "b": [curve(3.0)], "c": [np.empty(0)]},
    "nothing": {},
}


@pytest.mark.parametrize("groups", PLAIN.values(), ids=PLAIN)
def test_plain_runs_keep_their_whole_range(groups: dict[str, list[Array]]) -> None:
    assert scale_of(groups, log=False, robust=True) == Scale()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("others", [1, 2, 7])
def test_group_with_large_values_leaves_the_range(sign: float, others: int) -> None:
    groups = {f"g{i}": [sign * curve(500.0 - i, 9.0)] for i in range(others)}
    groups["large"] = [sign * curve(5e6, 9e4), sign * curve(4e6, 9e4), sign * curve(3e6, 9e4)]
    low, high = sorted((sign * 500.0, sign * 9.0))
    scale = scale_of(groups, log=False, robust=True)
    assert scale.range == (low, high)
    assert scale.note == (
        f"3 of {others + 3} runs leave the range. A double click shows all values."
    )
    assert scale_of(groups, log=False, robust=False) == Scale()
    assert scale_of({"g": [abs(v) for v in groups["large"]]}, True, True).range is None


def test_seed_that_diverges_leaves_the_range_of_its_group() -> None:
    seeds = [curve(500.0), curve(400.0), curve(450.0)]
    spike = np.append(curve(300.0), 1e9)
    scale = scale_of({"a": [*seeds, spike]}, log=False, robust=True)
    assert scale.range == (0.0, 500.0)
    assert scale.note.startswith("1 of 4 runs leaves the range.")


def test_range_of_all_runs_but_outliers() -> None:
    groups = {name: [(0.5, 1.0)] for name in "bcd"}
    groups |= {"a": [(0.0, 1.0), (-2.0, 3.0)], "e": [(5.0, 100.0)], "f": [(-101.0, 0.0)]}
    assert robust_range(groups) == (-2.0, 100.0)
    # Two groups of six may be outliers, but three of seven groups are not.
    assert robust_range({**groups, "g": [(30.0, 150.0)]}) is None


def test_range_and_the_reason_of_a_linear_axis_are_both_said() -> None:
    groups = {"a": [curve(1.0, -1.0)], "b": [curve(2.0)], "c": [curve(1e5)]}
    scale = scale_of(groups, log=True, robust=True)
    assert scale.range == (-1.0, 2.0)
    assert "below 0. 1 of 3 runs leaves the range." in scale.note


def test_wide_interval_leaves_the_range_and_its_value_does_not() -> None:
    groups = {name: (500.0 + i, 490.0, 510.0) for i, name in enumerate("abc")}
    groups["wide"] = (400.0, 300.0, 1e6)
    scale = scale_of_intervals(groups, robust=True)
    assert scale.range == (300.0, 510.0)
    assert scale.note == "1 of 4 groups leaves the range. A double click shows all values."
    assert scale_of_intervals(groups, robust=False) == Scale()


def test_values_without_intervals_have_a_robust_range() -> None:
    groups = {name: (float(i), NAN, NAN) for i, name in enumerate("abc", start=1)}
    assert scale_of_intervals(groups, robust=True) == Scale()
    groups["few"] = (NAN, NAN, NAN)
    groups["large"] = (-1e6, NAN, NAN)
    assert scale_of_intervals(groups, robust=True).range == (1.0, 3.0)
    assert scale_of_intervals({}, robust=True) == Scale()
