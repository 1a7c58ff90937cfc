"""Attaches names of RLlib, Stable-Baselines3 and CleanRL: polopt accepts some of them, and errors
about others say what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from polopt.common.add_ons import AddOn, RunListener


class OtherLibraries(AddOn):
    """Knows names of other libraries. The first question of polopt loads the tables of
    `other_libraries.py`."""

    def follow(self, trainer: Any) -> RunListener | None:
        listener: RunListener | None = None
        if hasattr(trainer.experiment.trainer.callbacks, "defined_methods"):
            from polopt.rllib.user_callbacks import follow_run  # they were written for RLlib

            listener = follow_run(trainer)
        algorithm = sys.modules.get("polopt.rllib.algorithm")
        if algorithm is None or not isinstance(trainer, algorithm.Algorithm):
            return listener
        from polopt.rllib.old_results import OldResults

        return OldResults(trainer, listener)

    def hint(self, kind: str, name: str) -> str:
        from polopt.rllib import other_libraries

        if kind == "preset":
            return other_libraries.instead_of_algorithm(name)
        if kind == "result key":
            return other_libraries.RESULT_KEYS.get(name, "")
        if kind == "tune name":
            if name not in other_libraries.ALSO_OF_RLLIB or "ray.rllib" not in sys.modules:
                return ""
            return (
                f"RLlib is imported. It registers {name!r} with Tune as soon as Tune looks up a "
                "name that is not registered"
            )
        if kind == "trainable":
            module, _, algorithm = name.rpartition(".")
            instead = other_libraries.instead_of_algorithm(algorithm)
            if not instead or not module.startswith("ray.rllib."):
                return ""
            return f"Tune trains {algorithm} of RLlib, and not of polopt. {instead}"
        return other_libraries.instead_of(name)

    def other_names(self, owner: type[Any]) -> Mapping[str, str]:
        from polopt.rllib.other_libraries import OTHER_NAMES

        keys = set(owner.keys())
        return {name: key for name, key in OTHER_NAMES.items() if key in keys and name not in keys}

    def fixed_options(self, where: str) -> Mapping[str, tuple[Any, ...]]:
        from polopt.rllib.other_libraries import FIXED, MODEL_FIXED

        return MODEL_FIXED if where == "model" else FIXED


ADD_ON = OtherLibraries()
