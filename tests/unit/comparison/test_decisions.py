"""Decisions about pairs, compared with closed forms and with all relabelings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scipy import stats

from polopt.comparison.decisions import (
    BETTER,
    EQUAL,
    OPEN,
    UNDECIDED,
    DecisionRules,
    Decisions,
    PairDecision,
    decide,
    filled,
)

LOW, HIGH = [1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0]


def of_two(first: Sequence[float], second: Sequence[float], rules: DecisionRules) -> PairDecision:
    (pair,) = decide({"A": first, "B": second}, rules).pairs
    return pair


def test_smallest_p_value_of_five_seeds() -> None:
    """Of the 252 ways to split ten scores, two are as extreme as the measured split."""
    pair = of_two(HIGH, LOW, DecisionRules((5,)))
    assert pair.p_values == (pytest.approx(2 / 252),)
    assert DecisionRules((5,)).smallest_p() == pytest.approx(2 / 252)
    assert (pair.answer, pair.better, pair.seeds) == (BETTER, "A", 5)
    assert pair.differences == (pytest.approx(10.0),)
    assert of_two(LOW, HIGH, DecisionRules((5,))).better == "B"
    # At the smaller level, 252 splits do not suffice.
    assert of_two(HIGH, LOW, DecisionRules((5,), 2 / 252 + 1e-6)).answer == BETTER
    assert of_two(HIGH, LOW, DecisionRules((5,), 2 / 252 - 1e-6)).answer == UNDECIDED


@pytest.mark.parametrize("num_seeds", [4, 6, 9])
def test_p_value_is_that_of_scipy(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    first, second = rng.normal([[1.0], [0.0]], size=(2, num_seeds))
    expected = stats.permutation_test(
        (first, second), lambda a, b, axis: abs(a.mean(axis) - b.mean(axis)), vectorized=True,
        alternative="greater", n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert of_two(first, second, DecisionRules((num_seeds,))).p_values[0] == pytest.approx(expected)


def test_random_splits_agree_with_the_closed_form() -> None:
    """A block of 12 seeds has 2,704,156 splits, so random ones are used. If scores are 0 or 1, the
    number of ones of the first variant has a hypergeometric distribution."""
    first, second = [1.0] * 9 + [0.0] * 3, [1.0] * 4 + [0.0] * 8
    ones = np.arange(14)  # of the first variant, if 13 of the 24 scores are 1
    as_extreme = np.abs(ones - (13 - ones)) >= 5
    expected = float(stats.hypergeom(24, 13, 12).pmf(ones)[as_extreme].sum())
    found = of_two(first, second, DecisionRules((12,)))
    assert found.p_values[0] == pytest.approx(expected, abs=4 * math.sqrt(expected / 50_000))
    assert of_two(first, second, DecisionRules((12,))) == found
    assert of_two(first, second, DecisionRules((12,), draw_seed=1)).p_values != found.p_values


def relabelings(block: Sequence[float]) -> Iterator[tuple[list[float], list[float]]]:
    """Yields all ways to give the scores of a block to two variants."""
    size = len(block) // 2
    for chosen in itertools.combinations(range(2 * size), size):
        rest = [score for place, score in enumerate(block) if place not in chosen]
        yield [block[place] for place in chosen], rest


@pytest.mark.parametrize("level", [0.1, 0.2, 0.3])
def test_both_looks_together_keep_the_level(level: float) -> None:
    """If both variants have the same distribution, all 20 * 20 relabelings within the two blocks of
    three seeds are equally likely. The share of them that is called different is at most the level.
    Without the division of the level over the looks, it would be larger."""
    rng = np.random.default_rng(3)
    blocks = rng.normal(size=(2, 6))
    wrong, at_first = 0, 0
    for (a, b), (c, d) in itertools.product(relabelings(blocks[0]), relabelings(blocks[1])):
        pair = of_two([*a, *c], [*b, *d], DecisionRules((3, 6), level))
        wrong += pair.answer == BETTER
        at_first += pair.answer == BETTER and pair.seeds == 3
    assert 0.5 * level * 400 < wrong <= level * 400
    assert at_first <= level / 2 * 400


@pytest.mark.parametrize("level", [0.1, 0.3])
def test_one_look_spends_the_level_exactly(level: float) -> None:
    """Of the 20 relabelings of three seeds, a whole number of mirror images is called different."""
    block = np.random.default_rng(3).normal(size=6).tolist()
    wrong = sum(
        of_two(a, b, DecisionRules((3,), level)).answer == BETTER for a, b in relabelings(block)
    )
    assert wrong == 2 * math.floor(level * 10 + 1e-9)


def test_equal_scores_are_never_different() -> None:
    """All statistics are equal. Equal values do not cross the boundary."""
    assert of_two([1.0] * 10, [1.0] * 10, DecisionRules((5, 10), 0.5)).answer == UNDECIDED
    # 0.1 + 0.2 and 0.3 differ by rounding only.
    scores = [0.1 + 0.2, 0.3] * 5
    assert of_two(scores, scores[::-1], DecisionRules((5, 10), 0.5)).answer == UNDECIDED


def test_level_is_divided_over_the_looks() -> None:
    """The p-value of one exchanged seed, 6 / 252, is enough for one look, but not for two."""
    mixed = [*HIGH[:4], 4.5], [*LOW[:4], 11.5]
    p_value = of_two(*mixed, DecisionRules((5,))).p_values[0]
    assert 2 / 252 < p_value < 0.05
    assert of_two(*mixed, DecisionRules((5,), p_value + 1e-9)).answer == BETTER
    assert of_two(*mixed, DecisionRules((5, 10), 2 * p_value - 1e-9)).answer == OPEN
    later = of_two(
        [*mixed[0], *HIGH], [*mixed[1], *LOW], DecisionRules((5, 10), 2 * p_value - 1e-9)
    )
    assert (later.answer, later.seeds) == (BETTER, 10)


def test_pairs_share_the_level() -> None:
    """With three variants, the first difference needs the level / 3. Then at most one pair can be
    equal, and has the whole level."""
    scores = {
        "A": [30.0 + s for s in LOW],
        "B": [0.0 + s for s in LOW],
        "C": [0.5 + s for s in LOW],
    }
    needed = 3 * 2 / 252
    assert {p.answer for p in decide(scores, DecisionRules((5,), needed - 1e-6)).pairs} == {
        UNDECIDED
    }
    found = decide(scores, DecisionRules((5,), needed + 1e-6)).pairs
    assert [pair.text for pair in found] == ["A better", "A better", UNDECIDED]
    closer = {**scores, "C": [3.0 + s for s in LOW]}
    p_value = of_two(closer["B"], closer["C"], DecisionRules((5,))).p_values[0]
    assert 0.05 / 3 < p_value < 0.05, "the pair B, C would not pass at the level / 3"
    found = decide(closer, DecisionRules((5,), 0.05)).pairs
    assert [pair.text for pair in found] == ["A better", "A better", "C better"]


def test_four_equal_variants_keep_the_level() -> None:
    """All 6 pairs together. Without the closed test over pairs, 10 to 20 percent would be wrong."""
    rng = np.random.default_rng(1)
    rules = DecisionRules((4, 8), 0.2)
    wrong = 0
    for _ in range(400):
        scores = dict(zip("ABCD", rng.normal(size=(4, 8)).tolist(), strict=True))
        wrong += any(pair.answer == BETTER for pair in decide(scores, rules).pairs)
    assert wrong <= 400 * 0.2 + 2 * math.sqrt(400 * 0.2 * 0.8)


def test_equal_within_a_margin_needs_both_sides() -> None:
    scores = [0.0, 0.1, 0.2, 0.3, 0.4]
    shifted = [score + 0.9 for score in scores]
    assert of_two(scores, scores, DecisionRules((5,), equal_within=1.0)).answer == EQUAL
    assert of_two(scores, scores, DecisionRules((5,), equal_within=0.01)).answer == UNDECIDED
    for first, second in ((scores, shifted), (shifted, scores)):
        assert of_two(first, second, DecisionRules((5,), equal_within=2.0)).answer == EQUAL
        assert of_two(first, second, DecisionRules((5,), equal_within=0.95)).answer == BETTER


def test_smallest_p_value_of_equality() -> None:
    """Of the 252 splits, only the measured one is as far from the margin on each side."""
    scores = [10.0 * score for score in LOW], [10.0 * score + 1.0 for score in LOW]
    p_value = 1 / 252
    assert of_two(*scores, DecisionRules((5,), p_value + 1e-6, 1000.0)).answer == EQUAL
    assert of_two(*scores, DecisionRules((5,), p_value - 1e-6, 1000.0)).answer == UNDECIDED


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_difference_of_the_margin_is_equal_at_most_at_the_level(sign: float) -> None:
    """Scores of B that are shifted by the margin are exchangeable with those of A. So the share of
    the relabelings that is called equal is at most the level."""
    rng = np.random.default_rng(4)
    blocks, margin, level = rng.normal(size=(2, 6)), 1.3, 0.2
    wrong = 0
    for (a, b), (c, d) in itertools.product(relabelings(blocks[0]), relabelings(blocks[1])):
        shifted = [score + sign * margin for score in (*b, *d)]
        pair = of_two([*a, *c], shifted, DecisionRules((3, 6), level, equal_within=margin))
        wrong += pair.answer == EQUAL
    assert level * 400 / 4 < wrong <= level * 400


def texts(found: Decisions) -> list[str]:
    return [pair.text for pair in found.pairs]


def test_decided_variants_need_no_more_seeds() -> None:
    rules = DecisionRules((5, 10), 0.1)
    found = decide({"A": [9.0 + s for s in HIGH], "B": LOW, "C": LOW}, rules)
    assert found.needed == {"B": 10, "C": 10}
    assert texts(found) == ["A better", "A better", OPEN]
    # The seeds of B and C at the next look do not change the decisions about A.
    more = {"A": [9.0 + s for s in HIGH], "B": [*LOW, *[99.0] * 5], "C": [*LOW, *[99.0] * 5]}
    found = decide(more, rules)
    assert not found.needed
    assert texts(found) == ["A better", "A better", UNDECIDED]
    assert [pair.seeds for pair in found.pairs] == [5, 5, 10]
    assert len(found.pairs[0].differences) == 1


def test_missing_seeds_are_needed_first() -> None:
    rules = DecisionRules((5, 10))
    assert decide({"A": [], "B": LOW}, rules).needed == {"A": 5}
    assert decide({"A": LOW, "B": LOW}, rules).needed == {"A": 10, "B": 10}
    assert decide({"A": LOW, "B": [*LOW, *LOW]}, rules).needed == {"A": 10}


def test_failed_seeds_get_the_worst_score_until_their_look() -> None:
    scores = {"A": [3.0, None, 5.0, None], "B": [2.0, 4.0, 1.0, 0.5]}
    assert filled(scores, (2, 4)) == {"A": [3.0, 2.0, 5.0, 0.5], "B": [2.0, 4.0, 1.0, 0.5]}
    # The score of the first look does not change with the later seeds.
    early = {name: values[:2] for name, values in scores.items()}
    assert filled(early, (2, 4))["A"] == [3.0, 2.0]
    assert filled(scores, (2, 4), failed=-7.0)["A"] == [3.0, -7.0, 5.0, -7.0]
    assert filled({"A": [None], "B": [None]}, (2,)) == {"A": [0.0], "B": [0.0]}
