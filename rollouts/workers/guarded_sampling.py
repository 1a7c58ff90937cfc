"""What a worker does about environments that can not be made, and about numbers that are not
finite."""

from __future__ import annotations

import functools
from typing import Any

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.policies.actors import Actor
from polopt.rollouts.envs.checking import same_encoding
from polopt.rollouts.envs.closing import close_env
from polopt.rollouts.envs.errors import EnvironmentAPIError, EnvironmentFailedError, traceback_of
from polopt.rollouts.envs.making import make_vector_env
from polopt.rollouts.envs.resolving import env_name
from polopt.rollouts.sampling.fault_handling import SamplerFaults
from polopt.rollouts.sampling.non_finite import find_non_finite, without_non_finite_episodes
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeding import Seeds
from polopt.rollouts.workers.worker_config import WorkerConfig


def make_sampler(
    config: WorkerConfig, index: int, policy: Actor, seeds: Seeds
) -> tuple[VectorSampler | None, EnvironmentFailedError | None]:
    """The sampler of a worker, or why its environments can not be made.

    That is to be told when samples are asked for: Ray would take an exception from an actor's
    constructor for its death.

    Raises:
        ConfigError: for a mode that the environment does not have.
    """
    rollout = config.rollout
    remake = functools.partial(make_vector_env, config.env, rollout, index)
    place = f"vector environment {env_name(config.env)!r} (of worker {index})"
    faults = SamplerFaults(remake, rollout.max_consecutive_env_faults, place)
    try:
        env = remake()
        _check_spaces(env, config, place)
        return VectorSampler(env, policy, rollout.rollout_fragment_length, seeds, faults), None
    except ConfigError:
        raise
    except EnvironmentFailedError as error:
        return None, error
    except Exception as error:
        return None, EnvironmentFailedError(
            f"{place} can not be made: {type(error).__name__}: {error}\n{traceback_of(error)}"
        )


def _check_spaces(env: Any, config: WorkerConfig, place: str) -> None:
    """Raises `EnvironmentAPIError` if the policy is not made for the environment's spaces. They may
    depend on the worker: an environment gets the worker's index."""
    for name, space, expected in (
        ("observation", env.single_observation_space, config.observation_space),
        ("action", env.single_action_space, config.action_space),
    ):
        if not same_encoding(space, expected):
            close_env(env, place)
            raise EnvironmentAPIError(
                f"{place} has {name} space {space}; the policy is made for {expected}"
            )


def check_batch(batch: SampleBatch, sampler: VectorSampler, env: str) -> SampleBatch:
    """The batch, which says so if it holds a number that is not finite. The environments that gave
    it begin anew, for a policy that is given NaN gives NaN back.

    Args:
        batch: postprocessed; changed in place.
        sampler: that it is from.
        env: what to call the environment.
    """
    problem, envs = find_non_finite(batch)
    if problem:
        told = f"environment {env!r} of worker {batch.worker_index}: {problem}"
        batch.faults = batch.faults._replace(non_finite=told)
        batch.episodes = without_non_finite_episodes(batch.episodes)
        sampler.reset_some(envs)
    return batch
