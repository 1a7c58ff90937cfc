"""Saving where environments stand, for those that can say so.

Gymnasium has no such interface, and unpickling environments from a checkpoint is not safe. An
environment takes part by two methods, on the vector environment or on each sub-environment of a
`SyncVectorEnv`: `get_state()` returns arrays, numbers, strings, and lists and dicts of those, its
random generator's state included; `set_state(state)` takes it back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv


def get_env_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """The state of all environments; None where they can not tell."""
    vector = env.unwrapped
    if hasattr(vector, "get_state"):
        return {"vector": vector.get_state()}
    if isinstance(vector, SyncVectorEnv) and all(_has_state(sub) for sub in vector.envs):
        return {
            "envs": [sub.get_wrapper_attr("get_state")() for sub in vector.envs],
            "elapsed": [_elapsed(sub) for sub in vector.envs],
            "autoreset": vector._autoreset_envs.copy(),
        }
    return None


def set_env_state(env: VectorEnv[Any, Any, Any], state: dict[str, Any]) -> None:
    """Takes back what `get_env_state` gave for environments of the same kind and number."""
    vector: Any = env.unwrapped
    if "vector" in state:
        vector.set_state(state["vector"])
        return
    for sub, sub_state, elapsed in zip(vector.envs, state["envs"], state["elapsed"], strict=True):
        sub.get_wrapper_attr("set_state")(sub_state)
        limit = _time_limit(sub)
        if limit is not None:
            limit._elapsed_steps = elapsed
    vector._autoreset_envs = np.asarray(state["autoreset"], dtype=bool)


def _has_state(env: Any) -> bool:
    return bool(env.has_wrapper_attr("get_state") and env.has_wrapper_attr("set_state"))


def _time_limit(env: Any) -> Any:
    """The wrapper that counts steps; its count is part of where the environment stands."""
    while env is not env.unwrapped:
        if hasattr(env, "_elapsed_steps"):
            return env
        env = env.env
    return None


def _elapsed(env: Any) -> int | None:
    limit = _time_limit(env)
    return None if limit is None else limit._elapsed_steps
