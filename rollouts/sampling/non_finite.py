"""Finds non-finite values in sampled batches and in gradients."""

from __future__ import annotations

import math

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients

_no_warnings = np.errstate(all="ignore")
#: In float32, the squares of numbers that are much larger than this number are infinite.
_LARGEST = 1e18


@_no_warnings
def all_finite(array: np.ndarray) -> bool:
    """Returns whether all numbers of an array are finite. Only arrays of floats are checked, and
    the result for other arrays is True."""
    return _all_finite(array)


def _all_finite(array: np.ndarray) -> bool:
    if array.dtype.names is not None:
        return all(_all_finite(array[name]) for name in array.dtype.names)
    if array.dtype.kind != "f":
        return True
    # The sum needs one pass and no temporary array. If the sum is not finite, finite numbers may
    # have overflowed, so each number is checked.
    return math.isfinite(array.sum()) or bool(np.isfinite(array).all())


def surely_finite(array: np.ndarray) -> bool:
    """Returns True only if all numbers of an array are finite. The check is several times faster
    than `all_finite`, but may return False for finite numbers that are large, and for structured
    arrays."""
    if array.dtype.kind != "f":
        return array.dtype.kind in "iub"
    # `vdot` gives no warning, unlike `dot`. The sum of squares is not finite if one number is not.
    return not array.size or math.isfinite(np.vdot(array, array))


@_no_warnings
def replace_unused(used: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Replaces last observations of terminated episodes that are not finite.

    Nothing is computed from the observation after `terminated`, but a NaN would spread: 0 * NaN is
    NaN. A simulator that blows up in a crash returns such observations.

    Args:
        used: `[K, ...]`, the observations before the last steps of these episodes.
        last: `[K, ...]`, the observations after the last steps.

    Returns:
        `last`, with the values of `used` in the rows that are not finite.
    """
    if _all_finite(last):
        return last
    replaced, bad = last.copy(), _non_finite(last, 1)
    replaced[bad] = used[bad]
    return replaced


def find_non_finite(batch: SampleBatch) -> tuple[str, np.ndarray]:
    """Finds non-finite rewards, observations, advantages and value targets in a batch. Advantages
    and value targets that are too large to be squared also count as non-finite.

    Observations after `terminated` are not checked, because nothing is computed from them. See
    `replace_unused`, which makes them finite.

    Returns:
        a description of one non-finite value, and an array `[N]` bool, which is True for each
        environment with non-finite values. The description is empty if all these values are finite.
    """
    arrays = [batch["rewards"], batch.all_obs, batch.successor_obs]
    if "advantages" in batch:
        arrays += [batch["advantages"], batch["value_targets"]]
    if all(map(surely_finite, arrays)):  # nearly always
        return "", np.zeros(batch.shape[1], dtype=bool)
    return _each_non_finite(batch)


@_no_warnings
def _each_non_finite(batch: SampleBatch) -> tuple[str, np.ndarray]:
    envs = np.zeros(batch.shape[1], dtype=bool)
    problem = ""
    sources = {"reward": batch["rewards"], "observation": batch.all_obs}
    # Not every policy adds advantages and value targets. Losses square them, and the squares may
    # overflow even if all rewards are finite.
    if "advantages" in batch:
        sources["advantage"] = _infinite_where_square_is(batch["advantages"])
        targets = batch["value_targets"] * batch["valid"]
        sources["value target"] = _infinite_where_square_is(targets)
    for name, array in sources.items():
        if _all_finite(array):
            continue
        bad = _non_finite(array, 2)  # [T or T + 1, N]
        t, n = np.argwhere(bad)[0]
        problem = problem or _description(name, array[t, n], int(t), int(n))
        envs |= bad.any(axis=0)
    if not _all_finite(batch.successor_obs):
        rows = batch.successor_index[_non_finite(batch.successor_obs, 1)]
        t, n = divmod(int(rows[0]), batch.shape[1])
        problem = problem or _description("last observation", batch.successor_obs, t, n)
        envs[rows % batch.shape[1]] = True
    return problem, envs


def non_finite_gradient(gradients: Gradients) -> str:
    """Returns a description of the non-finite numbers in a gradient. Returns an empty string if all
    numbers are finite."""
    if all_finite(gradients.flat):
        return ""
    count = np.count_nonzero(~np.isfinite(gradients.flat))
    return f"gradient: {count} of its {len(gradients.flat)} numbers are not finite"


def _infinite_where_square_is(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    if math.isfinite(np.dot(flat, flat)):
        return array
    return np.where(np.abs(array) > _LARGEST, np.copysign(np.inf, array), array)


def _non_finite(array: np.ndarray, leading: int) -> np.ndarray:
    """Whether each element has a number that is not finite, in any of its fields. The result has
    the first `leading` dimensions of the array."""
    if array.dtype.names is not None:
        parts = [_non_finite(array[name], leading) for name in array.dtype.names]
        return np.logical_or.reduce(parts)
    if array.dtype.kind != "f":
        return np.zeros(array.shape[:leading], dtype=bool)
    return ~np.isfinite(array).all(axis=tuple(range(leading, array.ndim)))


def _description(name: str, value: np.ndarray, t: int, n: int) -> str:
    while value.dtype.names is not None:
        value = next(
            part for part in map(value.__getitem__, value.dtype.names) if not _all_finite(part)
        )
    numbers = np.ravel(value)
    number = numbers[~np.isfinite(numbers)][0]
    return f"{name} of environment {n} is {number} at step {t} of the fragment"
