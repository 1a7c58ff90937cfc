"""Fragments that hold a number of frames, whatever rows are lost to resets."""

from __future__ import annotations

import numpy as np

from polopt.common.data_faults import DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.sampling.sample_request import SampleRequest
from polopt.rollouts.sampling.sampler import VectorSampler


def sample_frames(sampler: VectorSampler, request: SampleRequest) -> SampleBatch:
    """Samples the steps that are requested, and further ones while rows that only reset leave fewer
    frames than requested. A fragment that stops early may have fewer."""
    steps = request.steps or sampler.fragment_length
    batch = sampler.sample(request.exploration, steps, request.uniform)
    stopped = batch.shape[0] < steps
    while request.frames is not None and not stopped:
        missing = -(-(request.frames - batch.env_steps) // batch.shape[1])
        if missing <= 0:
            break
        more = sampler.sample(request.exploration, missing, request.uniform)
        stopped = more.shape[0] < missing
        batch = join_in_time(batch, more)
    return batch


def join_in_time(first: SampleBatch, second: SampleBatch) -> SampleBatch:
    """`[T1 + T2, N]` from `first` `[T1, N]` and `second` `[T2, N]`, sampled right after it by the
    same sampler and weights, neither postprocessed."""
    offset = first.shape[0] * first.shape[1]
    return SampleBatch(
        all_obs=np.concatenate([first.all_obs, second.all_obs[1:]]),
        columns={
            name: np.concatenate([column, second.columns[name]])
            for name, column in first.columns.items()
        },
        successor_index=np.concatenate([first.successor_index, second.successor_index + offset]),
        successor_obs=np.concatenate([first.successor_obs, second.successor_obs]),
        version=first.version,
        episodes=EpisodeStats.concat([first.episodes, second.episodes]),
        faults=DataFaults.concat([first.faults, second.faults]),
    )
