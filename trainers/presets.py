"""Presets: an optimizer and a policy under the name the field knows them by."""

from __future__ import annotations

from typing import Any, ClassVar

from polopt.trainers.preset_options import PRESET_OPTIONS
from polopt.trainers.trainer import PolicyOptimizerTrainer


class A3C(PolicyOptimizerTrainer):
    """Asynchronous advantage actor-critic (Mnih et al., 2016)."""

    preset: ClassVar[dict[str, Any]] = PRESET_OPTIONS["A3C"]


class A2C(PolicyOptimizerTrainer):
    """Advantage actor-critic: A3C's loss on synchronous samples."""

    preset: ClassVar[dict[str, Any]] = PRESET_OPTIONS["A2C"]


class SyncPPO(PolicyOptimizerTrainer):
    """Proximal policy optimization (Schulman et al., 2017) on synchronous samples."""

    preset: ClassVar[dict[str, Any]] = PRESET_OPTIONS["SyncPPO"]


class DDPPO(PolicyOptimizerTrainer):
    """Decentralized distributed PPO (Wijmans et al., 2020)."""

    preset: ClassVar[dict[str, Any]] = PRESET_OPTIONS["DDPPO"]


PRESETS: dict[str, type[PolicyOptimizerTrainer]] = {
    cls.__name__: cls for cls in (A3C, A2C, SyncPPO, DDPPO, PolicyOptimizerTrainer)
}


def register() -> None:
    """Registers every preset with Tune under its class name, so that `tune.run("A3C", ...)` and
    `Tuner("A3C", ...)` find it."""
    from ray.tune.registry import register_trainable

    for name, cls in PRESETS.items():
        register_trainable(name, cls)
