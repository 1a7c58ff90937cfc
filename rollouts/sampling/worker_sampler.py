"""A worker's sampler: how it is made, the fragments that a request asks for, and their check."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gymnasium import Space

from polopt.common.config import ConfigError
from polopt.common.data_faults import DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import merged
from polopt.common.sample_batch import SampleBatch
from polopt.policies.acting_policy import ActingPolicy
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.env_api import same_encoding
from polopt.rollouts.envs.env_errors import (
    EnvironmentAPIError,
    EnvironmentFailedError,
    described,
    traceback_of,
)
from polopt.rollouts.envs.env_sources import EnvSource, env_name
from polopt.rollouts.envs.fault_tolerant_env import KeptInfos
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.sample_request import SampleRequest
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.sampling.seeds import Seeds


def make_sampler(
    rollout: RolloutConfig,
    env: EnvSource,
    spaces: tuple[Space[Any], Space[Any]],
    index: int,
    policy: ActingPolicy,
    seeds: Seeds,
    fast: bool,
    keep_infos: KeptInfos = "none",
    index_offset: int = 0,
    in_evaluation: bool = False,
) -> tuple[VectorSampler | None, EnvironmentFailedError | None]:
    """Makes the sampler of the worker with this index. Returns the error if that fails.

    The caller raises the error when samples are requested. If it were raised here, in an actor's
    constructor, Ray would report the death of the actor instead.

    Args:
        rollout: options of sampling.
        env: result of `resolve_env`.
        spaces: observation space and action space of the policy.
        index: index of the worker.
        policy: chooses the actions.
        seeds: seeds of the environments and of the action noise.
        fast: see `make_vector_env`.
        keep_infos: see `FaultTolerantEnv`.
        index_offset: see `make_vector_env`.
        in_evaluation: see `make_vector_env`.

    Raises:
        ConfigError: the environment does not have the chosen mode.
    """
    remake = functools.partial(
        make_vector_env,
        env,
        rollout,
        index,
        fast=fast,
        keep_infos=keep_infos,
        index_offset=index_offset,
        in_evaluation=in_evaluation,
    )
    place = f"vector environment {env_name(env)!r} (of worker {index})"
    faults = SamplerFaults(remake, rollout.max_consecutive_env_faults, place)
    try:
        made = remake()
        _check_spaces(made, spaces, place)
        return VectorSampler(made, policy, rollout.rollout_fragment_length, seeds, faults), None
    except ConfigError:
        raise
    except EnvironmentFailedError as error:
        return None, error
    except Exception as error:
        return None, EnvironmentFailedError(
            f"{place} cannot be made: {described(error)}\n{traceback_of(error)}"
        )


def _check_spaces(env: Any, spaces: tuple[Space[Any], Space[Any]], place: str) -> None:
    """Raises `EnvironmentAPIError` if the policy is not made for the environment's spaces. They may
    depend on the worker: an environment gets the worker's index."""
    for name, space, expected in (
        ("observation", env.single_observation_space, spaces[0]),
        ("action", env.single_action_space, spaces[1]),
    ):
        if not same_encoding(space, expected):
            close_env(env, place)
            raise EnvironmentAPIError(
                f"{place} has {name} space {space}; the policy is made for {expected}"
            )


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
        per_env=first.per_env,
        moments=merged(first.moments, second.moments),
        place=first.place,
    )


def mark_non_finite(batch: SampleBatch, sampler: VectorSampler, env: str) -> SampleBatch:
    """Marks a batch that holds non-finite values. Resets the environments in which they arose,
    because a policy that gets NaN returns NaN.

    Args:
        batch: the postprocessed batch. It is changed in place.
        sampler: the sampler that made it.
        env: name of the environment, for errors.
    """
    problem, envs = find_non_finite(batch)
    if not (problem or batch.moments is None or batch.moments.is_finite):
        problem = "squares of its observations are not finite"
    if problem:
        source = f"environment {env!r} of worker {batch.worker_index}: {problem}"
        batch.faults = batch.faults._replace(non_finite=source)
        sampler.reset_some(envs)
    return batch
