"""`resolve_env`: from what a config names to what workers make environments from."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from polopt.common.config import ConfigError, nearest
from polopt.common.tune_registry import shared
from polopt.rollouts.envs.missing_packages import missing_package

#: Gymnasium's ids that make the environment of another package that an option names.
_ADAPTERS = ("GymV21Environment-v0", "GymV26Environment-v0")
#: Modules that register ids of a namespace.
_MODULES = {"ALE": "ale_py"}
#: Of ids without a namespace that `ale_py` registers.
_ATARI_ENDINGS = ("NoFrameskip-v0", "NoFrameskip-v4", "Deterministic-v0", "Deterministic-v4")
#: What `resolve_env` returns and workers make environments from.
EnvSource = str | EnvSpec | Callable[..., Any]


def resolve_env(env: Any, allow_import: bool = True) -> EnvSource:
    """The source of an environment, usable in processes without the driver's registrations.

    A callable is returned as it is; a name registered with Tune becomes its creator, and a
    Gymnasium id its spec. For `module:name`, the module is imported first: a callable attribute
    `name` of it is returned, any other `name` is an id that the import registers.

    Args:
        env: value of the config key `env`.
        allow_import: import the module of `module:name`. False for a name that the user did not
            give, such as that of a checkpoint: then it has to be a registered id already, and not
            one that imports what `env_config` names.

    Raises:
        ConfigError: unknown id, with the nearest known one; a module that cannot be imported, or
            must not be.
    """
    if callable(env) or isinstance(env, EnvSpec):
        return env
    if not isinstance(env, str):
        raise ConfigError(
            f"key 'env': got {env!r}; allowed: a Gymnasium id, a name registered with "
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
            f"key 'env': got {env!r}; its module is imported only if the user names it, and "
            f"without the import the id {name!r} is unknown"
        )
    elif name in _ADAPTERS and not allow_import:
        raise ConfigError(
            f"key 'env': got {env!r}, which imports a module that env_config names; it is made "
            "only if the user names it"
        )
    try:
        return gymnasium.spec(name)
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


def env_name(source: EnvSource) -> str:
    """The name of an environment in error messages and logs."""
    if isinstance(source, EnvSpec):
        return source.id
    return source if isinstance(source, str) else getattr(source, "__name__", repr(source))


def _import(module_name: str, env: str) -> Any:
    importlib.invalidate_caches()  # the file may be newer than the last look at its folder
    try:
        return importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        problem = f"key 'env': got {env!r}; its module cannot be imported: {error}"
        raise ConfigError(missing_package(error, env) or problem) from None
