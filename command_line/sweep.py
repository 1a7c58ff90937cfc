"""Sweeps: grids, distributions and seeds in files and arguments of `polopt train`.

    preset: {grid_search: [A3C, SyncPPO, DDPPO]}
    config:
      env: CartPole-v1
      num_envs_per_worker: {grid_search: [4, 8]}  # trains with each value, as in `rllib train`
      lr: tune.loguniform(1e-4, 1e-2)             # draws values with a function of ray.tune
    num_samples: 3
    seeds: 5

Python files use the objects of `ray.tune` itself.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from ray import tune

from polopt.common.config import ConfigError, nearest_of, shown
from polopt.common.ray_names import distributions, points

_KINDS = distributions()

#: Functions of `ray.tune` that a string in a config may call. The arguments of these functions are
#: numbers, strings and lists.
_FUNCTIONS = (
    "choice",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "uniform",
)
_CALL = re.compile(r"\s*tune\.(\w+)\(.*\)\s*", re.DOTALL)
#: The largest number of grid points that are checked before a process starts.
_MOST_CHECKED = 1000


def is_grid(value: Any) -> bool:
    """Returns whether a value is a grid, which is a dict `{"grid_search": [...]}`.
    `tune.grid_search([...])` returns such a dict."""
    return isinstance(value, Mapping) and set(value) == {"grid_search"}


def is_search(value: Any) -> bool:
    """Returns whether a value is, or contains, a grid or a distribution."""
    if isinstance(value, _KINDS.any) or is_grid(value):
        return True
    if isinstance(value, Mapping):
        return any(map(is_search, value.values()))
    return isinstance(value, list | tuple) and any(map(is_search, value))


def with_searches(value: Any, key: str = "") -> Any:
    """Replaces strings such as `tune.loguniform(1e-4, 1e-2)` in a config by objects of `ray.tune`.

    Args:
        value: a config, or a value in a config.
        key: key of the value, for error messages. It is empty for a whole config.

    Raises:
        ConfigError: such a string or a grid is not valid, or Tune would execute a value as code.
    """
    if is_grid(value):
        values = value["grid_search"]
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(
                f"key {key!r}: got grid_search {shown(values)}. Allowed: a list of values"
            )
        return tune.grid_search([with_searches(one, key) for one in values])
    if isinstance(value, Mapping):
        if set(value) == {"eval"}:  # Tune would execute the string in this dict
            raise ConfigError(
                f"key {key!r}: got {shown(value)}. polopt does not execute code in a config. "
                "Allowed: a grid_search, a distribution such as tune.uniform(0, 1), or "
                "tune.sample_from in a Python file"
            )
        prefix = f"{key}." if key else ""
        return {name: with_searches(one, f"{prefix}{name}") for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_searches(one, key) for one in value)
    if isinstance(value, str) and (call := _CALL.fullmatch(value)):
        return _called(call[1], value, key)
    return value


def _called(name: str, text: str, key: str) -> Any:
    """Returns the object of `ray.tune` for a string such as `tune.uniform(0, 1)`. The arguments in
    the string must be literals. Other code in the string is not executed."""
    where = f"key {key!r}: got {text!r}"
    if name not in _FUNCTIONS:
        raise ConfigError(f"{where}{nearest_of(name, _FUNCTIONS)}")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            raise ValueError(f"it is more than one call of tune.{name}")
        arguments = [ast.literal_eval(one) for one in call.args]
        keywords = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        found = getattr(tune, name)(*arguments, **keywords)
        if isinstance(found, _KINDS.any):
            found.sample()
    except (ValueError, TypeError, SyntaxError, IndexError, OverflowError) as error:
        example = "[0.001, 0.01]" if name in ("choice", "grid_search") else "1, 10"
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{where}: {problem}. Allowed: literals as arguments, such as tune.{name}({example})"
        ) from None
    return with_searches(found, key)


def with_seeds(config: Mapping[str, Any], seeds: int | None) -> dict[str, Any]:
    """Returns a config whose trials are trained with `seeds` consecutive seeds. The first seed is
    the option `seed`, or 0 without this option. If `seeds` is None, returns a copy of `config`.

    Raises:
        ConfigError: `seed` is a grid or a distribution.
    """
    if seeds is None:
        return dict(config)
    first = config.get("seed")
    if is_search(first):
        raise ConfigError(
            f"key 'seed': got {shown(first)} with seeds={seeds}. Give only one of them"
        )
    if first is not None and not isinstance(first, int):
        return dict(config)  # `Experiment.parse` raises the error
    first = first or 0
    return {**config, "seed": tune.grid_search(list(range(first, first + seeds)))}


def configs_to_check(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields configs of trials that a sweep may start, so that they can be checked.

    First, this function yields the configs of at most `_MOST_CHECKED` points of the grids. In these
    configs, each distribution has its first choice or its smallest value. Then this function yields
    configs with each further choice of a `tune.choice`, and with the largest value of each other
    distribution. Unbounded distributions, `tune.sample_from` and distributions inside grids have
    random values instead.

    Yields:
        a string with the values from grids and from `tune.sample_from`, and the config. The string
        is empty if the config has neither.
    """
    if not is_search(config):
        yield "", dict(config)
        return
    probes = _probes(config)
    yield from itertools.islice(_points(_chosen(config, {}, probes)), _MOST_CHECKED)
    for path, values in probes.items():
        for value in values[1:]:
            yield from itertools.islice(_points(_chosen(config, {path: value}, probes)), 1)


def _points(space: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for searched, spec in points({"config": space}):
        values = (f"{'.'.join(map(str, path[1:]))}={shown(v)}" for path, v in searched.items())
        yield ", ".join(values), spec["config"]


def _probes(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], list[Any]]:
    """Returns, for the path of each distribution, the values of this distribution to check. Leaves
    out distributions inside grids."""
    if isinstance(value, _KINDS.any):
        values = _extremes(value)
        return {path: values} if values else {}
    if is_grid(value):
        return {}
    inner: Any = value.items() if isinstance(value, Mapping) else ()
    if type(value) in (list, tuple):
        inner = enumerate(value)
    found: dict[tuple[Any, ...], list[Any]] = {}
    for key, one in inner:
        found |= _probes(one, (*path, key))
    return found


def _extremes(domain: Any) -> list[Any]:
    sampler = domain.get_sampler()
    if isinstance(domain, _KINDS.categorical):
        return list(domain.categories)
    if isinstance(domain, _KINDS.integer):
        reached = isinstance(sampler, _KINDS.quantized)
        return [domain.lower, domain.upper if reached else domain.upper - 1]
    if isinstance(domain, _KINDS.floating):
        if not np.isfinite([domain.lower, domain.upper]).all():
            return [domain.sample()]
        reached = isinstance(sampler, _KINDS.quantized)
        below = float(np.nextafter(domain.upper, -np.inf))
        return [domain.lower, domain.upper if reached else below]
    return []  # `tune.sample_from`


def _chosen(
    value: Any,
    chosen: Mapping[tuple[Any, ...], Any],
    probes: Mapping[tuple[Any, ...], list[Any]],
    path: tuple[Any, ...] = (),
) -> Any:
    """Returns options in which each distribution is replaced by a value. This is the value in
    `chosen`, or the first value in `probes`."""
    if path in probes:
        return chosen.get(path, probes[path][0])
    if is_grid(value):
        return value
    if isinstance(value, Mapping):
        return {key: _chosen(one, chosen, probes, (*path, key)) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _chosen(one, chosen, probes, (*path, index)) for index, one in enumerate(value)
        )
    return value
