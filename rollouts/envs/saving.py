"""Saves and restores the state of environments that support it.

Gymnasium has no interface for this, and unpickling environments from a checkpoint is not safe. An
environment supports it with two methods, on the vector environment or on each sub-environment of a
`SyncVectorEnv`: `get_state()` returns arrays, numbers, strings, and lists and dicts of those, the
state of its random generator included; `set_state(state)` restores it.

Running statistics of wrappers (`NormalizeObservation`, `NormalizeReward`) are saved separately, and
also restored where the environments start new episodes.

Two private names of Gymnasium have no public equivalent and are used in this file alone: the step
count of `TimeLimit`, and the flags of a vector's next-step resets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

#: Running statistics of Gymnasium's wrappers, of the single and of the vector kind.
_STATISTICS = ("obs_rms", "return_rms")


def get_env_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """The state of all environments; None if one of them does not support it."""
    vector = env.unwrapped
    if hasattr(vector, "get_state"):
        return {"vector": vector.get_state()}
    if isinstance(vector, SyncVectorEnv) and all(_has_state(sub) for sub in vector.envs):
        return {
            "envs": [sub.get_wrapper_attr("get_state")() for sub in vector.envs],
            "elapsed": [[w._elapsed_steps for w in _time_limits(sub)] for sub in vector.envs],
            "autoreset": vector._autoreset_envs.copy(),
        }
    return None


def set_env_state(env: VectorEnv[Any, Any, Any], state: dict[str, Any]) -> None:
    """Restores what `get_env_state` returned for environments of the same kind and number."""
    vector: Any = env.unwrapped
    if "vector" in state:
        vector.set_state(state["vector"])
        return
    for sub, sub_state, elapsed in zip(vector.envs, state["envs"], state["elapsed"], strict=True):
        sub.get_wrapper_attr("set_state")(sub_state)
        for limit, steps in zip(_time_limits(sub), elapsed, strict=True):
            limit._elapsed_steps = steps
    vector._autoreset_envs = np.asarray(state["autoreset"], dtype=bool)


def _has_state(env: Any) -> bool:
    return bool(env.has_wrapper_attr("get_state") and env.has_wrapper_attr("set_state"))


def get_env_statistics(env: VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """Mean, variance and count of the running statistics of all wrappers: those of the vector, the
    outermost first, then those of each environment. An `AsyncVectorEnv` has its environments in
    other processes; their statistics are not included."""
    return [
        {"mean": np.array(s.mean), "var": np.array(s.var), "count": float(s.count)}
        for s in _statistics(env)
    ]


def set_env_statistics(env: VectorEnv[Any, Any, Any], saved: list[dict[str, Any]]) -> None:
    """Restores what `get_env_statistics` returned for environments with the same wrappers.

    Raises:
        ValueError: another number of statistics.
    """
    current = list(_statistics(env))
    if len(current) != len(saved):
        raise ValueError(f"environments keep {len(current)} running statistics; got {len(saved)}")
    for target, source in zip(current, saved, strict=True):
        target.mean, target.var = np.array(source["mean"]), np.array(source["var"])
        target.count = source["count"]


def copy_statistics(old: Any, new: Any) -> None:
    """Copies finite running statistics from the wrappers of one environment to those of another
    with the same wrappers."""
    for target, source in zip(_wrappers(new), _wrappers(old), strict=False):
        for name in _STATISTICS:
            if type(target) is type(source) and name in vars(source):
                statistics = vars(source)[name]
                if np.isfinite(statistics.mean).all() and np.isfinite(statistics.var).all():
                    setattr(target, name, statistics)


def _statistics(env: VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    vector = env.unwrapped
    chains = [_wrappers(env)]
    if isinstance(vector, SyncVectorEnv):
        chains += [_wrappers(sub) for sub in vector.envs]
    for chain in chains:
        for wrapper in chain:
            yield from (vars(wrapper)[name] for name in _STATISTICS if name in vars(wrapper))


def _time_limits(env: Any) -> list[Any]:
    """The wrappers that count steps; the counts belong to the environment's state."""
    return [wrapper for wrapper in _wrappers(env) if "_elapsed_steps" in vars(wrapper)]


def _wrappers(env: Any) -> Iterator[Any]:
    while env is not env.unwrapped:
        yield env
        env = env.env
