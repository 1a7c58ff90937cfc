"""Training intensity is exact at every step and across restores. Blocked times are measured."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polopt.common.config import ConfigError
from polopt.replay.rate_limiter import RateLimiter

BATCH = 32
intensities = st.one_of(st.integers(1, 20), st.sampled_from([0.1, 0.25, 1 / 3, 0.7, 2.5, 31.7]))


def restored(limiter: RateLimiter, rows: int | None = None) -> RateLimiter:
    """Returns a new limiter that continues from the state of another limiter. The state goes
    through JSON."""
    state = json.loads(json.dumps(limiter.get_state()))
    again = RateLimiter(limiter.intensity, limiter.min_size, limiter.error_buffer)
    again.set_state(state, rows)
    return again


def step(limiter: RateLimiter, fragment: int) -> int:
    """Makes one step of a synchronous strategy. Returns the number of rows learned."""
    limiter.inserted(fragment)
    before = limiter.num_learned
    while limiter.can_learn(BATCH):
        limiter.learned(BATCH)
    return limiter.num_learned - before


@settings(deadline=None, max_examples=200)
@given(
    intensities,
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=60),
)
def test_error_is_at_most_one_batch(
    intensity: float, min_size: int, fragments: list[tuple[int, bool]]
) -> None:
    exact = Fraction(intensity).limit_denominator(1_000_000)
    limiter, counted, missing = RateLimiter(intensity, min_size), 0, min_size
    for fragment, kill in fragments:
        if kill:
            limiter = restored(limiter)
        step(limiter, fragment)
        counted += max(0, fragment - missing)
        missing = max(0, missing - fragment)
        assert limiter.num_counted == counted
        assert 0 <= exact * counted - limiter.num_learned < BATCH or missing
        assert limiter.credit == exact * counted - limiter.num_learned
        assert missing == 0 or limiter.num_learned == 0


@pytest.mark.parametrize("intensity", [1, 8, 0.25])
def test_no_burst_after_a_restore_without_rows(intensity: float) -> None:
    """sheeprl had this fault. After a restore, it learned at once for all rows that filled its
    buffer again."""
    limiter = RateLimiter(intensity, min_size=1000)
    for _ in range(300):
        step(limiter, 10)
    usual = 10 * intensity + BATCH
    limiter = restored(limiter, rows=0)
    learned = [step(limiter, 10) for _ in range(300)]
    assert learned[:99] == [0] * 99  # until the buffer has 1,000 rows again
    assert max(learned) <= usual
    assert sum(learned[100:]) == pytest.approx(2000 * intensity, abs=BATCH)


def test_rows_that_cannot_be_drawn_give_no_credit() -> None:
    limiter = RateLimiter(2.0, min_size=0)
    limiter.inserted(5, can_draw=False)
    assert not limiter.can_learn(1)
    limiter.inserted(4)  # the first of these rows still fills the buffer
    assert (limiter.credit, limiter.num_counted) == (6, 3)
    limiter.inserted(2)
    assert limiter.credit == 10


def test_delivered_intensity() -> None:
    limiter = RateLimiter(8, min_size=64)
    assert limiter.delivered == 0.0
    for _ in range(104):
        step(limiter, 4)
    assert limiter.num_counted == 416 - 64
    assert limiter.delivered == 8.0


def test_changed_intensity_counts_from_now_on() -> None:
    limiter = RateLimiter(1, min_size=0)
    step(limiter, 320)
    limiter.set_intensity(2)
    assert step(limiter, 32) == 64


@settings(deadline=None, max_examples=50)
@given(intensities, st.integers(1, 50), st.integers(0, 100), st.randoms(use_true_random=False))
def test_error_buffer_bounds_both_sides_and_nobody_is_stuck(
    intensity: float, fragment: int, slack: int, random: Any
) -> None:
    exact = Fraction(intensity).limit_denominator(1_000_000)
    least = -int(-(BATCH + exact * fragment) // 1)
    limiter = RateLimiter(intensity, min_size=100, error_buffer=least + slack)
    limiter.check(BATCH, fragment)
    for _ in range(300):
        can = [limiter.can_insert(fragment), limiter.can_learn(BATCH)]
        assert any(can)
        if can[0] and (random.random() < 0.5 or not can[1]):
            limiter.inserted(fragment)
        else:
            limiter.learned(BATCH)
        assert 0 <= limiter.credit <= least + slack


def test_error_buffer_that_would_block_both_is_refused() -> None:
    """The least buffer is a batch of 32 rows, plus the credit of 2 for each of 10 rows."""
    limiter = RateLimiter(2, min_size=0, error_buffer=51)
    with pytest.raises(ConfigError, match=r"'error_buffer': got 51; allowed: 52 or more"):
        limiter.check(32, 10)
    RateLimiter(2, min_size=0, error_buffer=52).check(32, 10)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "fast"])
def test_wrong_intensity_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"'training_intensity': got .*allowed: 0.000001 or more"):
        RateLimiter(wrong, 0)


def test_intensity_of_none_has_no_limit() -> None:
    limiter = RateLimiter(None, min_size=10)
    assert not limiter.can_learn(BATCH)
    limiter.inserted(10)
    assert limiter.can_learn(BATCH)
    assert limiter.can_insert(10**9)
    limiter.learned(BATCH)
    assert limiter.can_learn(BATCH)
    assert restored(limiter).num_learned == BATCH


def test_error_buffer_is_the_largest_credit() -> None:
    limiter = RateLimiter(1, min_size=10, error_buffer=64)
    assert limiter.can_insert(74)  # the first 10 rows give no credit
    assert not limiter.can_insert(75)
    limiter.inserted(14)
    assert limiter.can_insert(60)
    assert not limiter.can_insert(61)


@pytest.mark.parametrize(
    "change",
    [
        {"credit": [10**12, 1]},
        {"credit": [-(10**12), 1]},
        {"credit": [1, 0]},
        {"num_learned": -1},
        {"num_counted": 2**70},
        {"missing": -5},
    ],
)
def test_edited_state_is_refused(change: dict[str, Any]) -> None:
    limiter = RateLimiter(1.0, 10)
    state = limiter.get_state()
    with pytest.raises((ValueError, ZeroDivisionError)):
        limiter.set_state(state | change)
    assert limiter.get_state() == state
