"""Lag of what a replacement sends first, with real processes that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes import connect_workers, make_optimizer, pid_of, worker_config

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.base import PolicyOptimizer
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
STRATEGIES: dict[str, tuple[type[PolicyOptimizer], dict[str, Any], str]] = {
    "async_gradients": (AsyncGradients, {"grads_per_step": 5}, "gradient_lag"),
    "async_samples": (AsyncSamples, {"max_requests_in_flight_per_worker": 1}, "policy_lag"),
}


@pytest.mark.parametrize("transport", ["ray", "zmq"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_first_result_of_a_replacement_is_no_older_than_others(
    worker_pool: Pool, name: str, transport: str
) -> None:
    cls, options, lag_of = STRATEGIES[name]
    rollout = {"num_workers": 3, "transport": transport}
    optimizer = make_optimizer(cls, worker_pool(worker_config(rollout=rollout)), **options)
    workers = optimizer.workers
    connect_workers(workers)
    for _ in range(30):
        optimizer.step()
    usual = optimizer.stats()[lag_of]["max"]
    victim = workers.remote[1]
    os.kill(pid_of(victim), signal.SIGKILL)
    version, until_s = optimizer.policy.version, time.monotonic() + 120.0
    while workers.faults.num_restarts == 0 or not workers.remote[1].up:
        optimizer.step()
        assert time.monotonic() < until_s
    missed = optimizer.policy.version - version
    assert missed > 10 * (usual + 5), "updates while the process was starting"
    for _ in range(50):
        optimizer.step()
    since_the_kill = optimizer.stats()[lag_of]
    # Work bound to the weights of the kill would be `missed` updates old. On a busy machine, a
    # worker that waits for a core is several times as late as usual.
    assert since_the_kill["max"] < missed / 3
    assert workers.faults.counts["death"] == 1
