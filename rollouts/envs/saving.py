"""Saving where environments stand, for those that can say so.

Gymnasium has no such interface, and unpickling environments from a checkpoint is not safe. An
environment takes part by two methods, on the vector environment or on each sub-environment of a
`SyncVectorEnv`: `get_state()` returns arrays, numbers, strings, and lists and dicts of those, its
random generator's state included; `set_state(state)` takes it back.

What wrappers have learned of environments (`NormalizeObservation`, `NormalizeReward`) is saved by
itself, too, for it is worth keeping even where the environments start anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

#: Running statistics that Gymnasium's wrappers keep, of the single and of the vector kind.
_STATISTICS = ("obs_rms", "return_rms")


def get_env_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """The state of all environments; None where they can not tell."""
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
    """Takes back what `get_env_state` gave for environments of the same kind and number."""
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
    """Mean, variance and count of every wrapper that keeps them, the outermost first and then
    environment by environment. Those of an `AsyncVectorEnv` are in other processes and missing."""
    return [
        {"mean": np.array(s.mean), "var": np.array(s.var), "count": float(s.count)}
        for s in _statistics(env)
    ]


def set_env_statistics(env: VectorEnv[Any, Any, Any], saved: list[dict[str, Any]]) -> None:
    """Takes back what `get_env_statistics` gave for environments wrapped alike.

    Raises:
        ValueError: if they are wrapped otherwise.
    """
    own = list(_statistics(env))
    if len(own) != len(saved):
        raise ValueError(f"environments keep {len(own)} running statistics; got {len(saved)}")
    for mine, theirs in zip(own, saved, strict=True):
        mine.mean, mine.var = np.array(theirs["mean"]), np.array(theirs["var"])
        mine.count = theirs["count"]


def copy_statistics(old: Any, new: Any) -> None:
    """Gives the wrappers of one environment what those of another, wrapped alike, have learned.
    Statistics that are not finite are left behind."""
    for mine, theirs in zip(_wrappers(new), _wrappers(old), strict=False):
        for name in _STATISTICS:
            if type(mine) is type(theirs) and name in vars(theirs):
                learned = vars(theirs)[name]
                if np.isfinite(learned.mean).all() and np.isfinite(learned.var).all():
                    setattr(mine, name, learned)


def _statistics(env: VectorEnv[Any, Any, Any]) -> Iterator[Any]:
    vector = env.unwrapped
    chains = [_wrappers(env)]
    if isinstance(vector, SyncVectorEnv):
        chains += [_wrappers(sub) for sub in vector.envs]
    for chain in chains:
        for wrapper in chain:
            yield from (vars(wrapper)[name] for name in _STATISTICS if name in vars(wrapper))


def _time_limits(env: Any) -> list[Any]:
    """The wrappers that count steps; their counts are part of where the environment stands."""
    return [wrapper for wrapper in _wrappers(env) if "_elapsed_steps" in vars(wrapper)]


def _wrappers(env: Any) -> Iterator[Any]:
    while env is not env.unwrapped:
        yield env
        env = env.env
