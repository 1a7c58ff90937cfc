"""Saves and restores the state of environments that support it.

Gymnasium has no interface for this, and unpickling environments from a checkpoint is not safe. An
environment supports it with two methods, on the vector environment or on each sub-environment of a
`SyncVectorEnv`: `get_checkpoint_state()` returns arrays, numbers, strings, and lists and dicts of
those, the state of its random generator included. `set_checkpoint_state(state)` restores it.
Tuples come back as lists. (Up to 0.3 the methods were `get_state` and `set_state`, names that
environments use for other things. Checkpoints of 0.3 can still be read.)

Running statistics of wrappers (`NormalizeObservation`, `NormalizeReward`, and others that keep a
mean, a variance and a count as `obs_rms` or `return_rms`) are saved separately, and also restored
where the environments start new episodes.

All of this is optional: where an environment raises, or returns something else, the run goes on
without it, and one warning names the class of the environment and the method.

Two private names of Gymnasium have no public equivalent and are used in this file alone: the step
count of `TimeLimit`, and the flags of a vector's next-step resets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import TimeLimit

from polopt.rollouts.envs.env_errors import innermost, warn_without

#: Running statistics of Gymnasium's wrappers, of the single and of the vector kind.
_STATISTICS = ("obs_rms", "return_rms")
#: The flag of Gymnasium's wrappers that says whether their statistics change.
_FLAG = "update_running_mean"
_GET, _SET = "get_checkpoint_state", "set_checkpoint_state"
_NEW_EPISODES = "environments begin new episodes where a run is restored"


def get_env_state(env: VectorEnv[Any, Any, Any]) -> dict[str, Any] | None:
    """A copy of the state of all environments. None if one of them does not support it, raises, or
    returns what a checkpoint cannot hold."""
    vector: Any = env.unwrapped
    of_vector = _method(vector, _GET) is not None
    owners = [vector] if of_vector else _sub_envs(env)
    states = []
    for owner in owners:
        get = _method(owner, _GET)
        if get is None or _method(owner, _SET) is None:
            if get is not None:
                warn_without(innermost(owner), _SET, "there is no such method", _NEW_EPISODES)
            return None
        try:
            states.append(_plain(get(), ""))
        except Exception as error:  # a user's method may raise anything
            warn_without(innermost(owner), f"{_GET}()", error, _NEW_EPISODES)
            return None
    if of_vector:
        return {"vector": states[0]}
    if not owners:
        return None
    return {
        "envs": states,
        "elapsed": [[limit._elapsed_steps for limit in _time_limits(sub)] for sub in owners],
        "autoreset": vector._autoreset_envs.copy(),
    }


def set_env_state(env: VectorEnv[Any, Any, Any], state: dict[str, Any]) -> bool:
    """Restores what `get_env_state` returned for environments of the same kind and number.

    Returns:
        False if the environments cannot restore it: some of them may have, so all of them have to
        begin new episodes.
    """
    vector: Any = env.unwrapped
    if "vector" in state:
        return _restore(vector, state["vector"])
    for sub, sub_state, elapsed in zip(vector.envs, state["envs"], state["elapsed"], strict=True):
        if not _restore(sub, sub_state):
            return False
        for limit, steps in zip(_time_limits(sub), elapsed, strict=True):
            limit._elapsed_steps = steps
    vector._autoreset_envs = np.asarray(state["autoreset"], dtype=bool)
    return True


def _restore(env: Any, state: Any) -> bool:
    restore = _method(env, _SET)
    try:
        if restore is None:
            raise AttributeError("there is no such method; up to 0.3 its name was set_state")
        restore(state)
    except Exception as error:  # a user's method may raise anything
        warn_without(innermost(env), f"{_SET}()", error, "its environments begin new episodes")
        return False
    return True


def _method(env: Any, name: str) -> Any:
    """An attribute of an environment or of one of its wrappers. None if it is not found."""
    try:
        return env.get_wrapper_attr(name) if isinstance(env, gymnasium.Env) else getattr(env, name)
    except AttributeError:
        return None
    except Exception as error:  # a property may raise anything
        warn_without(innermost(env), name, error, _NEW_EPISODES)
        return None


def _plain(value: Any, path: str) -> Any:
    """A copy of what a checkpoint can hold. Tuples become lists.

    Raises:
        TypeError: it cannot hold the value. The message says where that is in the state.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, f"{path}/{i}") for i, one in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, f"{path}/{key}") for key, one in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        copied = np.array(value)
        torch.from_numpy(copied)  # raises for what tensors do not have, such as float128
        return copied
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return value.detach().cpu().clone()
    kind = type(value).__name__
    if isinstance(value, dict):
        kind = "dict with keys that are not strings"
    elif isinstance(value, np.ndarray):
        kind = f"array of {value.dtype}"
    raise TypeError(f"returned a {kind}{f' at {path!r}' * bool(path)}, which is not plain data")


def get_env_statistics(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """Running statistics of all wrappers, the outermost first: `vector` for the wrappers of the
    vector, and `envs` for the wrappers of each environment. Each has name, mean, variance and
    count. Empty without such wrappers. An `AsyncVectorEnv` has its environments in other processes.
    Their statistics are not included.
    """
    vector = [numbers for _, _, numbers in _statistics(env)]
    envs = [[numbers for _, _, numbers in _statistics(sub)] for sub in _sub_envs(env)]
    return {"vector": vector, "envs": envs} if vector or any(envs) else {}


def set_env_statistics(env: VectorEnv[Any, Any, Any], saved: dict[str, Any]) -> None:
    """Restores what `get_env_statistics` returned for environments with the same wrappers. Where
    their number differs, each gets the statistics of all saved ones together.

    Raises:
        ValueError: the wrappers differ.
    """
    _set(env, list(_statistics(env)), saved["vector"])
    envs, chains = list(_sub_envs(env)), saved["envs"]
    if len(envs) != len(chains) and chains:
        chains = [_merged(chains)] * len(envs)
    for sub, chain in zip(envs, chains, strict=False):
        _set(sub, list(_statistics(sub)), chain)


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
        env: a vector of environments, as in the workers. Or one environment with their wrappers,
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
        named = [target for target in targets if target[0] == name]
        if named or name == "obs_rms":
            _set(env, named, [one for one in saved if one["name"] == name])
    _freeze(env)


def _freeze(env: Any) -> None:
    for wrapper in _wrappers(env):
        if any(True for _ in _statistics_of(wrapper)):
            _set_frozen(wrapper, True)


def _set_frozen(wrapper: Any, frozen: bool) -> None:
    """Stops or starts the updates of a wrapper's statistics, as Gymnasium's wrappers allow."""
    if isinstance(_flag_of(wrapper), bool):
        setattr(wrapper, _FLAG, not frozen)
    elif frozen:
        without = "its running statistics change in evaluation, too"
        warn_without(wrapper, _FLAG, "it is no flag, as in Gymnasium's wrappers", without)


def _flag_of(wrapper: Any) -> Any:
    try:
        return getattr(wrapper, _FLAG, None)
    except Exception:  # a user's class may raise anything
        return None


def _merged(chains: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Statistics of the same wrappers of several environments together."""
    # An environment may make its statistics later than another one.
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
    """A copy of running statistics.

    Raises:
        Exception: they are something else.
    """
    mean, var = _array(statistics.mean), _array(statistics.var)
    count = float(statistics.count)
    if mean.dtype.kind not in "biuf" or var.dtype.kind not in "biuf" or mean.shape != var.shape:
        raise TypeError("its mean and variance are not arrays of numbers of the same shape")
    if not (math.isfinite(count) and count >= 0.0):
        raise ValueError(f"its count is {count}")
    return {"name": name, "mean": mean, "var": var, "count": count}


def _array(value: Any) -> np.ndarray:
    """A copy."""
    return np.array(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)


def _set(
    env: Any, targets: list[tuple[str, Any, dict[str, Any]]], saved: list[dict[str, Any]]
) -> None:
    kept = _kinds([numbers for _, _, numbers in targets])
    got = _kinds(saved)
    if kept != got:
        named = sum(name in vars(one) for one in _wrappers(env) for name in _STATISTICS)
        if named > len(list(_statistics(env))):
            return  # of some that cannot be used, as a warning has said
        raise ValueError(
            f"environments keep {len(kept)} running statistics ({_shown(kept)}); "
            f"got {len(got)} ({_shown(got)})"
        )
    for (name, target, _), source in zip(targets, saved, strict=True):
        try:
            for part in ("mean", "var", "count"):
                setattr(target, part, _like(getattr(target, part), source[part]))
        except Exception as error:  # a user's class may raise anything
            warn_without(target, name, error, "they start anew")


def _like(present: Any, value: Any) -> Any:
    """`value` as a tensor where the present value is one."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(value).to(present)
    return np.array(value) if isinstance(value, np.ndarray) else value


def _shown(kinds: list[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name!s:.40} {list(shape)}" for name, shape in kinds) or "none"


def copy_statistics(old: Any, new: Any) -> None:
    """Copies finite running statistics from the wrappers of one environment to another with the
    same wrappers, and whether they are frozen."""
    for target, source in zip(_wrappers(new), _wrappers(old), strict=False):
        if type(target) is not type(source):
            continue
        for name, statistics, numbers in _statistics_of(source):
            _set_frozen(target, _flag_of(source) is False)
            if np.isfinite(numbers["mean"]).all() and np.isfinite(numbers["var"]).all():
                setattr(target, name, statistics)


def _statistics(env: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Names and statistics of the wrappers of one environment, or of a vector without its
    environments."""
    for wrapper in _wrappers(env):
        yield from _statistics_of(wrapper)


def _statistics_of(wrapper: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Names, statistics and a copy of their numbers, for one wrapper. Leaves out attributes that
    have their name and are something else, with a warning."""
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
    """The wrappers that count steps. The counts belong to the environment's state."""
    return [wrapper for wrapper in _wrappers(env) if isinstance(wrapper, TimeLimit)]


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
