"""Errors in an environment's code end a run at once, without restarts of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from toy_envs import Clock

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.envs.env_errors import EnvironmentAPIError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]


@pytest.mark.parametrize("last", [5, -1])
@pytest.mark.parametrize("cls", [AsyncGradients, SyncSamples, DecentralizedAllReduce])
def test_integer_outside_its_space_ends_the_run(worker_pool: Pool, cls: Any, last: int) -> None:
    class Corridor(Clock):
        """A `Clock` environment with observations in `Discrete(5)`, except the last: `last`."""

        def __init__(self) -> None:
            super().__init__(4)

        def step(self, action: int) -> Any:
            time, *rest = super().step(action)
            return (last if rest[1] or rest[2] else time), *rest

    config = worker_config("ppo", lambda: Clock(4), rollout={"num_workers": 1})
    workers = worker_pool(dataclasses.replace(config, env=lambda: Corridor()))
    message = rf"number \d of worker 1.* must return an observation of Discrete\(5\); got {last}"
    with pytest.raises(EnvironmentAPIError, match=message) as caught:
        make_optimizer(cls, workers).step()
    assert "ray::" not in str(caught.value)
    assert workers.stats()["num_remote_worker_restarts"] == 0
