"""Optimizers by name."""

from __future__ import annotations

from polopt.common.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    "polopt.optimizers",
    "polopt.optimizers.base:PolicyOptimizer",
    {
        "async_gradients": "polopt.optimizers.async_gradients:AsyncGradients",
        "sync_samples": "polopt.optimizers.sync_samples:SyncSamples",
        "decentralized_allreduce": (
            "polopt.optimizers.decentralized_allreduce:DecentralizedAllReduce"
        ),
    },
)


def register_optimizer(name: str, cls: type) -> None:
    """Makes an optimizer class selectable as `config["optimizer"] = name`."""
    OPTIMIZERS.register(name, cls)
