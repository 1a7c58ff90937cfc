"""Imports Python objects that the command line names as `module:name` or `FILE.py:name`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from ray import cloudpickle
from torch import nn

from polopt.common.config import ConfigError
from polopt.common.registry import import_module
from polopt.policies.policy import Policy


def import_from(folder: Path) -> None:
    """Makes the modules of a directory importable. `python -m` does the same for the current
    directory, and so does Ray in workers."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_file(path: Path) -> ModuleType:
    """Executes a Python file as a module, and returns the module. The file may import other modules
    from its directory.

    Raises:
        Exception: the file raised an error.
    """
    import_from(path.resolve().parent)
    name = f"polopt_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Other processes cannot import the module under this name, so its classes are pickled by value.
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module


def named(name: str, option: str) -> Any:
    """Imports a module, and returns one of its objects.

    Args:
        name: the value of an option: `module:name` or `FILE.py:name`.
        option: name of the option, for error messages.

    Raises:
        ConfigError: `name` contains no module, or the module cannot be imported or does not define
            the object.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        raise ConfigError(f"{option} {name}. Allowed: module:NAME or FILE.py:NAME")
    import_from(Path.cwd())
    is_file = module_name.endswith(".py")
    try:
        load = functools.partial(import_file, Path(module_name)) if is_file else None
        module = import_module(module_name, load)
    except ImportError as error:
        raise ConfigError(f"{option} {name}: {error}") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{option} {name}: {module_name} does not define {attribute!r}")
    return getattr(module, attribute)


def named_classes(
    policy: str | None, network: str | None
) -> tuple[type[Policy] | None, type[nn.Module] | None]:
    """Returns the classes that the options `--policy` and `--network` name. Returns None for an
    option that is not given.

    Raises:
        ConfigError: an object does not exist, or is not such a class. Also see `named`.
    """
    return _named_class(policy, "--policy", Policy), _named_class(network, "--network", nn.Module)


def _named_class(name: str | None, option: str, base: type) -> Any:
    found = None if name is None else named(name, option)
    if found is None or (isinstance(found, type) and issubclass(found, base)):
        return found
    wanted = f"a subclass of {base.__module__}.{base.__name__}"
    raise ConfigError(f"{option} {name}: got {found!r:.100}. Allowed: {wanted}")


def name_on_command_line(value: Any) -> str | None:
    """Returns the value of `--env` or `--network` with which `polopt evaluate` finds an environment
    or a network class.

    Returns an empty string if `polopt evaluate` does not need the option. Returns None for an
    object that no option value can name, such as a lambda, a local function, a local class, or a
    spec that is not registered with Gymnasium.
    """
    if isinstance(value, str):
        return value if ":" in value else ""
    if isinstance(value, EnvSpec):
        return value.id if value == gymnasium.registry.get(value.id) else None
    name, module = getattr(value, "__qualname__", ""), inspect.getmodule(value)
    if not name.isidentifier() or getattr(module, name, None) is not value:
        return None
    file = Path(getattr(module, "__file__", None) or "")
    # An installed module is named by its import name, and any other module by its file.
    return f"{value.__module__ if 'site-packages' in file.parts else file}:{name}"
