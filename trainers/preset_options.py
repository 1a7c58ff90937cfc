"""What each preset changes in the defaults of the config classes.

Apart from the classes in `presets.py`, which are Tune trainables: the command line checks and runs
an experiment without importing Tune.
"""

from __future__ import annotations

from typing import Any

PRESET_OPTIONS: dict[str, dict[str, Any]] = {
    "A3C": {"optimizer": "async_gradients", "policy": "a3c"},
    "A2C": {"optimizer": "sync_samples", "policy": "a2c"},
    "SyncPPO": {"optimizer": "sync_samples", "policy": "ppo", "rollout_fragment_length": 128},
    "DDPPO": {
        "optimizer": "decentralized_allreduce",
        "policy": "ppo",
        "rollout_fragment_length": 128,
    },
    "PolicyOptimizerTrainer": {},
}
