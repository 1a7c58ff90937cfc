"""Cuts batches into trajectories."""

from __future__ import annotations

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch


def split_trajectories(batch: SampleBatch) -> list[SampleBatch]:
    """Cuts a batch into trajectories. The trajectories are ordered by environment, and by time
    within an environment.

    A trajectory ends at the end of its episode, at an invalid row, or at the end of the batch.
    Trajectories do not contain rows that are not `valid`.

    Returns:
        one batch `[length, 1]` for each trajectory, as views where possible. Each batch includes
        the true observation after its last row.
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


def pad_trajectories(batch: SampleBatch) -> SampleBatch:
    """Cuts a batch `[T, N]` into trajectories, and pads each of them to the length of the longest
    one. Returns a batch `[longest, number of trajectories]`, in which the column `valid` is False
    in the padding. Without any trajectory, the returned batch is `[T, 0]`."""
    parts = split_trajectories(batch) or [batch.select(np.arange(0))]
    padded = SampleBatch.concat(parts)
    padded.device = batch.device
    return padded


def _part(batch: SampleBatch, start: int, stop: int, env: int) -> SampleBatch:
    all_obs = batch.all_obs[start : stop + 1, env : env + 1]
    columns = {name: column[start:stop, env : env + 1] for name, column in batch.columns.items()}
    # Within a trajectory, only the last row can have a separate successor observation.
    last = (stop - 1) * batch.shape[1] + env
    found = np.flatnonzero(batch.successor_index == last)
    per_env = {name: array[env : env + 1] for name, array in batch.per_env.items()}
    if start > 0 and "state" in per_env:  # the trajectory starts a new episode
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
