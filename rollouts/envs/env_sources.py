"""`resolve_env`: turns the `env` of a config into a source from which workers make environments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import VectorEnv

from polopt.common.config import ConfigError, nearest, shown
from polopt.common.registry import import_module
from polopt.common.tune_registry import shared
from polopt.rollouts.envs.missing_packages import missing_package

#: The ids of Gymnasium's adapters for environments of the old package `gym`. The option `env_id` of
#: an adapter may name a module, which `gym` then imports.
_ADAPTERS = ("GymV21Environment-v0", "GymV26Environment-v0")
#: Maps a namespace of ids to the module that registers these ids.
_MODULES = {"ALE": "ale_py"}
#: `ale_py` also registers ids without a namespace. Many of these ids have one of these endings.
_ATARI_ENDINGS = ("NoFrameskip-v0", "NoFrameskip-v4", "Deterministic-v0", "Deterministic-v4")
#: The source of an environment: what `resolve_env` returns. Workers make environments from it.
EnvSource = str | EnvSpec | Callable[..., Any]


def resolve_env(env: Any, allow_import: bool = True) -> EnvSource:
    """Returns the source of an environment. The source works in every process, including processes
    without the driver's registrations.

    The result depends on `env`:

    - For a callable, the result is the callable.
    - For a name that is registered with Tune, the result is the registered creator.
    - For a Gymnasium id or a spec, the result is the spec. The spec may name a class or function in
      the driver's `__main__`. The result then contains the class or function instead of the name,
      because the `__main__` of a worker is a different module. If a wrapper in the spec is such a
      class or function, the result is a callable that makes the environment.
    - For `module:name`, the module is imported first. If the module has a callable `name`, the
      result is this callable. Otherwise, `name` must be a Gymnasium id after the import.

    Args:
        env: the value of the config key `env`.
        allow_import: whether the module of `module:name` may be imported. Pass False for a name
            that the user did not choose, such as a name in a checkpoint. Then the name must already
            be registered with Gymnasium or Tune, and must not be the id of an adapter that imports
            a module that `env_config` names.

    Raises:
        ConfigError: if the id is unknown, a package is missing, the module cannot or must not be
            imported, or `env` has another type, for example if `env` is an environment that is
            already made. For an unknown id, the message suggests a similar known id if there is
            one.
    """
    refuse_made_env(env)
    if isinstance(env, EnvSpec):
        return _without_main(env)
    if callable(env):
        return env
    if not isinstance(env, str):
        raise ConfigError(
            f"key 'env': got {shown(env)}; allowed: a Gymnasium id, a name registered with "
            "ray.tune.registry.register_env, or a callable that makes an environment"
        )
    creator = shared(env)
    if creator is not None:
        return creator
    module_name, _, name = env.rpartition(":")
    if module_name and allow_import:
        found = getattr(_import(module_name, env), name, None)
        if callable(found):
            creator = found
            return creator
    elif module_name and name not in gymnasium.registry:
        raise ConfigError(
            f"key 'env': got {env!r}; polopt does not import a module that only a saved config "
            f"names, and the id {name!r} is unknown without this import"
        )
    elif name in _ADAPTERS and not allow_import:
        raise ConfigError(
            f"key 'env': got {env!r}; this environment imports a module that env_config names. "
            "polopt makes such an environment only if you give 'env' yourself"
        )
    try:
        return _without_main(gymnasium.spec(name))
    except gymnasium.error.Error as error:
        atari = "ale_py" if name.endswith(_ATARI_ENDINGS) else None
        module = _MODULES.get(name.partition("/")[0], atari)
        meant = nearest(name, gymnasium.registry)
        if module and not module_name:
            if importlib.util.find_spec(module) is None:
                missing = missing_package(ModuleNotFoundError(name=module), name)
                raise ConfigError(str(missing)) from None
            meant = f"; did you mean {f'{module}:{name}'!r}?"
        if module_name:
            meant = (
                f"; {module_name} defines no callable {name!r} and registers no environment of "
                f"this id{meant}"
            )
        raise ConfigError(f"key 'env': got {env!r}{meant} ({error})") from None


def refuse_made_env(env: Any) -> None:
    """Refuses an environment that is passed instead of a source. Each process must make its own
    environments from a source.

    Raises:
        ConfigError: if `env` is an environment or a vector environment. The message says what the
            user can pass instead.
    """
    if not isinstance(env, gymnasium.Env | VectorEnv):
        return
    spec = getattr(env, "spec", None)
    size = f", num_envs={env.num_envs}" if isinstance(env, VectorEnv) else ""
    if isinstance(spec, EnvSpec):
        instead = f"the id {spec.id!r}, or a function"
        call = f"gymnasium.make{'_vec' * bool(size)}({spec.id!r}{size})"
    else:
        instead, call = "its class, or a function", f"{type(env.unwrapped).__name__}(...)"
    number = f" with 'num_envs_per_worker': {env.num_envs}" if isinstance(env, VectorEnv) else ""
    raise ConfigError(
        f"key 'env': got an environment that is made already, {shown(env)}; each process must make "
        f"its own environments. Pass {instead}, as in 'env': lambda config: {call}{number}"
    )


def _without_main(spec: EnvSpec) -> EnvSource:
    changed = {
        name: found
        for name in ("entry_point", "vector_entry_point")
        if (found := _of_main(getattr(spec, name))) is not None
    }
    if changed:
        spec = dataclasses.replace(spec, **changed)
    wrappers = [(_of_main(one.entry_point), one) for one in spec.additional_wrappers]
    if not any(found for found, _ in wrappers):
        return spec
    # A spec can hold a wrapper only as a name, so `make` below applies the wrappers itself.
    inner = dataclasses.replace(spec, additional_wrappers=(), order_enforce=False)
    outer = [(made or load_env_creator(one.entry_point), one.kwargs) for made, one in wrappers]

    def make(**options: Any) -> Any:
        env: Any = gymnasium.make(inner, **{"disable_env_checker": True, **options})
        for wrap, kwargs in outer:
            env = wrap(env=env, **(kwargs or {}))
        return env

    make.__name__ = spec.id
    return make


def _of_main(entry_point: Any) -> Any:
    """Returns the object that `__main__:name` names in this process. Returns None for any other
    entry point, and if `__main__` has no attribute `name`."""
    if not isinstance(entry_point, str):
        return None
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name, None) if module == "__main__" else None


def env_name(source: EnvSource) -> str:
    """Returns the name of an environment for error messages and logs."""
    if isinstance(source, EnvSpec):
        return source.id
    return source if isinstance(source, str) else getattr(source, "__name__", repr(source))


def _import(module_name: str, env: str) -> Any:
    importlib.invalidate_caches()  # finds a file that was written after Python read its folder
    try:
        return import_module(module_name)
    except ImportError as error:
        problem = f"key 'env': got {env!r}; its module cannot be imported: {error}"
        raise ConfigError(missing_package(error, env) or problem) from None
