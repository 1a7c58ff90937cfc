"""Statistics over runs of several seeds, as in rliable.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(2021), and its library rliable: interquartile mean, percentile bootstrap stratified by task, and
probability of improvement. Scores are arrays of shape `[runs]`, one array per task.

`scipy.stats` has the parts of them, and tests compare the numbers. Its bootstrap takes as long for
a curve, but 8 ms instead of 0.1 ms for the interval of one number, and each refresh of the page
needs one for each group. Importing it takes 0.5 s, more than opening a page of 20 trials again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Below this number of runs single runs are shown instead of a band.
LEAST_RUNS_FOR_BAND = 5
_BOUNDS = (0.025, 0.975)  # of a 95 percent interval
_RESAMPLES, _SEED = 1000, 0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 percent bootstrap interval. The bounds are NaN without an interval."""

    value: float
    low: float = float("nan")
    high: float = float("nan")


def interquartile_mean(scores: Array, axis: int = 0) -> Array:
    """Mean of the middle half of `scores` along `axis`: without the lowest and the highest quarter,
    rounded down to whole scores."""
    count = scores.shape[axis]
    cut = count // 4
    ordered = np.partition(scores, (cut, count - cut - 1), axis)
    return np.asarray(ordered.take(range(cut, count - cut), axis).mean(axis))


def bootstrap_band(
    tasks: Sequence[Array], resamples: int = _RESAMPLES
) -> tuple[Array, Array, Array]:
    """Interquartile mean over all runs of all tasks, with its 95 percent band.

    Runs are drawn with replacement within each task (stratified), and the interquartile mean is
    taken over the runs of all tasks together.

    Args:
        tasks: scores of shape `[runs, points]` for each task. Numbers of runs may differ.
        resamples: bootstrap samples. The same data give the same band.

    Returns:
        Interquartile mean, lower and upper bound, each of shape `[points]`.
    """
    rng = np.random.default_rng(_SEED)
    draws = [rng.integers(0, len(task), size=(resamples, len(task))) for task in tasks]
    value = interquartile_mean(np.concatenate(tasks, axis=0))
    low, high = np.empty_like(value), np.empty_like(value)
    num_runs = sum(map(len, tasks))
    block = max(1, 4_000_000 // (resamples * num_runs))  # points at once, for bounded memory
    for start in range(0, value.shape[0], block):
        part = slice(start, start + block)
        drawn = np.concatenate(
            [task[:, part][draw] for task, draw in zip(tasks, draws, strict=True)], axis=1
        )
        samples = interquartile_mean(drawn, axis=1)  # [resamples, points]
        low[part], high[part] = np.quantile(samples, _BOUNDS, axis=0)
    return value, low, high


def estimate(tasks: Sequence[Array]) -> Estimate:
    """Interquartile mean of final scores of shape `[runs]` for each task.

    The interval is left out where a task has fewer than `LEAST_RUNS_FOR_BAND` runs.
    """
    if min(map(len, tasks)) < LEAST_RUNS_FOR_BAND:
        return Estimate(float(interquartile_mean(np.concatenate(tasks))))
    value, low, high = bootstrap_band([task[:, None] for task in tasks])
    return Estimate(float(value[0]), float(low[0]), float(high[0]))


def _improvement(x: Array, y: Array) -> Array:
    """`P(X > Y) + P(X = Y) / 2` for each row of `x` and `y`, of shape `[resamples, runs]`.

    The Mann-Whitney U statistic over the number of pairs.
    """
    wins = sum(((x > one) + 0.5 * (x == one)).sum(axis=1) for one in y.T[:, :, None])
    return np.asarray(wins / (x.shape[1] * y.shape[1]))


def probability_of_improvement(
    x: Sequence[Array], y: Sequence[Array], resamples: int = _RESAMPLES
) -> Estimate:
    """How likely a run of X scores higher than a run of Y: mean over tasks.

    Args:
        x: scores of shape `[runs]` for each task.
        y: scores of the other group for the same tasks.
        resamples: bootstrap samples of the interval.
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
    """Median of the steps or seconds to a return, with its 95 percent bootstrap interval.

    Runs that do not reach it count as longer than all others. So the median is infinite where half
    of the runs do not reach it, and a bound where half of a sample do not.

    Args:
        found: shape `[runs]`. NaN for runs that do not reach the return.

    Returns:
        the estimate, which has no bounds if there are fewer than `LEAST_RUNS_FOR_BAND` runs.
    """
    ordered = np.where(np.isfinite(found), found, np.inf)
    if not len(ordered):
        return Estimate(float("nan"))
    value = float(np.median(ordered))
    if len(ordered) < LEAST_RUNS_FOR_BAND:
        return Estimate(value)
    rng = np.random.default_rng(_SEED)
    drawn = ordered[rng.integers(0, len(ordered), size=(_RESAMPLES, len(ordered)))]
    # The lower one of two medians, because the mean of a number and infinity is infinite.
    low, high = np.quantile(np.median(drawn, axis=1), _BOUNDS, method="lower")
    return Estimate(value, float(low), float(high))


def first_reach(at: Array, scores: Array, target: float) -> float:
    """The first entry of `at` (steps or seconds, shape `[R]`) where `scores` is at least `target`.

    NaN if the target is not reached.
    """
    reached = np.flatnonzero(scores >= target)
    return float(at[reached[0]]) if len(reached) else float("nan")


def resampled(at: Array, scores: Array, grid: Array, hold: bool) -> Array:
    """Scores on a grid, by linear interpolation between results.

    Args:
        at: steps or seconds of each result, shape `[R]`, increasing.
        scores: the results, shape `[R]`. Entries that are not finite are left out.
        grid: shape `[points]`.
        hold: whether the last score holds beyond the end of the run, which it does for finished
            runs: a run that stops at its goal keeps what it has learned.

    Returns:
        Scores of shape `[points]`. NaN before the first result and, without `hold`, after the last.
    """
    finite = np.isfinite(scores) & np.isfinite(at)
    if not finite.any():
        return np.full(len(grid), np.nan)
    after = float(scores[finite][-1]) if hold else np.nan
    return np.interp(grid, at[finite], scores[finite], left=np.nan, right=after)
