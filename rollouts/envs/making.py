"""`make_vector_env`: from the source of an environment to a vector of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from polopt.common.config import ConfigError
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.creators import EnvContext, call_creator
from polopt.rollouts.envs.guarding import EnvPlace, FaultTolerantEnv
from polopt.rollouts.envs.random_state import draw_process_seeds
from polopt.rollouts.envs.resolving import EnvSource, env_name

_AUTORESET = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
_NO_LIMIT = (
    "key 'max_frames_per_traj': got {} for {}, whose environments cannot be limited from "
    "outside; allowed: None, or vectorization_mode 'sync' or 'async'"
)


def make_vector_env(
    source: EnvSource, config: RolloutConfig, worker_index: int = 0, num_envs: int | None = None
) -> VectorEnv[Any, Any, Any]:
    """A vector environment of `num_envs` (default: as the config says) copies.

    Those that are made one by one are each a `FaultTolerantEnv`.

    Raises:
        ConfigError: for a mode that the environment does not have.
        EnvironmentFailedError: if one cannot be made, however often it is tried.
    """
    num_envs = num_envs or config.num_envs_per_worker
    mode = config.vectorization_mode
    if callable(source):
        return _around_callable(source, config, worker_index, num_envs)
    spec = gymnasium.spec(source) if isinstance(source, str) else source
    limit = config.max_frames_per_traj
    if limit is not None and mode == "vector_entry_point":
        raise ConfigError(_NO_LIMIT.format(limit, "vectorization_mode 'vector_entry_point'"))
    own_vector = mode == "vector_entry_point" or (mode is None and spec.vector_entry_point)
    if own_vector and limit is None:
        env = gymnasium.make_vec(
            spec, num_envs, vectorization_mode="vector_entry_point", **config.env_config
        )
        _check_autoreset(env, config)
        return env
    # Gymnasium's checker is for finding bugs in one environment; `FaultTolerantEnv` checks less.
    options = {"disable_env_checker": True, **config.env_config}

    def make() -> Any:
        return _limited(limit, gymnasium.make(spec, **options))

    return _vector_of([make] * num_envs, source, config, worker_index)


def _vector_of(
    makers: Sequence[Callable[[], Any]],
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int,
    first: Any = None,
) -> VectorEnv[Any, Any, Any]:
    """A vector of fault-tolerant environments; `first` is the first of them, if it is made."""
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
        )
        for i in range(num_envs)
    ]
    kind = AsyncVectorEnv if in_processes else SyncVectorEnv
    # Without copies: the sampler copies what it keeps.
    return kind(guards, copy=False, autoreset_mode=_AUTORESET[config.autoreset_mode or "same_step"])


def probe_spaces(source: EnvSource, config: RolloutConfig) -> tuple[Space[Any], Space[Any]]:
    """Observation and action space of one environment, which is made and closed for it.

    Raises:
        ConfigError: as `make_vector_env` would.
    """
    if callable(source):
        _check_mode_of_callable(config)
        env = call_creator(source, EnvContext(config.env_config, 0, 0, config.num_workers))
        _limited(config.max_frames_per_traj, env)  # refuses here what a worker would
    else:
        mode = "sync" if config.vectorization_mode == "async" else config.vectorization_mode
        env = make_vector_env(source, config.model_copy(update={"vectorization_mode": mode}), 0, 1)
    try:
        if isinstance(env, VectorEnv):
            if callable(source):
                _check_made_vector(env, config, config.num_envs_per_worker)
            return env.single_observation_space, env.single_action_space
        return env.observation_space, env.action_space
    finally:
        env.close()


def _around_callable(
    make: Callable[..., Any], config: RolloutConfig, worker_index: int, num_envs: int
) -> VectorEnv[Any, Any, Any]:
    def make_one(vector_index: int) -> Any:
        context = EnvContext(config.env_config, worker_index, vector_index, config.num_workers)
        return _limited(config.max_frames_per_traj, call_creator(make, context))

    _check_mode_of_callable(config)
    first = make_one(0)
    if isinstance(first, VectorEnv):
        _check_made_vector(first, config, num_envs)
        return first
    if config.vectorization_mode == "async":
        first.close()
        first = None
    makers = [functools.partial(make_one, i) for i in range(num_envs)]
    return _vector_of(makers, make, config, worker_index, first)


def _check_mode_of_callable(config: RolloutConfig) -> None:
    if config.vectorization_mode == "vector_entry_point":
        raise ConfigError(
            "key 'vectorization_mode': got 'vector_entry_point' for a callable environment; "
            "allowed: 'sync', 'async' or None"
        )


def _check_made_vector(env: VectorEnv[Any, Any, Any], config: RolloutConfig, num_envs: int) -> None:
    if env.num_envs != num_envs:
        raise ConfigError(
            f"key 'num_envs_per_worker': got {num_envs}, but the callable in 'env' makes a "
            f"vector environment of {env.num_envs}; they must agree"
        )
    _check_autoreset(env, config)


def _limited(limit: int | None, env: Any) -> Any:
    """Truncates episodes by Gymnasium's own wrapper, so that they end as all truncated ones do,
    whatever the autoreset mode."""
    if limit is None:
        return env
    if isinstance(env, VectorEnv):
        raise ConfigError(_NO_LIMIT.format(limit, "a callable that makes a vector environment"))
    return gymnasium.wrappers.TimeLimit(env, limit)


def _check_autoreset(env: VectorEnv[Any, Any, Any], config: RolloutConfig) -> None:
    wanted, own = config.autoreset_mode, autoreset_mode(env)
    if wanted is not None and _AUTORESET[wanted] != own:
        raise ConfigError(
            f"key 'autoreset_mode': got {wanted!r}, but the environment's own vector "
            f"implementation resets in mode {own.value!r}; allowed: None, or "
            "vectorization_mode 'sync' or 'async'"
        )


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The autoreset mode an environment declares; next-step where it declares none, as Gymnasium
    1.0 had it."""
    base = env.unwrapped
    if isinstance(base, SyncVectorEnv | AsyncVectorEnv):
        # Their metadata is that of the sub-environments' class: the next one made overwrites it.
        return base.autoreset_mode
    return AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
