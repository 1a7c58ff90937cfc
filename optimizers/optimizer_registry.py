"""`OPTIMIZERS`: the registry of optimizers by name."""

from __future__ import annotations

from polopt.common.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    "polopt.optimizers",
    "polopt.optimizers.policy_optimizer:PolicyOptimizer",
    {
        "async_gradients": "polopt.optimizers.async_gradients:AsyncGradients",
        "async_replay": "polopt.optimizers.async_replay:AsyncReplay",
        "async_samples": "polopt.optimizers.async_samples:AsyncSamples",
        "sync_gradients": "polopt.optimizers.sync_gradients:SyncGradients",
        "sync_replay": "polopt.optimizers.sync_replay:SyncReplay",
        "sync_samples": "polopt.optimizers.sync_samples:SyncSamples",
        "decentralized_allreduce": (
            "polopt.optimizers.decentralized_allreduce:DecentralizedAllReduce"
        ),
    },
)

#: Makes a class selectable as `config["optimizer"] = name`. See `Registry.register`.
register_optimizer = OPTIMIZERS.register
