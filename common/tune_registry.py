"""Tune's registry of names, which carries values from the driver to trials and workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def share(name: str, value: Callable[..., Any]) -> None:
    """Makes a value known to all processes of the Ray job. Before Ray starts, once it does.

    Args:
        name: that no environment of the user has.
        value: a class or function, which is pickled now.
    """
    from ray.tune.registry import register_env  # imports Tune, which takes seconds

    register_env(name, value)


def shared(name: str) -> Callable[..., Any] | None:
    """What `share`, or the user's `register_env`, gave this name. None: nothing. The registry has
    no public reader."""
    return _registered("env_creator", name)


def registered_trainable(name: str) -> Callable[..., Any] | None:
    """The trainable that has a name. None: none has. The public reader would import RLlib and
    register its algorithms, if the name is unknown."""
    return _registered("trainable_class", name)


def _registered(category: str, name: str) -> Callable[..., Any] | None:
    # As long as Tune is not imported, nothing is registered with it.
    registry = sys.modules.get("ray.tune.registry")
    if registry is None:
        return None
    known = registry._global_registry
    if not known.contains(category, name):
        return None
    value: Callable[..., Any] = known.get(category, name)
    return value


def rllib_is_imported() -> bool:
    """Whether RLlib, which registers its algorithms under names that polopt also has, is there."""
    return "ray.rllib" in sys.modules
