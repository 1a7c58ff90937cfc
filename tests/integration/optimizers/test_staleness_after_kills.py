"""Tests the lag of the first result of a replacement after the process of a worker was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fakes import make_optimizer, pid_of, worker_config

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
STRATEGIES: dict[str, tuple[type[PolicyOptimizer], dict[str, Any]]] = {
    "async_gradients": (AsyncGradients, {"grads_per_step": 5}),
    "async_samples": (AsyncSamples, {"max_requests_in_flight_per_worker": 1}),
}


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *zip(STRATEGIES, ("socket", "ray"), strict=True),
        *(
            pytest.param(name, transport, marks=pytest.mark.slow)
            for name, transport in zip(STRATEGIES, ("ray", "socket"), strict=True)
        ),
    ],
)
def test_first_result_of_a_replacement_is_of_weights_since_its_start(
    worker_pool: Pool, monkeypatch: pytest.MonkeyPatch, name: str, transport: str
) -> None:
    cls, options = STRATEGIES[name]
    rollout = {"num_workers": 3, "transport": transport}
    optimizer = make_optimizer(cls, worker_pool(worker_config(rollout=rollout)), **options)
    workers = optimizer.workers
    workers.up()
    for _ in range(30):
        optimizer.step()
    victim = workers.remote[1]
    versions: list[int] = []  # the versions of the weights in the replacement's results
    count = optimizer.calls.count

    def spy(replies: Sequence[Reply]) -> None:
        versions.extend(
            reply.value.version for reply in replies if reply.worker.index == victim.index
        )
        count(replies)

    monkeypatch.setattr(optimizer.calls, "count", spy)
    os.kill(pid_of(victim), signal.SIGKILL)
    at_kill, until_s = optimizer.policy.version, time.monotonic() + 120.0
    while workers.faults.num_restarts == 0 or not workers.remote[1].up:
        versions.clear()
        up_after = optimizer.policy.version
        optimizer.step()
        assert time.monotonic() < until_s
    assert up_after > at_kill + 100, "many updates while the process starts"
    while not versions:
        optimizer.step()
        assert time.monotonic() < until_s
    assert versions[0] >= up_after
    assert workers.faults.counts["death"] == 1
