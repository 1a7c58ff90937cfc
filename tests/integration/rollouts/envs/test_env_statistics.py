"""Running statistics of wrappers survive restores of a run and replacements of workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import make_optimizer, pid_of, worker_config
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from toy_envs import Drift

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet, call_method

Pool = Callable[[WorkerConfig], WorkerSet]
OPTIMIZERS: dict[str, type[PolicyOptimizer]] = {
    cls.name: cls
    for cls in (AsyncGradients, SyncGradients, SyncSamples, AsyncSamples, DecentralizedAllReduce)
}


def normalized(config: Any) -> Any:
    return NormalizeReward(NormalizeObservation(Drift(config)))


def make(pool: Pool, name: str, env: Any = normalized, **rollout: Any) -> PolicyOptimizer:
    made: PolicyOptimizer = make_optimizer(
        OPTIMIZERS[name], pool(worker_config("a2c", env, rollout=rollout))
    )
    return made


def statistics_of(optimizer: PolicyOptimizer) -> dict[int, list[tuple[float, np.ndarray]]]:
    """Returns the count and mean of the observations, for each environment of each worker."""
    got = foreach_worker(optimizer.workers, call_method, "get_statistics")
    return {i: [(e[1]["count"], e[1]["mean"]) for e in one["envs"]] for i, one in got.items()}


def trained(pool: Pool, name: str) -> tuple[dict[str, Any], dict[int, Any]]:
    """Returns the state of a run, and the statistics of its environments."""
    optimizer = make(pool, name)
    for _ in range(8):
        optimizer.step()
    state = optimizer.get_state()
    optimizer.drain()
    held = {
        int(index): [(e[1]["count"], e[1]["mean"]) for e in one["statistics"]["envs"]]
        for index, one in state["workers"].items()
        if one["statistics"]
    }
    assert all(count > 10.0 for one in held.values() for count, _ in one)
    return state, held


@pytest.mark.parametrize("source", OPTIMIZERS)
def test_statistics_survive_a_restore_under_another_optimizer(
    worker_pool: Pool, source: str
) -> None:
    state, held = trained(worker_pool, source)
    assert set(held) == {1, 2}
    for target in OPTIMIZERS:
        optimizer = make(worker_pool, target)
        optimizer.set_state(state)
        restored = statistics_of(optimizer)
        for index in held:
            for (count, mean), (expected, its_mean) in zip(
                restored[index], held[index], strict=True
            ):
                # A new episode has begun in each environment. Its first observation adds 1 to the
                # count, and moves the mean by about 1 / count.
                assert 0.0 <= count - expected <= 1.0
                np.testing.assert_allclose(mean, its_mean, atol=3.0 / expected)
        assert optimizer.workers.faults.num_restarts == 0


@pytest.mark.parametrize("rollout", [{"num_envs_per_worker": 3}, {"num_workers": 3}])
def test_other_numbers_of_environments_share_all_statistics(
    worker_pool: Pool, rollout: dict[str, Any]
) -> None:
    state, held = trained(worker_pool, "sync_samples")
    optimizer = make(worker_pool, "async_gradients", **rollout)
    optimizer.set_state(state)
    restored = statistics_of(optimizer)
    assert optimizer.workers.faults.num_restarts == 0
    every = [one for chain in held.values() for one in chain]
    if "num_workers" in rollout:
        new = restored[3]
        expected = sum(count for count, _ in every)
    else:
        new = restored[1]
        expected = sum(count for count, _ in held[1])
        assert len(new) == 3
    for count, _ in new:
        assert 0.0 <= count - expected <= 1.0


def test_statistics_survive_a_restore_without_workers(worker_pool: Pool) -> None:
    state, held = trained(worker_pool, "sync_samples")
    optimizer = make(worker_pool, "sync_samples", num_workers=0)
    optimizer.set_state(state)
    expected = sum(count for one in held.values() for count, _ in one)
    for chain in optimizer.workers.local.get_statistics()["envs"]:
        assert 0.0 <= chain[1]["count"] - expected <= 1.0


@pytest.mark.parametrize("transport", ["ray", "socket"])
def test_replacement_begins_with_the_statistics_sent_last(
    worker_pool: Pool, transport: str
) -> None:
    optimizer = make(worker_pool, "async_gradients", transport=transport)
    workers, until_s, sent = optimizer.workers, time.monotonic() + 120.0, 0.0
    while sent <= 10.0:  # only some replies contain the statistics
        optimizer.step()
        assert time.monotonic() < until_s
        if 1 in workers.env_statistics:
            sent = workers.env_statistics[1]["envs"][0][1]["count"]
    os.kill(pid_of(workers.remote[0]), signal.SIGKILL)
    until_s = time.monotonic() + 120.0
    while workers.faults.num_restarts == 0 or not workers.remote[0].up:
        optimizer.step()
        assert time.monotonic() < until_s
    assert workers.faults.counts["death"] == 1
    assert statistics_of(optimizer)[1][0][0] >= sent


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_of_other_wrappers_are_one_error(worker_pool: Pool, num_workers: int) -> None:
    state, _ = trained(worker_pool, "sync_samples")
    optimizer = make(worker_pool, "sync_samples", Drift, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"^environments keep 0 running statistics"):
        optimizer.set_state(state)
    assert optimizer.workers.faults.num_restarts == 0
