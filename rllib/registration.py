"""`register`: gives RLlib's names of algorithms in Tune to polopt."""

from __future__ import annotations

from typing import Any

from polopt.common.config import ConfigError, nearest
from polopt.rllib.algorithm import Algorithm, algorithm_of
from polopt.rllib.other_libraries import instead_of_algorithm
from polopt.rllib.rllib_defaults import TUNE_NAMES
from polopt.trainers.presets import register_names


def register() -> None:
    """Registers polopt's algorithms with Tune under RLlib's names, such as `PPO`, `A3C` and `APEX`.
    A script that names an algorithm by a string, as in `tune.run("PPO")`, calls this function once.

        import polopt.rllib

        polopt.rllib.register()
    """
    register_names({name: algorithm_of(cls) for name, cls in TUNE_NAMES.items()}, override=True)


def algorithm_class(name: str, *arguments: Any, **others: Any) -> type[Algorithm]:
    """Returns the class of an algorithm by its name in RLlib.

    Raises:
        ConfigError: polopt does not have the algorithm.
    """
    if name in TUNE_NAMES:
        return algorithm_of(TUNE_NAMES[name])
    reason = instead_of_algorithm(name) or f"polopt has no {name}{nearest(name, TUNE_NAMES)}"
    raise ConfigError(f"algorithm {name!r}: {reason}. Allowed: {', '.join(sorted(TUNE_NAMES))}")
