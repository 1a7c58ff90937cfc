"""The sum tree draws the same places as a cumulative sum over its leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polopt.replay.sum_tree import SumTree

#: These sizes give one, two and three levels, also with groups that are not full.
SIZES = [1, 5, 16, 17, 4096, 4097, 70_001]


def filled(size: int, seed: int = 0) -> tuple[SumTree, np.ndarray]:
    """Returns a tree and its leaves. A third of the leaves are 0."""
    rng = np.random.default_rng(seed)
    leaves = rng.random(size) ** 4 * (rng.random(size) < 0.67)
    leaves[size // 2] = 1.0
    tree = SumTree(size)
    tree.update(np.arange(size), leaves)
    return tree, leaves


@pytest.mark.parametrize("size", SIZES)
def test_equals_cumulative_sum(size: int) -> None:
    tree, leaves = filled(size)
    sums = np.cumsum(leaves)
    assert tree.total == pytest.approx(sums[-1], rel=1e-12)
    mass = np.random.default_rng(1).random(2000) * sums[-1] * (1 - 1e-9)
    expected = np.searchsorted(sums, mass, side="right")
    # Sums in another order round differently, so a mass at an edge may fall on either side.
    clear = np.abs(sums[expected] - mass) > 1e-9 * sums[-1]
    clear &= np.abs(sums[expected] - leaves[expected] - mass) > 1e-9 * sums[-1]
    found = tree.descend(mass.copy())
    np.testing.assert_array_equal(found[clear], expected[clear])
    assert clear.mean() > 0.99
    assert (leaves[found] > 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_edges_lead_to_leaves_above_zero(size: int) -> None:
    tree, leaves = filled(size)
    edges = np.concatenate([[0.0, tree.total], np.cumsum(leaves)])
    assert (leaves[tree.descend(edges)] > 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_bits_depend_on_leaves_alone(size: int) -> None:
    """Updates of any number of leaves in any order give the same bits as one update of all
    leaves."""
    rng = np.random.default_rng(2)
    tree, _ = filled(size)
    for count in (1, 2, 3, 40, 300):
        tree.update(rng.integers(0, size, count), rng.random(count))
    start = max(0, size - 200)
    tree.update(np.arange(start, size), rng.random(size - start))
    again = SumTree(size)
    again.update(np.arange(size), tree.leaves)
    uniform = rng.random(500)
    assert tree.total == again.total
    mass = uniform * tree.total
    np.testing.assert_array_equal(tree.descend(mass.copy()), again.descend(mass.copy()))
    for one, other in zip(
        [*tree._levels, *tree._sums], [*again._levels, *again._sums], strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_last_of_equal_places_counts() -> None:
    tree = SumTree(5000)
    tree.update(np.array([7, 4999, 7]), np.array([1.0, 2.0, 3.0]))
    assert tree.leaves[7] == 3.0
    assert tree.total == 5.0


def test_draws_are_stratified_and_proportional() -> None:
    tree = SumTree(4)
    tree.update(np.arange(4), np.array([1.0, 0.0, 2.0, 5.0]))
    found = tree.find(np.random.default_rng(0).random(8))
    assert np.bincount(found, minlength=4).tolist() == [1, 0, 2, 5]


def test_tree_of_zeros_cannot_be_drawn_from() -> None:
    with pytest.raises(ValueError, match="all priorities are 0"):
        SumTree(10).find(np.zeros(2))


@pytest.mark.parametrize("size", SIZES)
def test_nbytes(size: int) -> None:
    tree = SumTree(size)
    held = [*tree._levels, *tree._sums, tree._top]
    assert tree.nbytes == SumTree.nbytes_of(size) == sum(array.nbytes for array in held)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=40),
    st.integers(1, 5000),
    st.floats(0, 1, exclude_max=True),
)
def test_leaf_of_zero_is_never_drawn(values: list[float], size: int, uniform: float) -> None:
    """No leaf of 0 is drawn, even if the leaves differ by 300 orders of magnitude."""
    leaves = np.resize(np.array(values), size)
    leaves[:-1:3] = 0.0
    tree = SumTree(size)
    tree.update(np.arange(size), leaves)
    if tree.total > 0 and np.isfinite(tree.total):
        assert (leaves[tree.find(np.full(7, uniform))] > 0).all()
