"""Converts between `exploration_config`, a dict of RLlib's old API stack, and the option
`epsilon`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, nearest, shown

#: RLlib's classes for epsilon-greedy exploration, and the value of `per_worker_epsilon` for each.
_PER_WORKER = {"EpsilonGreedy": False, "PerWorkerEpsilonGreedy": True}
#: The options of RLlib's classes for epsilon-greedy exploration, and their defaults in RLlib.
_NUMBERS = {
    "initial_epsilon": 1.0,
    "final_epsilon": 0.05,
    "epsilon_timesteps": 100_000,
    "warmup_timesteps": 0,
}


def of_exploration(config: Any, where: str) -> dict[str, Any]:
    """Converts an `exploration_config` for DQN or Ape-X to options of polopt.

    Args:
        config: RLlib's dict. For None and an empty dict, the result is empty.
        where: name of the method that the user called, for messages.

    Raises:
        ConfigError: `config` is not a dict, names a kind of exploration that is not epsilon-greedy,
            or has a key that epsilon-greedy exploration does not have.
    """
    if config is None or config == {}:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: exploration_config={shown(config)}. Allowed: a dict")
    names = ["type", *_NUMBERS]
    for key in config:
        if key not in names:
            raise ConfigError(
                f"{where}: exploration_config: unknown key {key!r}{nearest(str(key), names)}. "
                f"Allowed: {', '.join(names)}. For other schedules, use the option "
                "epsilon=[[steps, value], ...]"
            )
    if (options_of_grid := _searched(config, where)) is not None:
        return options_of_grid
    kind = config.get("type", "EpsilonGreedy")
    name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    if name not in _PER_WORKER:
        raise ConfigError(
            f"{where}: exploration_config: key 'type': got {shown(kind)}. Allowed: "
            f"{', '.join(_PER_WORKER)}{nearest(name, _PER_WORKER)}"
        )
    options: dict[str, Any] = {"per_worker_epsilon": _PER_WORKER[name]} if "type" in config else {}
    if any(key in config for key in _NUMBERS):
        first, last, steps, warmup = (config.get(key, value) for key, value in _NUMBERS.items())
        options["epsilon"] = [[0, first], [warmup, first]][: 2 if warmup else 1]
        options["epsilon"] += [[warmup + steps, last]]
    return options


def _searched(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Translates a config in which Tune searches one value. None means that it searches none.

    Raises:
        ConfigError: Tune samples the value, or searches several.
    """
    searched = [
        key
        for key, value in config.items()
        if isinstance(value, Mapping) or hasattr(value, "sample")
    ]
    if not searched:
        return None
    (key, *others), grid = searched, config[searched[0]]
    if others or not isinstance(grid, Mapping) or list(grid) != ["grid_search"]:
        raise ConfigError(
            f"{where}: exploration_config: Tune searches {', '.join(map(repr, searched))}. "
            "Allowed: tune.grid_search of one value, or a search over the option epsilon"
        )
    made = [of_exploration({**config, key: value}, where) for value in grid["grid_search"]]
    names = {name: None for options in made for name in options}
    return {
        name: {"grid_search": [options[name] for options in made]}
        if name == "epsilon"
        else made[0][name]
        for name in names
    }


def as_exploration(epsilon: Any, per_worker: bool) -> dict[str, Any]:
    """Returns RLlib's dict for a value of `epsilon`. For a schedule, the dict has the first and the
    last value."""
    points = epsilon if isinstance(epsilon, list | tuple) else [(0, epsilon)]
    return {
        "type": "PerWorkerEpsilonGreedy" if per_worker else "EpsilonGreedy",
        "initial_epsilon": points[0][1],
        "final_epsilon": points[-1][1],
        "epsilon_timesteps": points[-1][0],
    }
