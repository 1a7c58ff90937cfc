"""Optimizers by name."""

from __future__ import annotations

from polopt.common.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    "polopt.optimizers",
    "polopt.optimizers.base:PolicyOptimizer",
    {
        "async_gradients": "polopt.optimizers.async_gradients:AsyncGradients",
        "async_samples": "polopt.optimizers.async_samples:AsyncSamples",
        "sync_gradients": "polopt.optimizers.sync_gradients:SyncGradients",
        "sync_samples": "polopt.optimizers.sync_samples:SyncSamples",
        "decentralized_allreduce": (
            "polopt.optimizers.decentralized_allreduce:DecentralizedAllReduce"
        ),
    },
)


def register_optimizer(name: str, cls: type, override: bool = False) -> None:
    """Makes an optimizer class selectable as `config["optimizer"] = name`.

    Args:
        name: of the optimizer.
        cls: a subclass of `polopt.PolicyOptimizer`.
        override: replace the class that has this name.

    Raises:
        ConfigError: if `cls` is no such class, or if another class has the name and `override` is
            False.
    """
    OPTIMIZERS.register(name, cls, override)
