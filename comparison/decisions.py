"""Decides pairs of variants from the scores of their seeds, at looks that were planned.

A decision is a pure function of the rules and the scores. The same scores always give the same
decisions, because random splits are drawn with the seed in the rules.

**Difference.** The null hypothesis of a pair says that both variants have the same distribution of
scores. The scores of both variants are then split at random into two groups, and the p-value is the
share of the splits whose absolute difference of means is at least the measured one. All splits are
used for up to 10 seeds of each variant. For more seeds, `_NUM_DRAWN` splits are drawn, and the
measured split is one of them, so the test stays exact (Hemerik and Goeman, "Exact testing with
random permutations", 2018). With K looks, the p-value has to be at most `level / K` at one of them
(Bonferroni).

**Several pairs.** All pairs together keep the level by a closed test (Marcus, Peritz and Gabriel,
1976). A partition of the variants says which variants are equal. It is rejected as soon as one of
its n equal pairs is rejected at `level / n`. A pair is different as soon as all partitions in
which it is equal are rejected.

**Equal within a margin M.** Two one-sided tests (Schuirmann, 1987). Each is such a permutation
test, after the scores of one variant were shifted by M. Both must reject at `level`, divided by the
number of looks and the number of pairs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Pair = tuple[str, str]
#: All splits are used if they are at most `_MOST_SPLITS`. Otherwise, `_NUM_DRAWN` are drawn.
_MOST_SPLITS, _NUM_DRAWN = 200_000, 20_000
#: Sums that differ by less than this share of the largest sum are equal up to rounding.
_ROUNDING = 1e-10
#: The number of partitions grows fast with the number of variants. 8 variants have 4,140.
MOST_VARIANTS = 8
BETTER, EQUAL, OPEN, UNDECIDED = "better", "equal", "running", "not decided"


@dataclass(frozen=True)
class DecisionRules:
    """What is decided, when, and at which level.

    Attributes:
        looks: number of seeds of each variant at each look, increasing.
        level: largest chance that any pair of equal variants is called different. Also the largest
            chance that any pair with a difference of at least `equal_within` is called equal.
        equal_within: the largest difference of means that counts as equal. None means that no pair
            is called equal.
        draw_seed: seed of the random splits.
    """

    looks: tuple[int, ...]
    level: float = 0.05
    equal_within: float | None = None
    draw_seed: int = 0

    @property
    def level_of_look(self) -> float:
        """The largest p-value with which two variants are different at a look, without others."""
        return self.level / len(self.looks)

    def smallest_p(self) -> float:
        """Returns the smallest p-value that a pair can have at the last look."""
        num_splits = math.comb(2 * self.looks[-1], self.looks[-1])
        return 2.0 / num_splits if num_splits <= _MOST_SPLITS else 1.0 / _NUM_DRAWN


@dataclass(frozen=True)
class PairDecision:
    """The decision about a pair of variants.

    Attributes:
        first: name of a variant.
        second: name of another variant.
        answer: `better`, `equal`, `running` or `not decided`. `running` means that more seeds are
            needed. `not decided` means that the last look has passed.
        better: name of the better variant, or an empty string.
        seeds: number of seeds of each variant that the decision has used.
        differences: the difference of means, first minus second, at each look so far.
        p_values: the p-value at each look so far.
    """

    first: str
    second: str
    answer: str = OPEN
    better: str = ""
    seeds: int = 0
    differences: tuple[float, ...] = ()
    p_values: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """The answer in words."""
        return f"{self.better} better" if self.answer == BETTER else self.answer


@dataclass(frozen=True)
class Decisions:
    """The decisions about all pairs.

    Attributes:
        pairs: the decisions.
        needed: for each variant that needs more seeds, the number of seeds at its next look. It is
            empty if the comparison has ended.
    """

    pairs: tuple[PairDecision, ...]
    needed: Mapping[str, int] = field(default_factory=dict)


def filled(
    scores: Mapping[str, Sequence[float | None]], looks: Sequence[int], failed: float | None = None
) -> dict[str, list[float]]:
    """Replaces the scores of seeds that crashed or diverged.

    Args:
        scores: scores of each variant in the order of its seeds. None for a failed seed.
        looks: see `DecisionRules`.
        failed: the score of a failed seed. None means the worst finite score of all variants among
            the seeds until the look of the failed seed. This number does not change with later
            seeds. It is 0 if all scores are infinite or NaN.
    """
    found: dict[str, list[float]] = {}
    for name, values in scores.items():
        found[name] = []
        for number, value in enumerate(values):
            if value is None and failed is not None:
                value = failed
            elif value is None:
                until = next((look for look in looks if number < look), len(values))
                known = [v for other in scores.values() for v in other[:until] if v is not None]
                value = min(known, default=0.0)
            found[name].append(float(value))
    return found


def decide(scores: Mapping[str, Sequence[float]], rules: DecisionRules) -> Decisions:
    """Decides all pairs, look by look.

    A pair uses no seeds after the look that has decided it. A variant whose pairs are all decided
    needs no more seeds.

    Args:
        scores: scores of each variant in the order of its seeds. Higher is better. Seeds after the
            first missing seed are left out.
        rules: the rules.
    """
    names = list(scores)
    tests = {pair: _Test(scores[pair[0]], scores[pair[1]], rules) for pair in _pairs(names)}
    families = [family for family in _equal_pairs(names) if family]
    decided: dict[Pair, str] = {}
    needed: dict[str, int] = {}
    for look in rules.looks:
        open_pairs = [pair for pair in tests if pair not in decided]
        wanted = dict.fromkeys(itertools.chain(*open_pairs), look)
        needed = {name: look for name in wanted if len(scores[name]) < look}
        if needed or not open_pairs:
            break
        for pair in open_pairs:
            tests[pair].look_at(look)
        rejected = [  # whether each family is rejected by now
            any(tests[pair].is_different(rules.level / len(family)) for pair in family)
            for family in families
        ]
        for pair in open_pairs:
            holds = (r for r, family in zip(rejected, families, strict=True) if pair in family)
            if tests[pair].is_equal(rules.level / len(tests)):
                decided[pair] = EQUAL
            elif all(holds):
                decided[pair] = BETTER
    found = []
    for pair, test in tests.items():
        answer = decided.get(pair, OPEN if needed else UNDECIDED)
        better = pair[test.differences[-1] < 0.0] if answer == BETTER else ""
        seeds = rules.looks[len(test.differences) - 1] if test.differences else 0
        differences, p_values = tuple(test.differences), tuple(test.p_values)
        found.append(PairDecision(*pair, answer, better, seeds, differences, p_values))
    return Decisions(tuple(found), needed)


def _pairs(names: Sequence[str]) -> list[Pair]:
    return list(itertools.combinations(names, 2))


def _equal_pairs(names: Sequence[str]) -> Iterator[frozenset[Pair]]:
    """Yields, for each partition of the variants, the pairs within its parts."""
    for parts in _partitions(list(names)):
        yield frozenset(itertools.chain.from_iterable(_pairs(part) for part in parts))


def _partitions(names: list[str]) -> Iterator[list[list[str]]]:
    if not names:
        yield []
        return
    for parts in _partitions(names[1:]):
        yield [[names[0]], *parts]
        for number, part in enumerate(parts):
            yield [*parts[:number], [names[0], *part], *parts[number + 1 :]]


class _Test:
    """The tests of one pair.

    Attributes:
        differences: the difference of means at each look so far.
        p_values: the p-value of the difference at each look so far.
    """

    def __init__(
        self, first: Sequence[float], second: Sequence[float], rules: DecisionRules
    ) -> None:
        self._first, self._second, self._rules = first, second, rules
        self._equal_p_values: list[float] = []
        self.differences: list[float] = []
        self.p_values: list[float] = []

    def look_at(self, seeds: int) -> None:
        """Tests the scores of this number of seeds."""
        splits = _splits(seeds, self._rules.draw_seed)
        scores = np.array([*self._first[:seeds], *self._second[:seeds]], np.float64)
        margin = self._rules.equal_within
        rounding = _ROUNDING * (float(np.abs(scores).max()) + (margin or 0.0))
        found = splits @ scores / seeds
        self.differences.append(float(found[0]))
        self.p_values.append(_share(np.abs(found), rounding))
        if margin is not None:
            # The differences if all scores of the first variant were larger by the margin
            shift = margin * (splits[:, :seeds].sum(axis=1) / seeds)
            sides = (_one_sided(shift + found, rounding), _one_sided(shift - found, rounding))
            self._equal_p_values.append(max(sides))

    def is_different(self, level: float) -> bool:
        """Returns whether a look so far has found a difference at this level."""
        return min(self.p_values, default=1.0) <= level / len(self._rules.looks)

    def is_equal(self, level: float) -> bool:
        """Returns whether a look so far has found equality within the margin at this level."""
        return min(self._equal_p_values, default=1.0) <= level / len(self._rules.looks)


def _share(statistics: Array, rounding: float) -> float:
    """Returns the share of the statistics that are at least the first, which is the measured one.
    Statistics that are equal up to rounding are equal."""
    return float((statistics >= statistics[0] - rounding).mean())


def _one_sided(statistics: Array, rounding: float) -> float:
    """Returns the share of these statistics, and of those of the mirror images of the splits, that
    are at least the first."""
    as_large = statistics >= statistics[0] - rounding
    return float(as_large.mean() + (-statistics >= statistics[0] - rounding).mean()) / 2.0


@functools.lru_cache(maxsize=8)
def _splits(seeds: int, draw_seed: int) -> Array:
    """Returns ways to split the scores of two variants into two groups of this number of seeds: 1
    for the first group, and -1 for the second. The first row is the measured split. If all splits
    are used, only one of each split and its mirror image, which swaps both groups, is among them.

    Returns:
        an array of shape `[splits, 2 * seeds]`.
    """
    measured = np.repeat([1.0, -1.0], seeds)
    if math.comb(2 * seeds, seeds) > _MOST_SPLITS:
        drawn = np.tile(measured, (_NUM_DRAWN, 1))
        drawn[1:] = np.random.default_rng([draw_seed, seeds]).permuted(drawn[1:], axis=1)
        return drawn
    others = list(itertools.combinations(range(1, 2 * seeds), seeds - 1))
    signs = np.full((len(others), 2 * seeds), -1.0)
    signs[:, 0] = 1.0  # the first score is in the first group, so there is no mirror image
    if seeds > 1:
        np.put_along_axis(signs, np.array(others), 1.0, axis=1)
    return signs
