"""The sources of environments: `resolve_env` finds the source for the `env` of a config, and
`make_env` makes an environment with a source that is a callable."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import VectorEnv

from polopt.common.config import ConfigError, nearest, shown
from polopt.common.ray_names import registered
from polopt.common.registry import import_module
from polopt.rollouts.envs.agents_env import AgentsEnv, agents_env, has_agents
from polopt.rollouts.envs.env_errors import innermost, missing_package
from polopt.rollouts.envs.old_gym import adapted

#: The ids of Gymnasium's adapters for environments of the old package `gym`. The option `env_id` of
#: an adapter may name a module, which `gym` then imports.
_ADAPTERS = ("GymV21Environment-v0", "GymV26Environment-v0")
#: Maps a namespace of ids to the module that registers these ids.
_MODULES = {"ALE": "ale_py"}
#: `ale_py` also registers ids without a namespace. Many of these ids have one of these endings.
_ATARI_ENDINGS = ("NoFrameskip-v0", "NoFrameskip-v4", "Deterministic-v0", "Deterministic-v4")
#: The source of an environment: what `resolve_env` returns. Workers make environments from it.
EnvSource = str | EnvSpec | Callable[..., Any]
#: A first parameter with one of these names usually receives the whole config, as in RLlib's
#: environments. See `_takes_context`.
_CONFIG_NAMES = {"config", "env_config", "env_context", "context", "ctx", "cfg"}
#: The functions that make the environment of a module of PettingZoo or MPE2. The first one that the
#: module has is used.
_CREATORS = ("parallel_env", "env", "raw_env")
#: PettingZoo's wrappers that only check how an AECEnv is used.
_CHECKS = ("OrderEnforcingWrapper", "AssertOutOfBoundsWrapper")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
      result is this callable. If `name` is a module in it with one of the functions `parallel_env`,
      `env` and `raw_env`, as in `mpe2:simple_spread_v3`, the result calls this function with the
      options in `env_config`. Otherwise, `name` must be a Gymnasium id after the import, or an id
      of PettingZoo.
    - For an id that only PettingZoo knows, such as `butterfly/pistonball-v6`, the result makes the
      environment with `pettingzoo.make`. It makes a ParallelEnv if PettingZoo has both forms.

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
    creator = registered("env_creator", env)
    if creator is not None:
        return creator
    module_name, _, name = env.rpartition(":")
    modules: list[str] = []
    if module_name and allow_import:
        module = _import(module_name, env)
        creator = _creator_in(module, name, env)
        if creator is not None:
            return creator
        inside = pkgutil.iter_modules(getattr(module, "__path__", []))
        modules = [f"{module_name}:{one.name}" for one in inside]
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
        creator = _creator_of_pettingzoo(name)
        if creator is not None:
            return creator
        atari = "ale_py" if name.endswith(_ATARI_ENDINGS) else None
        module = _MODULES.get(name.partition("/")[0], atari)
        meant = nearest(env, modules) or nearest(name, gymnasium.registry)
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
        ConfigError: if `env` is an environment, also one with several agents, or a vector
            environment. The message says what the user can pass instead.
    """
    if not isinstance(env, gymnasium.Env | VectorEnv) and not has_agents(env):
        return
    spec = getattr(env, "spec", None)
    size = f", num_envs={env.num_envs}" if isinstance(env, VectorEnv) else ""
    if isinstance(spec, EnvSpec):
        instead = f"the id {spec.id!r}, or a function"
        call = f"gymnasium.make{'_vec' * bool(size)}({spec.id!r}{size})"
    else:
        instead, call = "its class, or a function", f"{type(innermost(env)).__name__}(...)"
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


def _creator_in(module: Any, name: str, env: str) -> Callable[..., Any] | None:
    """Returns the callable that a name in a module stands for (see `resolve_env`), or None."""
    try:
        found = getattr(module, name, None)
    except ImportError as error:  # PettingZoo's packages import a game when they are asked for it
        raise _import_failed(error, env) from None
    if callable(found):
        return found
    if found is None or inspect.ismodule(found):
        # PettingZoo's packages would execute the module again each time that they are asked for it.
        path = f"{module.__name__}.{name}"
        is_module = hasattr(module, "__path__") and name.isidentifier()
        if not is_module or importlib.util.find_spec(path) is None:
            return None
        found = _import(path, env)
    for attribute in _CREATORS:
        create = getattr(found, attribute, None)
        if callable(create):
            return _with_options(create, name)
    return None


def _creator_of_pettingzoo(name: str) -> Callable[..., Any] | None:
    """Returns a callable that makes the environment with an id of PettingZoo. Returns None if
    PettingZoo is not installed, does not know the id, or has no registry, as before version 1.27.
    """
    if importlib.util.find_spec("pettingzoo") is None:
        return None
    pettingzoo = importlib.import_module("pettingzoo")
    for form in ("parallel", "aec"):
        if name in getattr(pettingzoo, f"{form}_registry", ()):
            # The spec works in processes without the driver's registrations.
            make = functools.partial(pettingzoo.make, form, pettingzoo.spec(form, name))
            return _with_options(make, name)
    return None


def _with_options(create: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function with a name for messages. It calls `create` with keyword options, and
    returns the environment of PettingZoo `_without_checks`."""

    def make(**options: Any) -> Any:
        return _without_checks(create(**options))

    make.__name__ = name
    return make


def _without_checks(env: Any) -> Any:
    """Removes the outer wrappers of PettingZoo that only check the order of calls and the actions.
    They take a third of the time of a step of `simple_spread_v3`, and are not needed: the sampler
    always resets first, and the actions of policies are in the action space. A ParallelEnv that
    converts an AECEnv stays, and loses the wrappers of the AECEnv.
    """
    converted = getattr(env, "__dict__", {}).get("aec_env")
    if converted is not None:
        env.aec_env = _without_checks(converted)
        return env
    while type(env).__name__ in _CHECKS and type(env).__module__.startswith("pettingzoo.utils."):
        env = env.env
    return env


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
        raise _import_failed(error, env) from None


def _import_failed(error: ImportError, env: str) -> ConfigError:
    problem = f"key 'env': got {env!r}; its module cannot be imported: {error}"
    return ConfigError(missing_package(error, env) or problem)


class EnvContext(dict[str, Any]):
    """A copy of `env_config` for one environment, with the indices of the environment.

    The environment may change the copy. `own_copy` describes which values cannot be copied and are
    shared instead.

    Two environments of a run that exist at the same time have different pairs of `worker_index` and
    `vector_index`. An environment can therefore derive a port, a licence or its part of a data set
    from the pair. There is one exception: a training worker that `WorkerSet.add_workers` adds may
    have the index of an evaluation worker. `in_evaluation` distinguishes their environments.

    Attributes:
        worker_index: the index of the worker. The indices of training workers begin at 1.
            Index 0 means training in the driver's process. Before training, polopt makes and closes
            one environment to check the config, and this environment also has index 0. Evaluation
            workers have the indices after the last training worker. This is also true for
            evaluation in the driver's process and in `polopt evaluate`.
        vector_index: the index of the environment within its worker.
        num_workers: the number of remote training workers. In an evaluation environment, the number
            of remote evaluation workers. In a worker that samples for a gradient worker, the number
            of workers that sample for the same gradient worker.
        in_evaluation: whether the environment is used for evaluation. The policy does not learn
            from such an environment.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        worker_index: int,
        vector_index: int,
        num_workers: int,
        in_evaluation: bool = False,
    ) -> None:
        super().__init__(own_copy(dict(config)))
        self.in_evaluation = in_evaluation
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers


def make_env(make: Callable[..., Any], context: EnvContext) -> Any:
    """Makes an environment or a vector environment with a user's callable. An environment with
    several agents becomes an `AgentsEnv`. For the API of Gym before 0.26, see `adapted`.

    Args:
        make: the user's callable. `call_creator` describes the signatures that are supported.
        context: the config and the indices of the environment.

    Raises:
        TypeError: if the callable returns anything else.
        APIViolation: if an environment with several agents does not name its agents or spaces.
        Exception: any exception that the callable raises.
    """
    made = call_creator(make, context)
    env = agents_env(made) or made
    if not isinstance(env, AgentsEnv | VectorEnv):
        env = adapted(env, says=context.worker_index == 0)
    if not isinstance(env, gymnasium.Env | VectorEnv):
        raise TypeError(
            "the callable must return a gymnasium.Env, a gymnasium.vector.VectorEnv, PettingZoo's "
            f"ParallelEnv or AECEnv, or RLlib's MultiAgentEnv; got {env!r:.200}"
        )
    return env


def call_creator(make: Callable[..., Any], context: EnvContext) -> Any:
    """Calls a creator with the arguments that fit its signature.

    There are two conventions, and `_takes_context` decides between them. In RLlib's convention, the
    context is the only argument of the creator. In Gymnasium's convention, the options in the
    config are keyword arguments of the creator. A creator without parameters is therefore called
    without arguments if the config is empty.
    """
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature
        return make(context)
    return make(context) if _takes_context(parameters, context) else make(**context)


def _takes_context(parameters: Sequence[inspect.Parameter], context: EnvContext) -> bool:
    """Returns whether the first parameter of a creator receives the whole config.

    The first parameter receives the whole config in three cases:

    - The parameter is annotated with `EnvContext`.
    - The parameter has one of the names in `_CONFIG_NAMES`.
    - The parameter is the only required parameter.

    A parameter with the annotation always receives the whole config. Without the annotation, the
    first parameter may instead receive the value of the key with the same name. This requires that
    the parameter can be passed by name, that `env_config` has this key, and one of these
    conditions:

    - A parameter with a name in `_CONFIG_NAMES` receives the value if the creator has other
      parameters and accepts all other keys. This condition is strict because the config of an RLlib
      environment may contain a key `config`.
    - A parameter with another name receives the value if the creator has other parameters, or if
      the config has no other keys.
    """
    if not parameters or parameters[0].kind not in _POSITIONAL:
        return False
    first, others = parameters[0], parameters[1:]
    usual = first.name in _CONFIG_NAMES
    if "EnvContext" in str(first.annotation):
        return True
    if first.default is not first.empty and not usual:
        return False
    if first.kind is not first.POSITIONAL_ONLY and first.name in context:
        names = {one.name for one in parameters}
        fits = any(one.kind is one.VAR_KEYWORD for one in others) or context.keys() <= names
        if usual:
            return not (others and fits)
        return not (others or fits)
    if usual:
        return True
    required = [one for one in parameters if one.default is one.empty and one.kind not in _VARIABLE]
    return required == [first]


def own_copy(value: Any) -> Any:
    """Returns a deep copy of a value from a user's program or environment.

    Some objects cannot be copied: for example a lock, an open file, a generator, a module, or a
    tensor with a graph. The copy shares these objects with the original. The dicts, lists, tuples
    and sets around these objects are new. Objects of other types that hold such an object are also
    shared.
    """
    return _copied(value, {})


class OwnCopies(dict[str, Any]):
    """A dict that `copy.deepcopy` copies with `own_copy`. The config of a trainer is such a dict,
    because Ray copies it with `copy.deepcopy`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(own_copy(dict(self)))


def _copied(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:  # the value contains itself
        return made[id(value)]
    try:
        return deepcopy(value)
    except Exception:  # a user's `__deepcopy__` may raise anything
        # The value is copied part by part below, outside of this block, so that the exception does
        # not become the context of later exceptions.
        pass
    kind = type(value)
    if kind is dict:
        result = made[id(value)] = {}
        result.update((key, _copied(one, made)) for key, one in value.items())
        return result
    if kind is list:
        parts = made[id(value)] = []
        parts.extend(_copied(one, made) for one in value)
        return parts
    if kind in (tuple, set, frozenset):
        made[id(value)] = value  # a tuple that contains itself keeps a reference to the original
        copied = made[id(value)] = kind(_copied(one, made) for one in value)
        return copied
    return value
