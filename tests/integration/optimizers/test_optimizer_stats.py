"""The `optimizer/` block of results has common keys for all optimizers, and one shape in all
results of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from simulated_channel import VirtualClock

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_replay import SyncReplay
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
OPTIMIZERS: dict[str, type[PolicyOptimizer]] = {
    cls.name: cls
    for cls in (
        *(AsyncGradients, SyncGradients, SyncSamples, AsyncSamples, DecentralizedAllReduce),
        SyncReplay,
    )
}
LAGS = {"policy_lag", "policy_lag_rollouts", "gradient_lag", "gradient_lag_rollouts"}
NESTED = {"actions", "driver", "workers", "machine", "requests_in_flight"}
SECONDS = {"startup_s", "training_s", "interval_s"}
COMMON = {
    *NESTED,
    "learns_with",
    "num_bytes_sent",
    "num_bytes_received",
    "num_events_recorded",
    "num_gradients_accepted",
    "num_gradients_stale",
    "num_gradients_skipped",
    "name",
    "transport",
    "num_env_steps_sampled",
    "num_agent_steps_sampled",
    "num_env_steps_discarded",
    "num_env_steps_trained",
    "num_updates",
    "num_skipped_updates",
    "env_steps_per_s",
    "updates_per_s",
    "rows_per_update",
    *SECONDS,
    *LAGS,
    "num_early_stopped",
    "num_gradients",
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make(pool: Pool, name: str) -> PolicyOptimizer:
    return make_with(pool(config_for(name)), name)


def config_for(name: str) -> WorkerConfig:
    return worker_config(DQNPolicy if name == "sync_replay" else "ppo")


def make_with(workers: WorkerSet, name: str) -> PolicyOptimizer:
    options = {"learning_starts": 5, "train_batch_size": 8} if name == "sync_replay" else {}
    optimizer: PolicyOptimizer = make_optimizer(OPTIMIZERS[name], workers, **options)
    return optimizer


def shape(value: Any) -> Any:
    """Returns the keys, types and lengths of a value, without its numbers."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shape(inner) for inner in value]
    return "number" if isinstance(value, int | float) else type(value)


@every_optimizer
def test_optimizer_block_has_one_shape_from_the_start(worker_pool: Pool, name: str) -> None:
    optimizer = make(worker_pool, name)
    first = optimizer.stats()
    assert first["name"] == name
    assert first.keys() >= COMMON
    assert {f"{phase}_time_ms" for phase in optimizer.timers} <= first.keys()
    for lag in LAGS:
        assert list(first[lag]) == ["mean", "max", "histogram"]
        assert first[lag]["histogram"] == [0] * 17
    others = {"name", "transport", "learns_with"} | SECONDS | LAGS | NESTED
    assert all(first[key] == 0 for key in COMMON - others)
    for _ in range(2):
        optimizer.step()
        stats = optimizer.stats()
        assert shape(stats) == shape(first)
        assert all(sum(stats[lag]["histogram"]) > 0 for lag in LAGS)
        assert stats["rows_per_update"] > 0.0
        assert sum(stats["actions"]["histogram"]["0"]) > 0
        assert sum(stats[f"{phase}_time_ms"] for phase in optimizer.timers) > 0.0
    optimizer.set_state(optimizer.get_state())
    assert shape(optimizer.stats()) == shape(first)


@every_optimizer
def test_rates_and_lag_cover_the_time_since_the_last_report(
    worker_pool: Pool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    workers = worker_pool(config_for(name))
    workers.up()
    monkeypatch.setattr(workers, "clock", clock)
    optimizer = make_with(workers, name)
    for duration_s in (2.0, 5.0):
        results = [optimizer.step() for _ in range(2)]
        clock.now_s += duration_s
        stats = optimizer.stats()
        sampled = sum(result.env_steps_sampled for result in results)
        updates = sum(result.updates for result in results)
        assert stats["env_steps_per_s"] == pytest.approx(sampled / duration_s)
        assert stats["updates_per_s"] == pytest.approx(updates / duration_s)
    clock.now_s += 1.0
    idle = optimizer.stats()
    assert idle["env_steps_per_s"] == idle["updates_per_s"] == 0.0
    for lag in LAGS:
        assert idle[lag] == {"mean": 0.0, "max": 0, "histogram": [0] * 17}
    assert idle["num_updates"] == stats["num_updates"] > 0

    state = optimizer.get_state()
    optimizer.set_state(state)
    clock.now_s += 1.0
    assert optimizer.stats()["env_steps_per_s"] == 0.0, "steps before a restore do not count"


def test_extra_stats_cannot_replace_common_keys(worker_pool: Pool) -> None:
    for name in OPTIMIZERS:
        optimizer = make(worker_pool, name)
        timers = {f"{phase}_time_ms" for phase in optimizer.timers}
        assert not set(optimizer.extra_stats()) & (COMMON | timers)
        assert set(optimizer.stats()) == COMMON | timers | set(optimizer.extra_stats())
