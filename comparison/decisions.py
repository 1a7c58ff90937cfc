"""Decides pairs of variants from the scores of their seeds, at looks that were planned.

A decision is a pure function of the rules and the scores. The same scores always give the same
decisions, because random permutations are drawn with the seed in the rules.

**Difference.** The null hypothesis of a pair says that both variants have the same distribution of
scores. The test is a permutation test in groups, as in AdaStop (Mathieu et al., "AdaStop: adaptive
statistical testing for sound comparisons of Deep RL agents", arXiv 2306.10882). The seeds between
two looks are a block. A *path* swaps seeds between the two variants within each block. Its
statistic at a look is the absolute difference of the sums of all scores so far. If the hypothesis
is true, the measured path is one of the paths, and each is equally likely. At the first of K looks,
the paths with the largest statistics cross the boundary, at most the share `level / K`. At look k,
the paths that have not crossed before can cross, until the share `level * k / K` of all paths has
crossed. The variants differ if the measured path crosses. So the chance of a wrong decision is at
most `level`, over all looks together. The paths are all paths while there are at most
`_MOST_PATHS` of them. The blocks after that are permuted at random, once for each path. The test
stays exact, because the measured path is among the paths (Hemerik and Goeman, "Exact testing with
random permutations", 2018).

**Several pairs.** All pairs together keep the level by a closed test (Marcus, Peritz and Gabriel,
1976). A partition of the variants says which variants are equal. It is rejected as soon as one of
its n equal pairs is rejected at `level / n`. A pair is different as soon as all partitions in
which it is equal are rejected.

**Equal within a margin M.** Two one-sided tests (Schuirmann, 1987). Both tests use the same paths,
after the scores of one variant were shifted by M. Both must reject at `level`, divided by the
number of pairs.
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
#: All paths are used if they are at most this many. Otherwise, at least `_LEAST_DRAWN` are used.
_MOST_PATHS, _LEAST_DRAWN = 200_000, 50_000
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
        draw_seed: seed of the random permutations.
    """

    looks: tuple[int, ...]
    level: float = 0.05
    equal_within: float | None = None
    draw_seed: int = 0

    def smallest_p(self) -> float:
        """Returns the smallest p-value that two variants can have at the last look."""
        return 2.0 / math.prod(map(_num_splits, self.blocks))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of seeds of each variant between two looks."""
        return tuple(b - a for a, b in itertools.pairwise((0, *self.looks)))


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
        p_values: the p-value at each look so far, as if this look were the only one.
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
            seeds. It is 0 if there is no finite score.
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
    decided: dict[Pair, tuple[str, int]] = {}
    needed: dict[str, int] = {}
    for number, look in enumerate(rules.looks):
        open_pairs = [pair for pair in tests if pair not in decided]
        wanted = dict.fromkeys(itertools.chain(*open_pairs), look)
        needed = {name: look for name in wanted if len(scores[name]) < look}
        if needed or not open_pairs:
            break
        rejected = [  # whether each family is rejected by now
            any(tests[pair].differs_at(rules.level / len(family)) <= number for pair in family)
            for family in families
        ]
        for pair in open_pairs:
            holds = (r for r, family in zip(rejected, families, strict=True) if pair in family)
            if tests[pair].equal_at(rules.level / len(tests)) <= number:
                decided[pair] = EQUAL, look
            elif all(holds):
                decided[pair] = BETTER, look
    found = []
    for pair, test in tests.items():
        answer, seeds = decided.get(pair, (OPEN if needed else UNDECIDED, 0))
        seeds = seeds or min(rules.looks[-1], *(len(scores[name]) for name in pair))
        used = [look for look in rules.looks if look <= seeds]
        differences, p_values = test.differences[: len(used)], test.p_values[: len(used)]
        better = pair[differences[-1] < 0.0] if answer == BETTER else ""
        seeds = used[-1] if used else 0
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
    """The tests of one pair, at all looks for which both variants have seeds.

    Attributes:
        differences: the difference of means at each look.
        p_values: the p-value of the difference at each look, as if this look were the only one.
    """

    def __init__(
        self, first: Sequence[float], second: Sequence[float], rules: DecisionRules
    ) -> None:
        self._rules = rules
        self._looks = [n for n in rules.looks if n <= min(len(first), len(second))]
        paths = _paths(rules.blocks, rules.draw_seed)
        sums = np.zeros((len(self._looks), paths.num_paths))
        ones = np.zeros_like(sums) if rules.equal_within is not None else None
        total: Array = np.zeros(paths.num_paths)
        total_ones: Array = np.zeros(paths.num_paths)
        for number, look in enumerate(self._looks):
            begin = look - rules.blocks[number]
            block = np.array([*first[begin:look], *second[begin:look]], np.float64)
            total = total + paths.sums(number, block)
            sums[number] = total
            if ones is not None:
                is_first = np.arange(len(block)) < len(block) // 2
                total_ones = total_ones + paths.sums(number, is_first.astype(np.float64))
                ones[number] = total_ones
        self._sums, self._ones = sums, ones
        largest = max(map(abs, (*first, *second)), default=0.0) + (rules.equal_within or 0.0)
        self._rounding = _ROUNDING * largest * (self._looks[-1] if self._looks else 0)
        self._absolute = np.abs(sums)
        self._found: dict[float, float] = {}
        self.differences = tuple(float(s[0]) / n for s, n in zip(sums, self._looks, strict=True))
        self.p_values = tuple(
            float((a >= a[0] - self._rounding).mean()) for a in self._absolute
        )  # fmt: skip

    def differs_at(self, level: float) -> float:
        """Returns the number of the look that finds a difference at this level, or infinity."""
        if level not in self._found:
            whole = self._rules.level
            # A test at a smaller level rejects no more, so most pairs need only one test.
            passes = level >= whole or self.differs_at(whole) < math.inf
            self._found[level] = self._crossed(self._absolute, level) if passes else math.inf
        return self._found[level]

    def equal_at(self, level: float) -> float:
        """Returns the number of the look that finds equality within the margin, or infinity."""
        margin = self._rules.equal_within
        if margin is None or self._ones is None:
            return math.inf
        above = self._crossed(margin * self._ones - self._sums, level)  # first - second < margin
        if above == math.inf:
            return above
        return max(above, self._crossed(self._sums + margin * self._ones, level))

    def _crossed(self, statistics: Array, level: float) -> float:
        """Returns the number of the look at which the first path crosses the boundary.

        Args:
            statistics: the statistic of each path at each look, `[looks, paths]`.
            level: the share of paths that cross in all looks together.
        """
        num_paths = statistics.shape[1]
        inside = np.ones(num_paths, bool)
        for number, values in enumerate(statistics):
            spent = level * (number + 1) / len(self._rules.looks)
            left = values[inside]
            may_cross = math.floor(spent * num_paths + 1e-9) - (num_paths - len(left))
            if may_cross <= 0:
                continue
            if may_cross >= len(left):
                return number
            place = len(left) - may_cross - 1
            boundary = np.partition(left, place)[place]
            # Equal values are on the same side of the boundary, and do not cross it.
            crosses = inside & (values > boundary + self._rounding)
            if crosses[0]:
                return number
            inside &= ~crosses
        return math.inf


class _Paths:
    """All paths, or a random part of them. The path with the number 0 is the measured one.

    Args:
        blocks: number of seeds of each variant in each block.
        draw_seed: seed of the random permutations.
    """

    def __init__(self, blocks: Sequence[int], draw_seed: int) -> None:
        rng = np.random.default_rng(draw_seed)
        num_whole, whole = 0, 1  # the first blocks, whose permutations all occur
        for block in blocks:
            if whole * _num_splits(block) > _MOST_PATHS:
                break
            num_whole, whole = num_whole + 1, whole * _num_splits(block)
        repeats = 1 if num_whole == len(blocks) else -(-_LEAST_DRAWN // whole)
        self.num_paths = whole * repeats
        numbers = np.arange(self.num_paths) % whole
        self._signs: list[Array] = []  # of each block, `[splits, 2 * seeds]`
        self._split: list[Array] = []  # the split of each path in each block, `[paths]`
        for place, block in enumerate(blocks):
            if place < num_whole:
                self._signs.append(_all_splits(block))
                self._split.append(numbers % _num_splits(block))
                numbers = numbers // _num_splits(block)
                continue
            if _num_splits(block) <= _MOST_PATHS:
                self._signs.append(_all_splits(block))
                split = rng.integers(0, _num_splits(block), self.num_paths)
                split[0] = 0
            else:
                measured = np.repeat(np.array([1.0, -1.0], np.float32), block)
                drawn = rng.permuted(np.tile(measured, (self.num_paths, 1)), axis=1)
                drawn[0] = measured
                self._signs.append(drawn)
                split = np.arange(self.num_paths)
            self._split.append(split)

    def sums(self, block: int, scores: Array) -> Array:
        """Returns the sum of the scores of the first variant minus that of the second, for each
        path.

        Args:
            block: number of the block.
            scores: scores of the first variant, and then of the second.
        """
        return np.asarray((self._signs[block] @ scores)[self._split[block]])


@functools.lru_cache(maxsize=4)
def _paths(blocks: tuple[int, ...], draw_seed: int) -> _Paths:
    return _Paths(blocks, draw_seed)


def _num_splits(block: int) -> int:
    return math.comb(2 * block, block)


@functools.lru_cache(maxsize=4)
def _all_splits(block: int) -> Array:
    """Returns all ways to split the seeds of a block: 1 for the first variant, and -1 for the
    second. The first row is the measured split."""
    chosen = np.array(list(itertools.combinations(range(2 * block), block)))
    signs = np.full((len(chosen), 2 * block), -1.0)
    np.put_along_axis(signs, chosen, 1.0, axis=1)
    return signs
