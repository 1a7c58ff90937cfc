"""Shares named values between a driver and Tune's trials through Tune's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polopt.common.ray_names import registered


def share(name: str, value: Callable[..., Any]) -> None:
    """Makes a value available to all processes of the Ray job that have imported Tune. If Ray has
    not started yet, other processes can get the value once Ray has started.

    Args:
        name: a name that no environment of the user has.
        value: a class or function. It is pickled in this call.
    """
    from ray.tune import register_env  # imports Tune, which takes seconds

    register_env(name, value)


def shared(name: str) -> Callable[..., Any] | None:
    """Returns the value that `share` or the user's `register_env` registered under a name. Returns
    None if the name is not registered, or if this process has not imported Tune. Tune's registry
    has no public function for this."""
    return registered("env_creator", name)


def registered_trainable(name: str) -> Callable[..., Any] | None:
    """Returns the trainable that is registered under a name, or None if the name is not registered.
    For an unknown name, Tune's public function would import RLlib and register its algorithms."""
    return registered("trainable_class", name)
