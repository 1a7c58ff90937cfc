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


def get_env_statistics(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """Running statistics of all wrappers, the outermost first: `vector`, of those of the vector,
    and `envs`, of those of each environment: name, mean, variance and count. Empty where there are
    none. An `AsyncVectorEnv` has its environments in other processes; their statistics are not
    included.
    """
    vector = [_numbers(*one) for one in _statistics(env)]
    envs = [[_numbers(*one) for one in _statistics(sub)] for sub in _sub_envs(env)]
    return {"vector": vector, "envs": envs} if vector or any(envs) else {}


def set_env_statistics(env: VectorEnv[Any, Any, Any], saved: dict[str, Any]) -> None:
    """Restores what `get_env_statistics` returned for environments with the same wrappers. Where
    their number differs, each gets the statistics of all saved ones together.

    Raises:
        ValueError: the wrappers differ.
    """
    _set(list(_statistics(env)), saved["vector"])
    envs, chains = list(_sub_envs(env)), saved["envs"]
    if len(envs) != len(chains) and chains:
        chains = [_merged(chains)] * len(envs)
    for sub, chain in zip(envs, chains, strict=False):
        _set(list(_statistics(sub)), chain)


def merge_env_statistics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The statistics of several workers' environments together (Chan et al., 1983)."""
    chains = [chain for part in parts for chain in part["envs"]]
    return {
        "vector": _merged([part["vector"] for part in parts]),
        "envs": [_merged(chains)] if chains else [],
    }


def set_evaluation_statistics(env: Any, parts: list[dict[str, Any]]) -> None:
    """Gives environments the statistics of several workers' environments together, and freezes
    them, so that a policy acts on observations as in training.

    Args:
        env: a vector of environments, as in the workers; or one environment with their wrappers,
            without `NormalizeReward` if it is to keep its own rewards.
        parts: results of `get_env_statistics`.

    Raises:
        ValueError: the wrappers of observations differ.
    """
    together = merge_env_statistics(parts)
    if isinstance(env, VectorEnv):
        set_env_statistics(env, together)
        for one in (env, *_sub_envs(env)):
            _freeze(one)
        return
    saved = [*together["vector"], *(one for chain in together["envs"] for one in chain)]
    targets = list(_statistics(env))
    for name in _STATISTICS:
        named = [(n, target) for n, target in targets if n == name]
        if named or name == "obs_rms":
            _set(named, [one for one in saved if one["name"] == name])
    _freeze(env)


def _freeze(env: Any) -> None:
    for wrapper in _wrappers(env):
        if any(name in vars(wrapper) for name in _STATISTICS):
            wrapper.update_running_mean = False


def _merged(chains: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Statistics of the same wrappers of several environments together."""
    return [_sum(same) for same in zip(*chains, strict=True)]


def _sum(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    count = sum(part["count"] for part in parts)
    mean = sum(part["mean"] * (part["count"] / count) for part in parts)
    var = sum(
        (part["var"] + np.square(part["mean"] - mean)) * (part["count"] / count) for part in parts
    )
    return {"name": parts[0]["name"], "mean": mean, "var": var, "count": count}


def _numbers(name: str, statistics: Any) -> dict[str, Any]:
    mean, var = np.array(statistics.mean), np.array(statistics.var)
    return {"name": name, "mean": mean, "var": var, "count": float(statistics.count)}


def _set(targets: list[tuple[str, Any]], saved: list[dict[str, Any]]) -> None:
    kept = [(name, np.shape(target.mean)) for name, target in targets]
    got = [(one["name"], np.shape(one["mean"])) for one in saved]
    if kept != got:
        raise ValueError(
            f"environments keep {len(kept)} running statistics ({_shown(kept)}); "
            f"got {len(got)} ({_shown(got)})"
        )
    for (_, target), source in zip(targets, saved, strict=True):
        target.mean, target.var = np.array(source["mean"]), np.array(source["var"])
        target.count = source["count"]


def _shown(kinds: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name!s:.40} {list(shape)}" for name, shape in kinds) or "none"


def copy_statistics(old: Any, new: Any) -> None:
    """Copies finite running statistics from the wrappers of one environment to those of another
    with the same wrappers, and whether they are frozen."""
    for target, source in zip(_wrappers(new), _wrappers(old), strict=False):
        for name in _STATISTICS:
            if type(target) is type(source) and name in vars(source):
                target.update_running_mean = getattr(source, "update_running_mean", True)
                statistics = vars(source)[name]
                if np.isfinite(statistics.mean).all() and np.isfinite(statistics.var).all():
                    setattr(target, name, statistics)


def _statistics(env: Any) -> Iterator[tuple[str, Any]]:
    """Names and statistics of the wrappers of one environment, or of a vector without its
    environments."""
    for wrapper in _wrappers(env):
        for name in _STATISTICS:
            if name in vars(wrapper):
                yield name, vars(wrapper)[name]


def _sub_envs(env: VectorEnv[Any, Any, Any]) -> list[Any]:
    vector = env.unwrapped
    return list(vector.envs) if isinstance(vector, SyncVectorEnv) else []


def _time_limits(env: Any) -> list[Any]:
    """The wrappers that count steps; the counts belong to the environment's state."""
    return [wrapper for wrapper in _wrappers(env) if "_elapsed_steps" in vars(wrapper)]


def _wrappers(env: Any) -> Iterator[Any]:
    while env is not env.unwrapped:
        yield env
        env = env.env
