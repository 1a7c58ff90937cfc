"""Saves and restores the state of environments that support checkpoints.

Gymnasium has no interface for the state of an environment, and unpickling environments from a
checkpoint is not safe. An environment therefore supports checkpoints with two optional methods:

- `get_checkpoint_state()` returns the state of the environment, including the state of its random
  generator. The state is plain data: None, booleans, numbers, strings, bytes, arrays and tensors,
  and lists, tuples, sets and dicts of these values (see `polopt.common.plain_data`).
- `set_checkpoint_state(state)` restores this state. All values are restored with their types, and
  tensors on the CPU.

Either the vector environment or each sub-environment of a `SyncVectorEnv` defines the two methods.

Running statistics of wrappers are saved separately. `NormalizeObservation`, `NormalizeReward` and
similar wrappers keep a mean, a variance and a count as `obs_rms` or `return_rms`. These statistics
are also restored if the environments begin new episodes.

If a method raises, or returns a value that a checkpoint cannot hold, the run goes on without the
state. One warning names the class of the environment and the method.

This file alone uses two private names of Gymnasium, which have no public equivalent: the step count
of `TimeLimit`, and a vector's flags for resets at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import TimeLimit

from polopt.common.plain_data import plain
from polopt.rollouts.envs.env_errors import innermost, warn_without

#: Attributes with running statistics. Gymnasium's wrappers of environments and of vector
#: environments both use these names.
_STATISTICS = ("obs_rms", "return_rms")
#: The flag of Gymnasium's wrappers that says whether their statistics change.
_FLAG = "update_running_mean"
_GET, _SET = "get_checkpoint_state", "set_checkpoint_state"
_NEW_EPISODES = "environments begin new episodes when a run is restored"


def get_env_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """Returns a copy of the state of all environments. Returns None if an environment does not
    support checkpoints, raises, or returns a value that a checkpoint cannot hold."""
    vector: Any = env.unwrapped
    of_vector = _method(vector, _GET) is not None
    owners = [vector] if of_vector else _sub_envs(env)
    states = get_states(owners)
    if not states:
        return None
    if of_vector:
        return {"vector": states[0]}
    return {
        "envs": states,
        "elapsed": [[limit._elapsed_steps for limit in _time_limits(sub)] for sub in owners],
    }


def get_states(owners: Iterable[Any]) -> list[Any] | None:
    """Returns copies of the states of some environments or vectors. Returns None in the cases that
    `get_env_state` describes."""
    states = []
    for owner in owners:
        get = _method(owner, _GET)
        if get is None or _method(owner, _SET) is None:
            if get is not None:
                warn_without(innermost(owner), _SET, "there is no such method", _NEW_EPISODES)
            return None
        try:
            states.append(plain(get()))
        except Exception as error:  # a user's method may raise anything
            warn_without(innermost(owner), f"{_GET}()", error, _NEW_EPISODES)
            return None
    return states


def set_states(owners: Iterable[Any], states: Iterable[Any]) -> bool:
    """Restores states that `get_states` returned. Returns whether all could be restored."""
    return all(_restore(owner, one) for owner, one in zip(owners, states, strict=True))


def set_env_state(
    env: VectorEnv[Any, Any, Any], state: dict[str, Any], resets_next: np.ndarray
) -> bool:
    """Restores a state that `get_env_state` returned.

    Args:
        env: the vector environment.
        state: the state.
        resets_next: `[N]` bool, True for each environment that the vector resets in its next step.

    Returns:
        whether all environments restored their state. If False, some environments may have restored
        their state and others not, so the caller must begin new episodes in all environments.
    """
    vector: Any = env.unwrapped
    if "vector" in state:
        return _restore(vector, state["vector"])
    # The number of environments, their time limits or the kind of the vector may have changed.
    subs = getattr(vector, "envs", ())
    if [len(_time_limits(sub)) for sub in subs] != [len(one) for one in state["elapsed"]]:
        return False
    for sub, sub_state, elapsed in zip(subs, state["envs"], state["elapsed"], strict=True):
        if not _restore(sub, sub_state):
            return False
        for limit, steps in zip(_time_limits(sub), elapsed, strict=True):
            limit._elapsed_steps = steps
    vector._autoreset_envs = resets_next.copy()
    return True


def _restore(env: Any, state: Any) -> bool:
    restore = _method(env, _SET)
    try:
        if restore is None:
            raise AttributeError("the environment has no such method")
        restore(state)
    except Exception as error:  # a user's method may raise anything
        warn_without(innermost(env), f"{_SET}()", error, "its environments begin new episodes")
        return False
    return True


def _method(env: Any, name: str) -> Any:
    """Returns an attribute of an environment or of one of its wrappers. Returns None if the
    attribute does not exist or cannot be read."""
    try:
        return env.get_wrapper_attr(name) if isinstance(env, gymnasium.Env) else getattr(env, name)
    except AttributeError:
        return None
    except Exception as error:  # a property may raise anything
        warn_without(innermost(env), name, error, _NEW_EPISODES)
        return None


def get_env_statistics(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """Returns the running statistics of all wrappers, starting with the outermost wrapper.

    The key `vector` holds the statistics of the wrappers of the vector. The key `envs` holds one
    list for each environment, with the statistics of its wrappers. Each entry has a name, a mean, a
    variance and a count. The result is empty if no wrapper keeps statistics.

    The environments of an `AsyncVectorEnv` run in other processes. The result does not include the
    statistics of these environments.
    """
    vector = [numbers for _, _, numbers in _statistics(env)]
    envs = [[numbers for _, _, numbers in _statistics(sub)] for sub in _sub_envs(env)]
    return {"vector": vector, "envs": envs} if vector or any(envs) else {}


def set_env_statistics(env: VectorEnv[Any, Any, Any], saved: dict[str, Any]) -> None:
    """Restores statistics that `get_env_statistics` returned for environments with the same
    wrappers. If the number of environments differs from the saved number, each environment receives
    the combined statistics of all saved environments.

    Raises:
        ValueError: if the wrappers keep other statistics than the saved statistics.
    """
    _set(env, list(_statistics(env)), saved["vector"])
    envs, chains = list(_sub_envs(env)), saved["envs"]
    if len(envs) != len(chains) and chains:
        chains = [_merged(chains)] * len(envs)
    for sub, chain in zip(envs, chains, strict=False):
        _set(sub, list(_statistics(sub)), chain)


def merge_env_statistics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines results of `get_env_statistics` from several workers (Chan et al., 1983). The key
    `envs` of the result holds one list for all environments together.

    Raises:
        ValueError: if the environments keep different statistics.
    """
    chains = [chain for part in parts for chain in part["envs"]]
    return {
        "vector": _merged([part["vector"] for part in parts]),
        "envs": [_merged(chains)] if chains else [],
    }


def saved_statistics(workers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the running statistics in the states of workers, of the workers that have any."""
    return [one["statistics"] for one in workers if one.get("statistics")]


def set_evaluation_statistics(env: Any, parts: list[dict[str, Any]]) -> None:
    """Sets the statistics of evaluation environments to the combined statistics of several workers,
    and freezes them. The policy then receives observations that are normalised as in training.

    Args:
        env: a vector of environments like the vectors of the workers, or one environment with the
            same wrappers. One environment may omit `NormalizeReward`, and then returns raw rewards.
        parts: results of `get_env_statistics`.

    Raises:
        ValueError: if the wrappers of `env` differ from the wrappers of the workers. If `env` is a
            single environment, it may lack `NormalizeReward`.
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
        named = [target for target in targets if target[0] == name]
        if named or name == "obs_rms":
            _set(env, named, [one for one in saved if one["name"] == name])
    _freeze(env)


def _freeze(env: Any) -> None:
    for wrapper in _wrappers(env):
        if any(True for _ in _statistics_of(wrapper)):
            _set_frozen(wrapper, True)


def _set_frozen(wrapper: Any, frozen: bool) -> None:
    """Stops or starts the updates of a wrapper's statistics. To do this, sets the attribute
    `update_running_mean`, which Gymnasium's wrappers have. If the wrapper has no boolean attribute
    of this name, it cannot be frozen, and an attempt to freeze it logs a warning."""
    if isinstance(_flag_of(wrapper), bool):
        setattr(wrapper, _FLAG, not frozen)
    elif frozen:
        without = "evaluation also changes the running statistics of this wrapper"
        warn_without(wrapper, _FLAG, "it is not a boolean as in Gymnasium's wrappers", without)


def _flag_of(wrapper: Any) -> Any:
    try:
        return getattr(wrapper, _FLAG, None)
    except Exception:  # a user's class may raise anything
        return None


def _merged(chains: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combines the statistics of several environments with the same wrappers.

    Args:
        chains: for each environment, the statistics of its wrappers.
    """
    # Some environments may not have created all of their statistics yet. Their shorter chains are
    # skipped.
    longest = max(map(len, chains), default=0)
    whole = [chain for chain in chains if len(chain) == longest]
    if any(_kinds(chain) != _kinds(whole[0]) for chain in whole):
        raise ValueError("environments keep different running statistics")
    return [_sum(same) for same in zip(*whole, strict=True)]


def _kinds(chain: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(one["name"], np.shape(one["mean"])) for one in chain]


@np.errstate(all="ignore")
def _sum(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    count = sum(part["count"] for part in parts)
    shares = [part["count"] / count if count else 1 / len(parts) for part in parts]
    mean = sum(part["mean"] * share for part, share in zip(parts, shares, strict=True))
    var = sum(
        (part["var"] + np.square(part["mean"] - mean)) * share
        for part, share in zip(parts, shares, strict=True)
    )
    return {"name": parts[0]["name"], "mean": mean, "var": var, "count": count}


def _numbers(name: str, statistics: Any) -> dict[str, Any]:
    """Returns a copy of running statistics.

    Raises:
        Exception: if `statistics` does not have a mean, a variance and a count that can be used.
    """
    mean, var = _array(statistics.mean), _array(statistics.var)
    count = float(statistics.count)
    if mean.dtype.kind not in "biuf" or var.dtype.kind not in "biuf" or mean.shape != var.shape:
        raise TypeError("its mean and variance are not arrays of numbers of the same shape")
    if not (math.isfinite(count) and count >= 0.0):
        raise ValueError(f"its count is {count}")
    return {"name": name, "mean": mean, "var": var, "count": count}


def _array(value: Any) -> np.ndarray:
    return np.array(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)


def _set(
    env: Any, targets: list[tuple[str, Any, dict[str, Any]]], saved: list[dict[str, Any]]
) -> None:
    kept = _kinds([numbers for _, _, numbers in targets])
    got = _kinds(saved)
    if kept != got:
        named = sum(name in vars(one) for one in _wrappers(env) for name in _STATISTICS)
        if named > len(list(_statistics(env))):
            return  # `_statistics_of` has warned about statistics that cannot be used
        raise ValueError(
            f"environments keep {len(kept)} running statistics ({_shown(kept)}); "
            f"got {len(got)} ({_shown(got)})"
        )
    for (name, target, _), source in zip(targets, saved, strict=True):
        try:
            for part in ("mean", "var", "count"):
                setattr(target, part, _like(getattr(target, part), source[part]))
        except Exception as error:  # a user's class may raise anything
            warn_without(target, name, error, "these running statistics start anew")


def _like(present: Any, value: Any) -> Any:
    """Returns `value` as a tensor if the present value is a tensor. Otherwise returns `value`, or a
    copy if `value` is an array."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value).to(present)
    return np.array(value) if isinstance(value, np.ndarray) else value


def _shown(kinds: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name!s:.40} {list(shape)}" for name, shape in kinds) or "none"


def copy_statistics(old: Any, new: Any) -> None:
    """Copies running statistics from the wrappers of one environment to the same wrappers of
    another environment. Statistics with non-finite values are not copied. Statistics that are
    frozen in the old environment are also frozen in the new environment."""
    for target, source in zip(_wrappers(new), _wrappers(old), strict=False):
        if type(target) is not type(source):
            continue
        for name, statistics, numbers in _statistics_of(source):
            _set_frozen(target, _flag_of(source) is False)
            if np.isfinite(numbers["mean"]).all() and np.isfinite(numbers["var"]).all():
                setattr(target, name, statistics)


def _statistics(env: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the name, the statistics and their numbers for each wrapper of an environment or of a
    vector. For a vector, the wrappers of its sub-environments are not included."""
    for wrapper in _wrappers(env):
        yield from _statistics_of(wrapper)


def _statistics_of(wrapper: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the names, the statistics and a copy of their numbers for one wrapper. If an attribute
    has one of the names but does not hold statistics, this function logs a warning and skips the
    attribute."""
    for name in _STATISTICS:
        if name not in vars(wrapper):
            continue
        statistics = vars(wrapper)[name]
        try:
            numbers = _numbers(name, statistics)
        except Exception as error:  # a user's class may raise anything
            warn_without(wrapper, name, error, "it is neither saved nor restored")
        else:
            yield name, statistics, numbers


def _sub_envs(env: VectorEnv[Any, Any, Any]) -> list[Any]:
    vector = env.unwrapped
    return list(vector.envs) if isinstance(vector, SyncVectorEnv) else []


def _time_limits(env: Any) -> list[Any]:
    """Returns the wrappers that count steps. Their counts are part of the environment's state."""
    return [wrapper for wrapper in _wrappers(env) if isinstance(wrapper, TimeLimit)]


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
