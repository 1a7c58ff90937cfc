"""Environments: from what a config names to a Gymnasium vector environment."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from polopt.common.config import ConfigError, nearest
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.guarding import EnvPlace, FaultTolerantEnv
from polopt.rollouts.envs.side_by_side import SideBySide

#: What `resolve_env` gives and workers make environments from.
EnvSource = str | EnvSpec | Callable[..., Any]
_AUTORESET = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
_NO_LIMIT = (
    "key 'max_frames_per_traj': got {} for {}, whose environments can not be limited from "
    "outside; allowed: None, or vectorization_mode 'sync' or 'async'"
)
#: First parameters that are understood to want the whole config, as RLlib's creators do.
_CONFIG_NAMES = {"config", "env_config", "env_context", "context", "ctx", "cfg"}


class EnvContext(dict[str, Any]):
    """The `env_config` that a callable gets: a dict that also knows who asks.

    Attributes:
        worker_index: of the worker; 0 in the driver's process.
        vector_index: which of the worker's environments this is.
        num_workers: remote workers in all.
    """

    def __init__(
        self, config: Mapping[str, Any], worker_index: int, vector_index: int, num_workers: int
    ) -> None:
        super().__init__(config)
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers


def resolve_env(env: Any) -> EnvSource:
    """What workers can make the environment from, in processes that know nothing of the driver's
    registrations.

    A callable stands for itself; a name registered with Tune for its creator; a Gymnasium id for
    its spec, so that an id registered in the driver's program works in workers too. For `module:id`
    the module is imported first, which is how packages register their environments.

    Raises:
        ConfigError: unknown id, with the nearest known one; a module that can not be imported.
    """
    if callable(env) or isinstance(env, EnvSpec):
        return env
    if not isinstance(env, str):
        raise ConfigError(
            f"key 'env': got {env!r}; allowed: a Gymnasium id, a name registered with "
            "ray.tune.registry.register_env, or a callable that makes an environment"
        )
    creator = _registered_with_tune(env)
    if creator is not None:
        return creator
    module, _, name = env.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise ConfigError(
            f"key 'env': got {env!r}; its module can not be imported: {error}"
        ) from None
    except gymnasium.error.Error as error:
        raise ConfigError(
            f"key 'env': got {env!r}{nearest(name, gymnasium.registry)} ({error})"
        ) from None


def _registered_with_tune(name: str) -> Callable[..., Any] | None:
    # Tune is heavy; if nobody has imported it, nobody has registered anything with it.
    registry = sys.modules.get("ray.tune.registry")
    if registry is None:
        return None
    known = registry._global_registry
    if not known.contains(registry.ENV_CREATOR, name):
        return None
    creator: Callable[..., Any] = known.get(registry.ENV_CREATOR, name)
    return creator


def make_vector_env(
    source: EnvSource, config: RolloutConfig, worker_index: int = 0, num_envs: int | None = None
) -> VectorEnv[Any, Any, Any]:
    """A vector environment of `num_envs` (default: as the config says) copies.

    Those that are made one by one are each a `FaultTolerantEnv`.

    Raises:
        ConfigError: for a mode that the environment does not have.
        EnvironmentFailedError: if one can not be made, however often it is tried.
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

    guards = [_guard(make, source, config, worker_index, i) for i in range(num_envs)]
    return _side_by_side(guards, config)


def _guard(
    make: Callable[[], Any],
    source: EnvSource,
    config: RolloutConfig,
    worker_index: int,
    env_index: int,
    env: Any = None,
) -> Callable[[], FaultTolerantEnv]:
    place = EnvPlace(env_name(source), worker_index, env_index)
    return functools.partial(FaultTolerantEnv, make, place, config.max_consecutive_env_faults, env)


def _side_by_side(
    guards: list[Callable[[], FaultTolerantEnv]], config: RolloutConfig
) -> VectorEnv[Any, Any, Any]:
    kind = AsyncVectorEnv if config.vectorization_mode == "async" else SideBySide
    autoreset = _AUTORESET[config.autoreset_mode or "same_step"]
    # The sampler copies what it keeps.
    return kind(guards, copy=False, autoreset_mode=autoreset)


def env_name(source: EnvSource) -> str:
    """What to call an environment in errors."""
    if isinstance(source, EnvSpec):
        return source.id
    return source if isinstance(source, str) else getattr(source, "__name__", repr(source))


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
    envs = [first, *([None] * (num_envs - 1))]
    guards = [_guard(makers[i], make, config, worker_index, i, envs[i]) for i in range(num_envs)]
    return _side_by_side(guards, config)


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


def call_creator(make: Callable[..., Any], context: EnvContext) -> Any:
    """Calls an environment's creator as its signature wants: with the context (RLlib's way), or
    with the config as keyword arguments (Gymnasium's way), or with nothing."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some C callables have no signature
        return make(context)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and (
        positional[0].default is inspect.Parameter.empty or positional[0].name in _CONFIG_NAMES
    ):
        return make(context)
    return make(**context)


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
