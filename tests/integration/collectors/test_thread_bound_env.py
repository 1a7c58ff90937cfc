"""Environments that work only in the main thread, in Collectors and gradient workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import make_optimizer, worker_config
from thread_bound_env import STRICT, ThreadBound, check

import polopt
from polopt.collectors.gradient_worker import GradientWorkerSet
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.rollouts.workers.worker_set import WorkerSet

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def made() -> Iterator[list[WorkerSet]]:
    sets: list[WorkerSet] = []
    yield sets
    for workers in sets:
        workers.stop()


@pytest.mark.parametrize("below", [0, 1])
def test_in_a_gradient_worker_and_below_one(made: list[WorkerSet], below: int) -> None:
    rollout = {
        "num_workers": 1,
        "num_workers_below": below,
        "num_cpus_per_worker": 0.1,
        **STRICT,
    }
    workers = GradientWorkerSet(worker_config(env=ThreadBound, rollout=rollout))
    made.append(workers)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=3)
    result = optimizer.step()
    assert result.updates == 3
    assert result.env_steps_sampled == 3 * 10
    check(workers)


def test_in_the_worker_of_a_collector() -> None:
    cheap = {"num_cpus": 0.1}
    with polopt.Collector(
        ThreadBound,
        num_collectors=1,
        num_envs=2,
        frames_per_batch=20,
        total_frames=60,
        remote_configs=cheap,
        max_consecutive_env_faults=1,
        max_consecutive_failures=1,
    ) as collector:
        assert sum(batch.env_steps for batch in collector) >= 60
