"""Generalised advantage estimation, GAE (Schulman et al., 2016), exact at episode ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.policies.learning.reducer import Reducer, summed


def next_values(batch: SampleBatch, all_values: np.ndarray, successors: np.ndarray) -> np.ndarray:
    """Values of the true next observations. If the environment is reset automatically after a step,
    the true next observation of this step is the observation before the reset.

    Args:
        batch: `[T, N]`.
        all_values: `[T + 1, N]` values of `batch.all_obs`.
        successors: `[K]` values of `batch.successor_obs`.

    Returns:
        `[T, N]`. After `terminated`, the value is 0. In all other rows, also after `truncated` and
        at the end of the fragment, it is the value of the true next observation.
    """
    following = all_values[1:].copy()
    if len(batch.successor_index):
        following.reshape(-1)[batch.successor_index] = successors
    following[batch["terminated"]] = 0.0
    return following


def state_values(
    batch: SampleBatch, value: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Values of a batch's observations and of their true next observations, `[T, N]` each.

    Args:
        batch: `[T, N]`.
        value: a function that returns values `[B]` of encoded observations `[B, ...]`.
    """
    steps, envs = batch.shape
    flat_obs = batch.all_obs.reshape((steps + 1) * envs, *batch.all_obs.shape[2:])
    all_values = value(flat_obs).reshape(steps + 1, envs)
    successors = value(batch.successor_obs) if len(batch.successor_index) else np.zeros(0)
    return all_values[:-1], next_values(batch, all_values, successors)


def episode_starts(batch: SampleBatch) -> np.ndarray:
    """`[T + 1, N]` bool: whether the observation `all_obs[t]` is the first of an episode.

    The memory of a policy is 0 before the first observation of an episode. Row 0 of the result is
    always False, because `per_env["state"]` holds the memory before row 0.

    An episode begins after a row whose next observation is stored in `successor_obs` and not in
    `all_obs[t + 1]`. An episode also begins after a row without a transition. A row has no
    transition if the environment only resets in this row (autoreset mode `next_step`), if the
    environment raised an error, or if the row is padding.
    """
    starts = np.zeros((batch.shape[0] + 1, batch.shape[1]), dtype=bool)
    starts[1:] = ~batch["valid"]
    starts[1:].reshape(-1)[batch.successor_index] = True
    return starts


def continuing(batch: SampleBatch) -> np.ndarray:
    """`[T, N]` bool: whether the next row continues the episode of this row. The result is False
    for the last row of an episode, and for a row whose next observation is in `successor_obs`."""
    continues = ~(batch["terminated"] | batch["truncated"])
    continues.reshape(-1)[batch.successor_index] = False
    return continues


def advantages(
    batch: SampleBatch,
    values: np.ndarray,
    following: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """Computes advantages by GAE(lambda): `A_t = delta_t + gamma lambda A_{t+1}`, with the temporal
    difference `delta_t = r_t + gamma V_{t+1} - V_t`.

    The recursion stops where the next row does not continue the episode (see `continuing`), and at
    the end of the fragment.

    Args:
        batch: `[T, N]`.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `next_values`.
        gamma: discount factor.
        lambda_: 0 gives one-step temporal differences. 1 gives Monte Carlo returns minus values.

    Returns:
        `[T, N]` float32. The advantage of an invalid row is 0.
    """
    decay = continuing(batch).astype(np.float32)
    decay *= gamma * lambda_
    deltas = batch["rewards"] + np.float32(gamma) * following - values
    deltas = deltas.astype(np.float32, copy=False)
    # In autoreset mode `next_step`, the row after the end of an episode has no transition, and its
    # delta may be NaN. The decay of 0 before this row does not stop a NaN, because 0 * NaN is NaN.
    deltas[~batch["valid"]] = 0.0
    running = np.zeros_like(values[0])
    for delta, factor in zip(deltas[::-1], decay[::-1], strict=True):
        running = np.add(delta, factor * running, out=delta)  # deltas become advantages in place
    deltas[~batch["valid"]] = 0.0
    return deltas


def add_advantages(
    batch: SampleBatch, values: np.ndarray, following: np.ndarray, gamma: float, lambda_: float
) -> None:
    """Adds `values`, `advantages` and `value_targets` `[T, N]` to a batch.

    Args:
        batch: `[T, N]`.
        values: `[T, N]` values of the observations.
        following: `[T, N]` from `next_values`.
        gamma: discount factor.
        lambda_: see `advantages`.
    """
    batch["values"] = values
    batch["advantages"] = advantages(batch, values, following, gamma, lambda_)
    batch["value_targets"] = batch["advantages"] + batch["values"]


# Advantages that are not finite make the gradient non-finite, and the weight updater skips such
# gradients.
@np.errstate(all="ignore")
def standardized(advantages: np.ndarray, reducer: Reducer) -> np.ndarray:
    """Scales advantages `[B]` to mean 0 and standard deviation 1 over the rows of all learners.

    The function subtracts the mean of all learners before it sums the squares, in float64. A
    variance computed as the difference of two large sums would lose digits.
    """
    values = advantages.astype(np.float64)
    count, total = summed([float(len(values)), float(values.sum())], reducer)
    rows = max(count, 1.0)
    values -= total / rows
    (squares,) = summed([float(np.dot(values, values))], reducer)
    values /= max((squares / rows) ** 0.5, 1e-8)
    return values.astype(np.float32)
