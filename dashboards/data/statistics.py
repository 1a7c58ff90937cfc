"""Statistics over runs with several seeds, as in the library rliable.

These are the interquartile mean, the percentile bootstrap stratified by task, and the probability
of improvement. Scores are arrays of shape `[runs]`, with one array per task. Source: Agarwal et
al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021).

`scipy.stats` has similar functions, and tests compare the numbers with these functions. This module
does not use `scipy.stats`, because it would slow down the page: its import takes 0.5 s, and its
bootstrap of a single number takes 8 ms instead of 0.1 to 2 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: With fewer runs than this, plots show single runs instead of a band.
LEAST_RUNS_FOR_BAND = 5
_BOUNDS = (0.025, 0.975)  # quantiles of a 95 percent interval
_RESAMPLES, _SEED = 1000, 0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 percent bootstrap interval. Without an interval, the bounds are NaN."""

    value: float
    low: float = float("nan")
    high: float = float("nan")


def interquartile_mean(scores: Array, axis: int = 0) -> Array:
    """Returns the mean of the middle half of `scores` along `axis`.

    The mean omits the lowest and the highest quarter. If a quarter is not a whole number of scores,
    this number is rounded down.
    """
    count = scores.shape[axis]
    cut = count // 4
    ordered = np.partition(scores, (cut, count - cut - 1), axis)
    return np.asarray(ordered.take(range(cut, count - cut), axis).mean(axis))


def bootstrap_band(
    tasks: Sequence[Array], resamples: int = _RESAMPLES
) -> tuple[Array, Array, Array]:
    """Returns the interquartile mean over all runs of all tasks, with its 95 percent band.

    For a bootstrap sample, runs are drawn with replacement within each task (stratified). The
    interquartile mean is taken over the runs of all tasks together. The seed is fixed, so the same
    scores give the same band.

    Args:
        tasks: scores of shape `[runs, points]` for each task. The numbers of runs may differ.
        resamples: number of bootstrap samples.

    Returns:
        The interquartile mean, the lower bound and the upper bound, each of shape `[points]`.
    """
    rng = np.random.default_rng(_SEED)
    draws = [rng.integers(0, len(task), size=(resamples, len(task))) for task in tasks]
    value = interquartile_mean(np.concatenate(tasks, axis=0))
    low, high = np.empty_like(value), np.empty_like(value)
    num_runs = sum(map(len, tasks))
    # The number of points that are processed at once, which bounds the memory.
    block = max(1, 4_000_000 // (resamples * num_runs))
    for start in range(0, value.shape[0], block):
        part = slice(start, start + block)
        drawn = np.concatenate(
            [task[:, part][draw] for task, draw in zip(tasks, draws, strict=True)], axis=1
        )
        samples = interquartile_mean(drawn, axis=1)  # [resamples, points]
        low[part], high[part] = np.quantile(samples, _BOUNDS, axis=0)
    return value, low, high


def estimate(tasks: Sequence[Array]) -> Estimate:
    """Returns the interquartile mean of the final scores of all runs of all tasks.

    The estimate has no interval if a task has fewer than `LEAST_RUNS_FOR_BAND` runs.

    Args:
        tasks: the scores of the runs of each task, of shape `[runs]`.
    """
    if min(map(len, tasks)) < LEAST_RUNS_FOR_BAND:
        return Estimate(float(interquartile_mean(np.concatenate(tasks))))
    value, low, high = bootstrap_band([task[:, None] for task in tasks])
    return Estimate(float(value[0]), float(low[0]), float(high[0]))


def _improvement(x: Array, y: Array) -> Array:
    """Returns `P(X > Y) + P(X = Y) / 2` for each bootstrap sample, which is a row of `x` and `y`.

    This is the Mann-Whitney U statistic, divided by the number of pairs.

    Args:
        x: scores of shape `[resamples, runs]`.
        y: scores of shape `[resamples, other runs]`.

    Returns:
        Probabilities of shape `[resamples]`.
    """
    wins = sum(((x > one) + 0.5 * (x == one)).sum(axis=1) for one in y.T[:, :, None])
    return np.asarray(wins / (x.shape[1] * y.shape[1]))


def probability_of_improvement(
    x: Sequence[Array], y: Sequence[Array], resamples: int = _RESAMPLES
) -> Estimate:
    """Returns the probability that a run of group X scores higher than a run of group Y.

    The probability is the mean over tasks.

    Args:
        x: scores of group X, of shape `[runs]` for each task.
        y: scores of group Y for the same tasks.
        resamples: number of bootstrap samples for the interval.
    """
    value = float(np.mean([_improvement(a[None], b[None])[0] for a, b in zip(x, y, strict=True)]))
    if min(len(task) for task in (*x, *y)) < LEAST_RUNS_FOR_BAND:
        return Estimate(value)
    rng = np.random.default_rng(_SEED)
    samples = np.mean(
        [
            _improvement(
                a[rng.integers(0, len(a), size=(resamples, len(a)))],
                b[rng.integers(0, len(b), size=(resamples, len(b)))],
            )
            for a, b in zip(x, y, strict=True)
        ],
        axis=0,
    )
    low, high = np.quantile(samples, _BOUNDS)
    return Estimate(value, float(low), float(high))


def median_reach(found: Array) -> Estimate:
    """Returns the median steps or seconds that runs need for a return, with a 95 percent interval.

    Runs that do not reach the return count as infinite. So the median is infinite if at least
    half of the runs do not reach the return. A bound is infinite if at least half of the runs in
    the corresponding bootstrap sample do not reach the return.

    Args:
        found: steps or seconds of each run, shape `[runs]`. NaN for a run that does not reach the
            return.

    Returns:
        The estimate. It has no interval for fewer than `LEAST_RUNS_FOR_BAND` runs. Its value is NaN
        without runs.
    """
    ordered = np.where(np.isfinite(found), found, np.inf)
    if not len(ordered):
        return Estimate(float("nan"))
    value = float(np.median(ordered))
    if len(ordered) < LEAST_RUNS_FOR_BAND:
        return Estimate(value)
    rng = np.random.default_rng(_SEED)
    drawn = ordered[rng.integers(0, len(ordered), size=(_RESAMPLES, len(ordered)))]
    # `method="lower"` does not interpolate, because interpolation between a number and infinity
    # would be infinite.
    low, high = np.quantile(np.median(drawn, axis=1), _BOUNDS, method="lower")
    return Estimate(value, float(low), float(high))


def first_reach(at: Array, scores: Array, target: float) -> float:
    """Returns the first entry of `at` where the score is at least `target`, or NaN without one.

    Args:
        at: steps or seconds of each result, shape `[R]`.
        scores: score of each result, shape `[R]`.
        target: the score to reach.
    """
    reached = np.flatnonzero(scores >= target)
    return float(at[reached[0]]) if len(reached) else float("nan")


def resampled(at: Array, scores: Array, grid: Array, hold: bool) -> Array:
    """Interpolates scores linearly at the points of a grid.

    Args:
        at: steps or seconds of each result, increasing, shape `[R]`.
        scores: score of each result, shape `[R]`. Scores that are not finite are ignored.
        grid: steps or seconds of each point, shape `[points]`.
        hold: whether the last score is also used after the end of the run. Set it for finished
            runs, because a finished run keeps the policy that it has learned.

    Returns:
        Scores of shape `[points]`. They are NaN before the first result. Without `hold`, they are
        also NaN after the last result.
    """
    finite = np.isfinite(scores) & np.isfinite(at)
    if not finite.any():
        return np.full(len(grid), np.nan)
    after = float(scores[finite][-1]) if hold else np.nan
    return np.interp(grid, at[finite], scores[finite], left=np.nan, right=after)
