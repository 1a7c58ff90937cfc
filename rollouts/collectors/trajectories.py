"""Cutting batches into trajectories."""

from __future__ import annotations

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch


def split_trajectories(batch: SampleBatch) -> list[SampleBatch]:
    """The trajectories in a batch, environment by environment and in order of time.

    A trajectory ends with its episode or with the batch. Rows that are not `valid` are in none.

    Returns:
        batches `[length, 1]`, views where possible, each with the true observation after its last
        row.
    """
    steps, envs = batch.shape
    ends = batch["terminated"] | batch["truncated"]
    parts = []
    for n in range(envs):
        start: int | None = None
        for t in range(steps):
            if not batch["valid"][t, n]:
                if start is not None:
                    parts.append(_part(batch, start, t, n))
                start = None
                continue
            start = t if start is None else start
            if ends[t, n]:
                parts.append(_part(batch, start, t + 1, n))
                start = None
        if start is not None:
            parts.append(_part(batch, start, steps, n))
    return parts


def pad_trajectories(parts: list[SampleBatch]) -> SampleBatch:
    """`[longest, number of trajectories]`. The mask is `valid`."""
    padded = SampleBatch.concat(parts)
    padded.worker_index = parts[0].worker_index
    return padded


def _part(batch: SampleBatch, start: int, stop: int, env: int) -> SampleBatch:
    all_obs = batch.all_obs[start : stop + 1, env : env + 1]
    columns = {name: column[start:stop, env : env + 1] for name, column in batch.columns.items()}
    # Within a trajectory only the last row can have a separate successor observation.
    last = (stop - 1) * batch.shape[1] + env
    found = np.flatnonzero(batch.successor_index == last)
    per_env = {name: array[env : env + 1] for name, array in batch.per_env.items()}
    if start > 0 and "state" in per_env:  # the episode began here
        per_env["state"] = np.zeros_like(per_env["state"])
    return SampleBatch(
        all_obs=all_obs,
        columns=columns,
        successor_index=np.full(len(found), stop - 1 - start, dtype=np.int64),
        successor_obs=batch.successor_obs[found],
        version=batch.version,
        worker_index=batch.worker_index,
        episodes=EpisodeStats(),
        device=batch.device,
        per_env=per_env,
    )
