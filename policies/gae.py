"""Generalised advantage estimation (Schulman et al., 2016), exact at the ends of episodes."""

from __future__ import annotations

import numpy as np

from polopt.common.sample_batch import SampleBatch


def next_values(batch: SampleBatch, all_values: np.ndarray, successors: np.ndarray) -> np.ndarray:
    """Value of what truly follows each row.

    Args:
        batch: `[T, N]`.
        all_values: `[T + 1, N]` values of `batch.all_obs`.
        successors: `[K]` values of `batch.successor_obs`.

    Returns:
        `[T, N]`: 0 after `terminated`; after `truncated` and at the end of the fragment the value
        of the true next observation.
    """
    following = all_values[1:].copy()
    if len(batch.successor_index):
        following.reshape(-1)[batch.successor_index] = successors
    following[batch["terminated"]] = 0.0
    return following


def advantages(
    batch: SampleBatch,
    values: np.ndarray,
    following: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """GAE(lambda): `A_t = delta_t + gamma lambda A_{t+1}`, where the sum stops at each row that the
    next does not continue: an episode's end, the fragment's end, and a row whose successor was
    spelled out.

    Args:
        batch: `[T, N]`.
        values: `[T, N]` values of the observations acted upon.
        following: `[T, N]` from `next_values`.
        gamma: discount factor.
        lambda_: 0 gives one-step temporal differences, 1 Monte Carlo returns less the value.

    Returns:
        `[T, N]` float32. Rows that are not valid get 0.
    """
    goes_on = ~(batch["terminated"] | batch["truncated"])
    goes_on.reshape(-1)[batch.successor_index] = False
    decay = goes_on.astype(np.float32)
    decay *= gamma * lambda_
    deltas = batch["rewards"] + np.float32(gamma) * following - values
    deltas = deltas.astype(np.float32, copy=False)
    # In next-step mode the row after an end holds no transition; `goes_on` is False before it, so
    # that with 0 here whatever stands there reaches nobody (0 * NaN would).
    deltas[~batch["valid"]] = 0.0
    running = np.zeros_like(values[0])
    for delta, share in zip(deltas[::-1], decay[::-1], strict=True):
        running = np.add(delta, share * running, out=delta)  # `deltas` becomes the result
    deltas[~batch["valid"]] = 0.0
    return deltas
