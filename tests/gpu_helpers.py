"""Options and checks of runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rank_helpers import run_on

from polopt.rollouts.workers.worker_handle import WorkerHandle

#: Options of each preset for short iterations.
SMALL: dict[str, Any] = {
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"fcnet_hiddens": [16]},
    "seed": 3,
}


def devices_of(workers: Iterable[WorkerHandle]) -> list[str]:
    return run_on(workers, lambda worker: worker.policy.flat.params.device.type)
