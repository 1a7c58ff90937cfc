"""The sampler of a worker: makes it, samples the fragments that are requested, and checks their
values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from polopt.common.config import ConfigError
from polopt.common.episodes import EpisodeStats
from polopt.common.faults import Fault, one_per_kind
from polopt.common.moments import merged
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.sample_batch import SampleBatch
from polopt.policies.acting_policy import ActingPolicy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.agent_vector_env import SlotGroup
from polopt.rollouts.envs.env_api import space_that_differs
from polopt.rollouts.envs.env_errors import (
    EnvironmentAPIError,
    EnvironmentFailedError,
    close_env,
    described,
    traceback_of,
)
from polopt.rollouts.envs.env_sources import EnvSource, env_name
from polopt.rollouts.envs.fault_tolerant_env import KeptInfos
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.group_sampler import GroupSampler
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.sampler import Exploration, VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.seeds import Seeds


class SampleRequest(NamedTuple):
    """A request for one fragment.

    Attributes:
        steps: the number T of steps. `None` means `rollout_fragment_length` of the worker's config.
        frames: the minimum number of environment steps in the fragment. In Gymnasium's autoreset
            mode next-step, a step that only resets an environment is not an environment step. So
            the fragment may need more than T steps. `None` means that the fragment has T steps,
            whatever the number of environment steps.
        exploration: see `Exploration`.
        uniform: whether to ignore the policy and draw uniform actions. See `VectorSampler.sample`.
        reset_first: whether all environments begin new episodes first.
    """

    steps: int | None = None
    frames: int | None = None
    exploration: Exploration = "random"
    uniform: bool = False
    reset_first: bool = False


def clip_rewards(batch: SampleBatch | MultiAgentBatch, limit: float | str | None) -> None:
    """Changes the rewards of a fragment as the option `clip_raw_rewards` says. The statistics of
    episodes, which the fragment also has, stay as they are. Rewards that are not finite also stay,
    so that the fragment counts as faulty."""
    if limit is None:
        return
    for part in batch.parts.values() if isinstance(batch, MultiAgentBatch) else [batch]:
        rewards = part["rewards"]
        clipped = np.sign(rewards) if isinstance(limit, str) else rewards.clip(-limit, limit)
        part["rewards"] = np.where(np.isfinite(rewards), clipped, rewards)


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
) -> tuple[Any, EnvironmentFailedError | None]:
    """Makes the sampler of a worker. Returns the sampler and None. If the environments cannot be
    made, returns None and the error.

    The worker raises the error when samples are requested. The driver then receives the error as
    the answer to a call, and can distinguish the error from a failure of the process.

    Args:
        rollout: the options of sampling.
        env: a result of `resolve_env`.
        spaces: the observation space and the action space of the policy.
        index: the index of the worker.
        policy: the policy that chooses the actions.
        seeds: the seeds of the environments and of the action noise.
        fast: see `make_vector_env`.
        keep_infos: see `FaultTolerantEnv`.
        index_offset: see `make_vector_env`.
        in_evaluation: see `make_vector_env`.

    Raises:
        ConfigError: if the environment does not support an option.
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
    name, limit = env_name(env), rollout.max_consecutive_env_faults
    place = f"vector environment {name!r} (of worker {index})"
    faults = SamplerFaults(remake, limit, place, f"environment {name!r} of worker {index}: ")
    try:
        made = remake()
        if isinstance(made, SlotGroup) and isinstance(policy, PolicyGroup):
            _check_group(made, policy, place)
            length = rollout.rollout_fragment_length
            return GroupSampler(made.vector, policy, length, seeds, faults), None
        _check_fits(made, spaces, place)
        return VectorSampler(made, policy, rollout.rollout_fragment_length, seeds, faults), None
    except ConfigError:
        raise
    except EnvironmentFailedError as error:
        return None, error
    except Exception as error:
        return None, EnvironmentFailedError(
            f"{place} cannot be made: {described(error)}\n{traceback_of(error)}"
        )


def _check_group(env: SlotGroup, policy: PolicyGroup, place: str) -> None:
    """Raises `EnvironmentAPIError` if the policies do not fit the spaces of their agents."""
    for group, one in zip(env.vector.groups, policy.policies.values(), strict=True):
        _check_fits(group, (one.encoder.space, one.action_space), place)


def _check_fits(env: Any, spaces: tuple[Space[Any], Space[Any]], place: str) -> None:
    """Raises `EnvironmentAPIError` if the policy does not fit the spaces of the environment. The
    policy was made for the spaces of one environment. An environment of another worker may have
    different spaces, because a user's callable receives the index of the worker."""
    found = env.single_observation_space, env.single_action_space
    if name := space_that_differs(found, spaces, action_bounds=False):
        close_env(env, place)
        index = name == "action"
        raise EnvironmentAPIError(
            f"{place} has {name} space {found[index]}; the policy is made for {spaces[index]}"
        )


def _mark_group(batch: MultiAgentBatch, sampler: GroupSampler) -> MultiAgentBatch:
    problems = [find_non_finite(part)[0] for part in batch.parts.values()]
    problem = next(filter(None, problems), "")
    if not (problem or batch.moments is None or batch.moments.is_finite):
        problem = "the squares of its observations are not finite"
    if problem:
        text, rows = sampler.faults.source + problem, batch.agent_steps
        fault = Fault("non_finite", text, rows=rows)
        batch.faults = one_per_kind([*batch.faults.values(), fault])
        sampler.reset()
    return batch


def sample_frames(sampler: Any, request: SampleRequest) -> Any:
    """Samples the requested steps. If `request.frames` is given, samples further steps until the
    fragment has at least this number of environment steps. If the fragment is stopped early, it may
    have fewer."""
    steps = request.steps or sampler.fragment_length
    batch = sampler.sample(request.exploration, steps, request.uniform)
    stopped = sampler.num_steps < steps
    while request.frames is not None and not stopped:
        missing = -(-(request.frames - batch.env_steps) // batch.shape[1])
        if missing <= 0:
            break
        more = sampler.sample(request.exploration, missing, request.uniform)
        stopped = sampler.num_steps < missing
        batch = join_in_time(batch, more)
    return batch


def join_in_time(first: SampleBatch, second: SampleBatch) -> SampleBatch:
    """Joins two consecutive fragments of the same sampler along time. The same weights must have
    sampled both fragments, and `Policy.postprocess` must not have run on either fragment.

    Args:
        first: a fragment `[T1, N]`.
        second: the fragment `[T2, N]` that was sampled directly after `first`.

    Returns:
        a fragment `[T1 + T2, N]`.
    """
    offset = first.shape[0] * first.shape[1]
    joined = SampleBatch(
        all_obs=np.concatenate([first.obs, second.all_obs]),
        columns={
            name: np.concatenate([column, second.columns[name]])
            for name, column in first.columns.items()
        },
        successor_index=np.concatenate([first.successor_index, second.successor_index + offset]),
        successor_obs=np.concatenate([first.successor_obs, second.successor_obs]),
        version=first.version,
        episodes=EpisodeStats.concat([first.episodes, second.episodes]),
        faults=one_per_kind([*first.faults.values(), *second.faults.values()]),
        per_env=first.per_env,
        moments=merged(first.moments, second.moments),
        place=first.place,
        num_env_steps=(
            None
            if first.num_env_steps is None or second.num_env_steps is None
            else first.num_env_steps + second.num_env_steps
        ),
    )
    if second.row_counts is not None:
        joined.row_counts = first.shape[0] + second.row_counts
    return joined if first.row_counts is None else _closed_up(joined, first, second)


def _closed_up(joined: SampleBatch, first: SampleBatch, second: SampleBatch) -> SampleBatch:
    """Removes the rows of two joined fragments that only fill the arrays."""
    is_row = np.concatenate([first.is_row, second.is_row])
    counts = np.count_nonzero(is_row, axis=0)
    order = np.argsort(~is_row, axis=0, kind="stable")[: max(1, int(counts.max()))]
    rows = np.arange(len(order))[:, None] < counts
    closed = joined.in_order(np.where(rows, order, -1))
    closed.episodes, closed.faults, closed.moments = joined.episodes, joined.faults, joined.moments
    closed.place, closed.num_env_steps = joined.place, joined.num_env_steps
    closed.row_counts = counts
    return closed


def mark_non_finite(batch: Any, sampler: Any) -> Any:
    """Checks a batch for non-finite values, and returns the batch. The sampler has already
    discarded the rows of single environments. If there are still non-finite values, describes one
    of them in `batch.faults`, and resets the environments in which they occurred.
    Without a reset, the next fragment could begin with an observation that contains NaN, for which
    the policy would return NaN. If only the squares of observations are not finite, describes this
    in `batch.faults`, and resets no environment.

    Args:
        batch: the postprocessed batch, which is changed in place.
        sampler: the sampler that sampled the batch.
    """
    if isinstance(batch, MultiAgentBatch):
        return _mark_group(batch, sampler)
    problem, envs = find_non_finite(batch)
    if not (problem or batch.moments is None or batch.moments.is_finite):
        problem = "the squares of its observations are not finite"
    if problem:
        fault = Fault("non_finite", sampler.faults.source + problem, rows=batch.agent_steps)
        others = [one for one in batch.faults.values() if one.kind != "bad_rows"]
        batch.faults = one_per_kind([*others, fault])
    if envs.any():
        sampler.reset_some(envs)
        sampler.leave_gap()
    return batch
