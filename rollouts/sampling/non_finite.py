"""Numbers that are not finite in what a worker sampled: found once for each fragment."""

from __future__ import annotations

import math

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients

_quietly = np.errstate(over="ignore", invalid="ignore")
#: The square of a larger number is infinite in float32.
_LARGEST = 1e18


@_quietly
def all_finite(array: np.ndarray) -> bool:
    """Whether every number of an array is finite; integers and booleans are."""
    return _all_finite(array)


def _all_finite(array: np.ndarray) -> bool:
    if array.dtype.kind != "f":
        return True
    # One pass without a temporary. A sum of finite numbers may overflow: then each is asked.
    return math.isfinite(array.sum()) or bool(np.isfinite(array).all())


@_quietly
def find_non_finite(batch: SampleBatch) -> tuple[str, np.ndarray]:
    """What is not finite in a postprocessed batch, or so large that its square is not.

    Returns:
        a sentence about the first (empty if there is none), and `[N]` bool: the environments that
        gave any.
    """
    envs = np.zeros(batch.shape[1], dtype=bool)
    problem = ""
    sources = {"reward": batch["rewards"], "observation": batch.all_obs}
    # Not every policy makes these. Losses square them, so that finite rewards can be too large.
    if "advantages" in batch:
        sources["advantage"] = _without_squares(batch["advantages"])
        sources["value target"] = _without_squares(batch["value_targets"] * batch["valid"])
    for name, array in sources.items():
        if _all_finite(array):
            continue
        bad = ~np.isfinite(array).reshape(*array.shape[:2], -1).all(axis=-1)  # [T or T + 1, N]
        t, n = np.argwhere(bad)[0]
        problem = problem or _told(name, array[t, n], int(t), int(n))
        envs |= bad.any(axis=0)
    if not _all_finite(batch.successor_obs):
        flat = batch.successor_obs.reshape(len(batch.successor_index), -1)
        rows = batch.successor_index[~np.isfinite(flat).all(axis=-1)]
        t, n = divmod(int(rows[0]), batch.shape[1])
        problem = problem or _told("last observation", flat, t, n)
        envs[rows % batch.shape[1]] = True
    return problem, envs


def _without_squares(array: np.ndarray) -> np.ndarray:
    """`array`, with infinity for numbers whose squares would be."""
    flat = array.reshape(-1)
    if math.isfinite(np.dot(flat, flat)):
        return array
    return np.where(np.abs(array) > _LARGEST, np.copysign(np.inf, array), array)


def without_non_finite_episodes(episodes: EpisodeStats) -> EpisodeStats:
    """The episodes whose return is a number."""
    good = np.isfinite(episodes.returns)
    return EpisodeStats(episodes.returns[good], episodes.lengths[good])


def non_finite_gradient(gradients: Gradients) -> str:
    """A sentence about a gradient that is not finite; empty if it is."""
    if all_finite(gradients.flat):
        return ""
    count = np.count_nonzero(~np.isfinite(gradients.flat))
    return f"gradient: {count} of its {len(gradients.flat)} numbers are not finite"


def _told(name: str, value: np.ndarray, t: int, n: int) -> str:
    numbers = np.ravel(value)
    number = numbers[~np.isfinite(numbers)][0]
    return f"{name} of environment {n} is {number} at step {t} of the fragment"
