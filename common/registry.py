"""`Registry`: maps names to classes of policies, optimizers or networks."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from polopt.common.add_ons import hint
from polopt.common.config import ConfigError, nearest_of
from polopt.common.ray_names import registered


class Registry:
    """Maps names to classes. A class is built in, registered by a call of `register`, or listed as
    an entry point of an installed package.

    Args:
        kind: `"policy"`, `"optimizer"` or `"network"`, for error messages.
        entry_point_group: the entry-point group in which installed packages list their classes.
        base: the base class as `module:Class`. All registered classes must be subclasses of it.
        builtin: the built-in classes, `{name: "module:Class"}`. A class is imported when it is
            first requested.
    """

    def __init__(
        self, kind: str, entry_point_group: str, base: str, builtin: dict[str, str]
    ) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._base = base
        self._known: dict[str, Any] = dict(builtin)

    def register(self, name: str, cls: type, override: bool = False) -> None:
        """Registers `cls` under a name. Configs can then use the name, also in Tune's trials.

        Args:
            name: the name that configs use.
            cls: a subclass of the base class.
            override: whether to replace an existing class with this name. The same class may always
                be registered again.

        Raises:
            ConfigError: if `cls` is not a subclass of the base class, or if another class has the
                name and `override` is False.
        """
        self._check(name, cls)
        known = self.paths().get(name)
        if known is not None and known != _path(cls) and not override:
            raise ConfigError(
                f"register {self._kind} {name!r}: the name belongs to {known}. Allowed: another "
                "name, or override=True"
            )
        self._known[name] = cls
        from ray.tune import register_env  # imports Tune, which takes seconds

        register_env(self._shared_name(name), cls)  # for the processes of trials

    def _shared_name(self, name: str) -> str:
        return f"polopt/{self._kind}/{name}"

    def _check(self, name: str, cls: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, load_path(self._base))):
            raise ConfigError(
                f"{self._kind} {name!r}: got {cls!r}. Allowed: a subclass of {self._base}"
            )

    def get(self, name: Any) -> Any:
        """Returns the class with a name. If `name` is itself a subclass of the base class, returns
        `name`.

        Raises:
            ConfigError: if the name is unknown, if an entry point cannot be imported, or if a given
                class or the class of an entry point is not a subclass of the base class. For an
                unknown name, the message suggests known names.
        """
        if isinstance(name, type):
            self._check(name.__name__, name)
            if self.name_of(name) is None:
                self._known.setdefault(name.__name__, name)
            return name
        if not isinstance(self._known.get(name), type):  # not registered in this process
            # The driver of this trial may have registered the name.
            cls = registered("env_creator", self._shared_name(name))
            if cls is not None:
                self._known[name] = cls
            elif name not in self._known:
                self._load_entry_point(name)
        if name not in self._known:
            known = self.names()
            others = nearest_of(name, known) if known else ". No class is registered"
            others = f". {instead}" if (instead := hint(self._kind, name)) else others
            raise ConfigError(f"key {self._kind!r}: got {name!r}{others}")
        found = self._known[name]
        return load_path(found) if isinstance(found, str) else found

    def named(self, value: Any) -> Any:
        """Imports and returns the class that a user's `module:Class` names. Returns other values
        unchanged. This is separate from `get`, because `get` also receives names from checkpoints,
        and a module that only a checkpoint names must not be imported.

        Raises:
            ConfigError: if the class cannot be imported or found, or is not a subclass of the base
                class.
        """
        if not isinstance(value, str) or ":" not in value:
            return value
        try:
            found = load_path(value)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"key {self._kind!r}: got {value!r}: {error}. Allowed: 'module:Class' of a "
                f"subclass of {self._base}, or one of {', '.join(map(repr, self.names()))}"
            ) from None
        self._check(value, found)
        return found

    def name_of(self, cls: type) -> str | None:
        """Returns a name of `cls`, or None if `cls` is not registered."""
        return next((n for n, known in self._known.items() if known in (cls, _path(cls))), None)

    def saved_name(self, plugin: Any) -> Any:
        """Returns the name that checkpoints store for a class: a registered name, or the name of
        the class itself. Returns a name unchanged."""
        return (self.name_of(plugin) or plugin.__name__) if isinstance(plugin, type) else plugin

    def is_installed(self, cls: type) -> bool:
        """Returns whether a class is built in or installed as an entry point. A new process then
        finds the class by its name."""
        built_in = [known for known in self._known.values() if isinstance(known, str)]
        entries = [entry.value for entry in metadata.entry_points(group=self._group)]
        return _path(cls) in (*built_in, *entries)

    def names(self) -> list[str]:
        """Returns all known names, sorted."""
        return sorted(self.paths())

    def paths(self) -> dict[str, str]:
        """Returns all names with their classes as `module:Class`. Does not import the classes."""
        offered = {entry.name: entry.value for entry in metadata.entry_points(group=self._group)}
        known = {
            name: cls if isinstance(cls, str) else _path(cls) for name, cls in self._known.items()
        }
        return {**offered, **known}

    def _load_entry_point(self, name: Any) -> None:
        for entry in metadata.entry_points(group=self._group, name=str(name)):
            try:
                found = entry.load()
            except Exception as error:  # a plugin's import may raise anything
                raise ConfigError(
                    f"{self._kind} {name!r} is installed as {entry.value}, which cannot be "
                    f"imported: {type(error).__name__}: {error}"
                ) from error
            self._check(str(name), found)
            self._known[str(name)] = found


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def load_path(path: str) -> Any:
    """Imports a module and returns the object that `module:Class` names.

    Raises:
        ImportError: if the module cannot be imported, for example because it raises an error.
        AttributeError: if the module has no such attribute.
    """
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def import_module(name: str, load: Callable[[], ModuleType] | None = None) -> ModuleType:
    """Imports a module that a user names.

    Args:
        name: name of the module, for the error message.
        load: imports the module. `None` means `importlib.import_module(name)`.

    Raises:
        ImportError: the module cannot be imported. If the module raised an error such as a
            ValueError, the message names the error, the file and the line.
    """
    if not name:
        raise ImportError("the name of the module is empty")
    try:
        return importlib.import_module(name) if load is None else load()
    except ImportError:
        raise
    except (OSError, SyntaxError) as error:
        raise ImportError(str(error)) from error
    except Exception as error:  # a user's module may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ImportError(
            f"{name} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error
