"""Numbers that are not finite in what a worker sampled: found once for each fragment."""

from __future__ import annotations

import numpy as np

from polopt.metrics.episodes import EpisodeStats
from polopt.policies.sample_batch import SampleBatch
from polopt.policies.transport import Gradients


def all_finite(array: np.ndarray) -> bool:
    """Whether every number of an array is finite; integers and booleans are."""
    if array.dtype.kind != "f":
        return True
    # One pass without a temporary. A sum of finite numbers may overflow: then each is asked.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum()):
            return True
    return bool(np.isfinite(array).all())


def find_bad_numbers(batch: SampleBatch) -> tuple[str, np.ndarray]:
    """What is not finite in a postprocessed batch.

    Returns:
        a sentence about the first (empty if there is none), and `[N]` bool: the environments that
        gave any.
    """
    envs = np.zeros(batch.shape[1], dtype=bool)
    problem = ""
    sources = {"reward": batch["rewards"], "observation": batch.all_obs}
    # Finite rewards can be so large that these are not. Not every policy makes them.
    if "advantages" in batch:
        sources["advantage"] = batch["advantages"]
        sources["value target"] = np.where(batch["valid"], batch["value_targets"], 0.0)
    for name, array in sources.items():
        if all_finite(array):
            continue
        bad = ~np.isfinite(array).reshape(*array.shape[:2], -1).all(axis=-1)  # [T or T + 1, N]
        t, n = np.argwhere(bad)[0]
        problem = problem or _told(name, array[t, n], int(t), int(n))
        envs |= bad.any(axis=0)
    if not all_finite(batch.successor_obs):
        flat = batch.successor_obs.reshape(len(batch.successor_index), -1)
        rows = batch.successor_index[~np.isfinite(flat).all(axis=-1)]
        t, n = divmod(int(rows[0]), batch.shape[1])
        problem = problem or _told("last observation", flat, t, n)
        envs[rows % batch.shape[1]] = True
    return problem, envs


def without_bad_episodes(episodes: EpisodeStats) -> EpisodeStats:
    """The episodes whose return is a number."""
    good = np.isfinite(episodes.returns)
    return EpisodeStats(episodes.returns[good], episodes.lengths[good])


def bad_gradient(gradients: Gradients) -> str:
    """A sentence about a gradient that is not finite; empty if it is."""
    if all_finite(gradients.flat):
        return ""
    count = np.count_nonzero(~np.isfinite(gradients.flat))
    return f"gradient: {count} of its {len(gradients.flat)} numbers are not finite"


def _told(name: str, value: np.ndarray, t: int, n: int) -> str:
    numbers = np.ravel(value)
    number = numbers[~np.isfinite(numbers)][0]
    return f"{name} of environment {n} is {number} at step {t} of the fragment"
