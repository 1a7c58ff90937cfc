"""`make_vector_env`: makes a vector of environments from the source of an environment."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium
from gymnasium import Space, spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import create_shared_memory

from polopt.common.config import ConfigError, shown, shown_options
from polopt.rollouts.envs.agent_policies import AgentPolicies, resolve_policies
from polopt.rollouts.envs.agent_processes import AgentProcesses, AgentsInProcess
from polopt.rollouts.envs.agent_vector_env import (
    AgentVectorEnv,
    FaultTolerantAgents,
    shared_spaces,
)
from polopt.rollouts.envs.agents_env import AgentsEnv, agents_env
from polopt.rollouts.envs.env_errors import (
    EnvironmentFailedError,
    close_env,
    described,
    missing_package,
)
from polopt.rollouts.envs.env_sources import EnvContext, EnvSource, env_name, make_env, own_copy
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, FaultTolerantEnv, KeptInfos
from polopt.rollouts.envs.old_gym import accepted_by_make, adapted
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.seeds import draw_process_seeds

_NO_LIMIT = (
    "key 'max_frames_per_traj': got {} for {}, whose episodes polopt cannot truncate; allowed: "
    "None, or single environments with vectorization_mode 'sync' or 'async'"
)


#: The keys of a trainer's config for the environment, its options and the number of environments.
#: Error messages name these keys.
ENV_KEYS = ("env", "env_config", "num_envs_per_worker")


def make_vector_env(
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int = 0,
    num_envs: int | None = None,
    fast: bool = True,
    keep_infos: KeptInfos = "none",
    index_offset: int = 0,
    in_evaluation: bool = False,
) -> VectorEnv[Any, Any, Any]:
    """Makes a vector of environments. Each environment is wrapped in a `FaultTolerantEnv`, unless
    the environment's own vector implementation is used, or a user's callable makes the vector.

    Args:
        source: a result of `resolve_env`.
        config: the options of sampling.
        worker_index: the index of the worker, for `EnvContext` and error messages.
        num_envs: the number N of environments. `None` means `num_envs_per_worker`.
        fast: whether to step environments in this process with `FastSyncVectorEnv` instead of
            Gymnasium's `SyncVectorEnv`. Both return the same results.
        keep_infos: see `FaultTolerantEnv`.
        index_offset: a number that is added to `worker_index` for `EnvContext.worker_index`.
        in_evaluation: see `EnvContext`.

    Raises:
        ConfigError: if the environment does not support an option.
        EnvironmentFailedError: if an environment in a `FaultTolerantEnv` cannot be made in
            `max_consecutive_env_faults` attempts.
        ImportError, DependencyNotInstalled: if a package that the environment needs is missing.
        Exception: any exception of the first call of a user's callable, or of the environment's own
            vector implementation.
    """
    num_envs = num_envs or config.num_envs_per_worker
    mode = config.vectorization_mode
    if callable(source):
        _check_mode_of_callable(config)
        index = index_offset + worker_index
        makers = [
            functools.partial(make_one_env, source, config, index, i, in_evaluation)
            for i in range(num_envs)
        ]
        first: Any = makers[0]()
        if isinstance(first, VectorEnv):
            _check_vector_of_callable(first, config, num_envs)
            return first
        if isinstance(first, AgentsEnv):
            return _vector_of_agents(makers, source, config, worker_index, keep_infos, first)
        if mode == "async":
            close_env(first, f"environment {env_name(source)!r}")
            first = None
        return _vector_of(makers, source, config, worker_index, fast, keep_infos, first)
    spec = gymnasium.spec(source) if isinstance(source, str) else source
    limit = config.max_frames_per_traj
    if limit is not None and mode == "vector_entry_point":
        raise ConfigError(_NO_LIMIT.format(limit, "vectorization_mode 'vector_entry_point'"))
    own_vector = mode == "vector_entry_point" or (mode is None and spec.vector_entry_point)
    if own_vector and limit is None:
        env = gymnasium.make_vec(
            spec, num_envs, vectorization_mode="vector_entry_point", **own_copy(config.env_config)
        )
        _check_autoreset(env, config)
        return env
    # Gymnasium's environment checker and its check of the order of `reset` and `step` would cost
    # time in each step. They are not needed: `FaultTolerantEnv` checks the results, and the sampler
    # always resets an environment before its first step.
    spec = dataclasses.replace(spec, order_enforce=False)
    unchecked = {"disable_env_checker": True, **config.env_config}
    made = config.model_copy(update={"env_config": unchecked})
    make = functools.partial(make_one_env, spec, made, worker_index)
    return _vector_of([make] * num_envs, source, config, worker_index, fast, keep_infos)


def make_one_env(
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int,
    vector_index: int = 0,
    in_evaluation: bool = False,
) -> Any:
    """Makes one environment, with the options `env_config` and the limit `max_frames_per_traj`.

    An environment with several agents becomes an `AgentsEnv`. The limit then counts steps of the
    environment, and truncates all agents.

    Args:
        source: a result of `resolve_env`. If it is a callable that makes a vector environment, the
            result is this vector.
        config: the options of sampling.
        worker_index: see `EnvContext`.
        vector_index: see `EnvContext`.
        in_evaluation: see `EnvContext`.

    Raises:
        ConfigError: if a vector environment should get a limit.
        TypeError: see `make_env`.
        APIViolation: see `make_env`.
        Exception: any exception of the environment's code.
    """
    if callable(source):
        indices = worker_index, vector_index, config.num_workers, in_evaluation
        env = make_env(source, EnvContext(config.env_config, *indices))
    else:
        says = worker_index == 0
        known = source if isinstance(source, str) else accepted_by_make(source, says)
        made = gymnasium.make(known, **own_copy(config.env_config))
        env = agents_env(made) or adapted(made, says)
    limit = config.max_frames_per_traj
    if isinstance(env, AgentsEnv):
        env.max_steps = limit
    if limit is None or isinstance(env, AgentsEnv):
        return env
    # Episodes then end like all other truncated episodes, in each autoreset mode.
    if isinstance(env, VectorEnv):
        raise ConfigError(_NO_LIMIT.format(limit, "a callable that makes a vector environment"))
    return gymnasium.wrappers.TimeLimit(env, limit)


class ProbedEnv(NamedTuple):
    """What a policy needs to know of an environment.

    Attributes:
        observation_space: the observation space of one agent. With several policies, a Dict with
            the space of each policy.
        action_space: the action space, in the same form.
        policies: the policies of several agents. None with one policy without a name.
        num_agents: the number of possible agents.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    policies: AgentPolicies | None = None
    num_agents: int = 1


def probe_env(
    source: EnvSource,
    config: RolloutConfig,
    keys: tuple[str, str, str] = ENV_KEYS,
    worker_index: int = 0,
    in_evaluation: bool = False,
) -> ProbedEnv:
    """Makes one environment, closes it, and returns its spaces. If a user's callable makes a
    vector, returns the spaces of one environment of the vector.

    Args:
        source: a result of `resolve_env`.
        config: the options of sampling.
        keys: the names of three config keys for error messages. See `ENV_KEYS`.
        worker_index: see `EnvContext`.
        in_evaluation: see `EnvContext`.

    Raises:
        ConfigError: if the environment cannot be made, or does not support an option.
    """
    try:
        return _probe(source, config, keys, worker_index, in_evaluation)
    except ConfigError:
        raise
    except Exception as error:  # an environment may raise anything
        cause = error.__cause__ if isinstance(error, EnvironmentFailedError) else error
        missing = missing_package(cause, env_name(source))
        if missing is not None:
            raise ConfigError(missing) from error
        raise ConfigError(
            f"key {keys[0]!r}: {shown(config.env or source)} cannot be made with {keys[1]} "
            f"{shown_options(config.env_config)}: {described(error)}"
        ) from error


def _probe(
    source: EnvSource,
    config: RolloutConfig,
    keys: tuple[str, str, str],
    worker_index: int,
    in_evaluation: bool,
) -> ProbedEnv:
    if callable(source):
        _check_mode_of_callable(config)
        env = make_one_env(source, config, worker_index, in_evaluation=in_evaluation)
    else:
        mode = "sync" if config.vectorization_mode == "async" else config.vectorization_mode
        env = make_vector_env(source, config.model_copy(update={"vectorization_mode": mode}), 0, 1)
    try:
        if env.render_mode == "human":
            env.reset()  # shows now whether the packages and the screen for rendering are available
        if isinstance(env, AgentsEnv):
            return _probe_agents(env, config)
        if isinstance(env, VectorEnv):
            if callable(source):
                _check_vector_of_callable(env, config, config.num_envs_per_worker, keys)
            return ProbedEnv(env.single_observation_space, env.single_action_space)
        return ProbedEnv(env.observation_space, env.action_space)
    finally:
        close_env(env, f"environment {env_name(source)!r}")


def _probe_agents(env: AgentsEnv, config: RolloutConfig) -> ProbedEnv:
    """Returns the spaces of an environment with several agents.

    Raises:
        ConfigError: an option is not possible with several agents, or the policies do not fit the
            agents.
    """
    if config.autoreset_mode not in (None, "same_step"):
        raise ConfigError(
            f"key 'autoreset_mode': got {config.autoreset_mode!r} for an environment with several "
            "agents; allowed: 'same_step' or None"
        )
    plan = policies_of_agents(env, config)
    found = {name: shared_spaces(env, agents) for name, agents in plan.members.items()}
    if not plan.is_group:
        return ProbedEnv(*found["default_policy"], None, len(env.possible_agents))
    return ProbedEnv(
        spaces.Dict([(name, own[0]) for name, own in found.items()]),
        spaces.Dict([(name, own[1]) for name, own in found.items()]),
        plan,
        len(env.possible_agents),
    )


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Returns the autoreset mode of a vector environment. If the vector does not declare a mode,
    the result is next-step, which is the only mode of Gymnasium 1.0."""
    base = env.unwrapped
    if isinstance(base, SyncVectorEnv | AsyncVectorEnv):
        # Up to Gymnasium 1.3, these vectors share their metadata with the class of their
        # sub-environments. The metadata then holds the mode of the vector that was made last.
        return base.autoreset_mode
    return AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))


def _vector_of_agents(
    makers: Sequence[Callable[[], Any]],
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int,
    keep_infos: KeptInfos,
    first: AgentsEnv,
) -> VectorEnv[Any, Any, Any]:
    """Makes the slots of several agents. `first` is the first environment."""
    places = [EnvPlace(env_name(source), worker_index, i) for i in range(len(makers))]
    limit, plan = config.max_consecutive_env_faults, policies_of_agents(first, config)
    vector: AgentVectorEnv
    if config.vectorization_mode == "async":
        close_env(first, str(places[0]))
        seeds = draw_process_seeds(len(makers))
        with _garbage_stays_here():
            vector = AgentProcesses(
                [
                    functools.partial(AgentsInProcess, make, place, limit, None, seed, keep_infos)
                    for make, place, seed in zip(makers, places, seeds, strict=True)
                ],
                first,
            )
    else:
        envs = [first, *([None] * (len(makers) - 1))]
        vector = AgentVectorEnv(
            [
                functools.partial(FaultTolerantAgents, make, place, limit, env)
                for make, place, env in zip(makers, places, envs, strict=True)
            ]
        )
    vector.divide(plan.members, plan.chooser(lambda: vector.rng, worker_index))
    return vector.groups[0]


def policies_of_agents(env: AgentsEnv, config: RolloutConfig) -> AgentPolicies:
    """Decides which policies act for the agents of an environment. Raises the errors of
    `resolve_policies`."""
    spaces_of = {agent: env.spaces_of(agent) for agent in env.possible_agents}
    return resolve_policies(spaces_of, list(config.policies or ()), config.policy_mapping_fn)


def _vector_of(
    makers: Sequence[Callable[[], Any]],
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int,
    fast: bool,
    keep_infos: KeptInfos,
    first: Any = None,
) -> VectorEnv[Any, Any, Any]:
    """Makes a vector of fault-tolerant environments. If the first environment is already made,
    `first` is this environment."""
    num_envs, in_processes = len(makers), config.vectorization_mode == "async"
    seeds = draw_process_seeds(num_envs) if in_processes else [None] * num_envs
    envs = [first, *([None] * (num_envs - 1))]
    guards = [
        functools.partial(
            FaultTolerantEnv,
            makers[i],
            EnvPlace(env_name(source), worker_index, i),
            config.max_consecutive_env_faults,
            envs[i],
            seeds[i],
            keep_infos,
        )
        for i in range(num_envs)
    ]
    mode = AutoresetMode[(config.autoreset_mode or "same_step").upper()]
    if mode == AutoresetMode.SAME_STEP and keep_infos != "none":
        # The data are the same, but the sampler resets the environments itself, after callbacks
        # have seen them at the end of the episode.
        mode = AutoresetMode.DISABLED
    # `copy=False`, because the sampler copies the observations that it keeps.
    if in_processes:
        with _garbage_stays_here():
            try:
                return AsyncVectorEnv(guards, copy=False, autoreset_mode=mode)
            except TypeError:
                if _fits_shared_memory(guards[0]):
                    raise
                return AsyncVectorEnv(guards, shared_memory=False, copy=False, autoreset_mode=mode)
    in_turn = FastSyncVectorEnv if fast else SyncVectorEnv
    return in_turn(guards, copy=False, autoreset_mode=mode)


def _fits_shared_memory(make: Callable[[], Any]) -> bool:
    """Returns whether the observations of an environment fit into Gymnasium's shared memory, which
    has no float16 and no long double before Gymnasium 1.4. Makes the environment, and closes it."""
    env = make()
    try:
        create_shared_memory(env.observation_space)
    except TypeError:
        return False
    finally:
        close_env(env, "environment made to read its observation space")
    return True


@contextmanager
def _garbage_stays_here() -> Iterator[None]:
    """Keeps processes that are forked in this context from collecting this process's garbage.

    The garbage of a driver may contain handles of Ray actors. When a forked process collects such a
    handle, Ray reports this to its server over the connection that the forked process shares with
    this process. Then the server never answers the next call of this process, and Ray waits for the
    answer without a time limit.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_mode_of_callable(config: RolloutConfig) -> None:
    if config.vectorization_mode == "vector_entry_point":
        raise ConfigError(
            "key 'vectorization_mode': got 'vector_entry_point' for a callable environment; "
            "allowed: 'sync', 'async' or None"
        )


def _check_vector_of_callable(
    env: VectorEnv[Any, Any, Any],
    config: RolloutConfig,
    num_envs: int,
    keys: tuple[str, str, str] = ENV_KEYS,
) -> None:
    if env.num_envs != num_envs:
        raise ConfigError(
            f"key {keys[2]!r}: got {num_envs}, but the callable in {keys[0]!r} makes a "
            f"vector environment of {env.num_envs}; the two numbers must agree"
        )
    _check_autoreset(env, config)


def _check_autoreset(env: VectorEnv[Any, Any, Any], config: RolloutConfig) -> None:
    wanted, mode = config.autoreset_mode, autoreset_mode(env)
    if wanted is not None and AutoresetMode[wanted.upper()] != mode:
        raise ConfigError(
            f"key 'autoreset_mode': got {wanted!r}, but this vector environment always resets in "
            f"mode {mode.value!r}; allowed: None, or single environments with vectorization_mode "
            "'sync' or 'async'"
        )
