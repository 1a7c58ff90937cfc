"""Tests how results divide the time of the driver and of the workers into shares."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import make_optimizer, worker_config
from ray import tune
from toy_envs import Drift

from polopt.metrics.worker_times import PARTS
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_replay import SyncReplay
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.workers.rollout_worker import STATISTICS_INTERVAL_S
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.trainer import PolicyOptimizerTrainer

Pool = Callable[[WorkerConfig], WorkerSet]
SAVE_S = 1.0
GRADIENTS: Any = {"grads_per_step": 4}
OPTIMIZERS: dict[type[PolicyOptimizer], dict[str, Any]] = {
    AsyncGradients: GRADIENTS,
    SyncGradients: GRADIENTS,
    SyncSamples: {},
    AsyncSamples: {},
    DecentralizedAllReduce: {},
    SyncReplay: {"learning_starts": 5, "train_batch_size": 8},
}


class WaitingDrift(Drift):
    """An environment whose steps sleep, so a step of the optimizer takes long on any machine."""

    def step(self, action: int) -> Any:
        time.sleep(0.004)
        return super().step(action)


class SavesSlowly(PolicyOptimizerTrainer):
    """A trainer that takes at least `SAVE_S` seconds for each checkpoint."""

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        time.sleep(SAVE_S)
        super().save_checkpoint(checkpoint_dir)


class SecondWaits(Drift):
    """An environment whose steps sleep. They sleep ten times as long in worker 2."""

    def step(self, action: int) -> Any:
        time.sleep(0.02 if self.context.worker_index == 2 else 0.002)
        return super().step(action)


class SecondWorks(Drift):
    """An environment whose steps sleep. In worker 2, steps use a processor, and hold memory."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.held = np.ones(25_000_000 if self.context.worker_index == 2 else 1)  # 200 MB

    def step(self, action: int) -> Any:
        if self.context.worker_index == 2:
            until_s = time.process_time() + 0.02
            while time.process_time() < until_s:
                pass
        else:
            time.sleep(0.02)
        return super().step(action)


def assert_sums(stats: dict[str, Any], phases: tuple[str, ...]) -> None:
    """Checks that shares of the driver and of the workers have the right names and sum to 1."""
    driver, workers = stats["driver"], stats["workers"]
    assert set(driver["share"]) == {"startup", *phases, "report", "evaluation", "other"}
    assert set(driver["p50_ms"]) == set(driver["p99_ms"]) == {*phases, "report", "evaluation"}
    assert tuple(workers["share"]) == tuple(workers["p50_ms"]) == tuple(workers["p99_ms"]) == PARTS
    for share in (driver["share"], workers["share"]):
        assert all(0.0 <= value <= 1.0 for value in share.values())
        assert sum(share.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.name)
def test_shares_sum_to_one_and_other_is_small(worker_pool: Pool, cls: Any) -> None:
    policy = DQNPolicy if cls is SyncReplay else "ppo"
    workers = worker_pool(worker_config(policy, WaitingDrift))
    optimizer = make_optimizer(cls, workers, **OPTIMIZERS[cls])
    before = optimizer.stats()
    assert_sums(before, cls.phases)
    # The interval so far is the start-up of a few microseconds. The optimizer counts at least 1 ns
    # as training, so the share is almost 1.
    assert before["driver"]["share"]["startup"] == pytest.approx(1.0, abs=1e-3)
    optimizer.step()
    assert optimizer.stats()["driver"]["share"]["startup"] > 0.0
    for _ in range(8):
        optimizer.step()
    stats = optimizer.stats()
    assert_sums(stats, cls.phases)
    assert stats["driver"]["share"]["startup"] == 0.0
    assert stats["driver"]["share"]["other"] < 0.05
    # The bound is low, because workers wait for processors on a busy machine.
    assert stats["workers"]["share"]["sample"] > 0.05
    assert [each["index"] for each in stats["workers"]["per_worker"]] == [1, 2]
    assert stats["requests_in_flight"]["max"] >= 1
    assert stats["num_bytes_received"] > 0
    sends_gradients = cls in (AsyncGradients, SyncGradients)
    assert (stats["num_gradients_accepted"] > 0) == sends_gradients
    assert (stats["num_bytes_sent"] > 0) == (cls is not DecentralizedAllReduce)
    nbytes = optimizer.policy.flat.params.nbytes
    if sends_gradients:
        assert stats["num_bytes_received"] == stats["num_gradients_accepted"] * nbytes
    assert json.loads(json.dumps(stats["workers"]["per_worker"]))[1]["index"] == 2


@pytest.mark.usefixtures("ray_session")
def test_phase_report_is_the_time_of_tune_and_of_checkpoints(tmp_path: Path) -> None:
    # One optimizer has the driver apply gradients, and the other lets its workers learn.
    classes = (AsyncGradients, DecentralizedAllReduce)
    optimizers = [{"name": cls.name, **OPTIMIZERS[cls]} for cls in classes]
    grid = tune.Tuner(
        SavesSlowly,
        param_space={
            "env": WaitingDrift,
            "num_workers": 1,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 8,
            "min_sample_timesteps_per_iteration": 64,
            "num_cpus_for_driver": 0,
            "policy": "ppo",
            "optimizer": tune.grid_search(optimizers),
        },
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 6},
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
        ),
    ).fit()
    assert not grid.errors
    for result in grid:
        rows = [json.loads(row) for row in (Path(result.path) / "result.json").open()]
        shares = [row["optimizer"]["driver"]["share"] for row in rows]
        seconds = [row["time_this_iter_s"] + SAVE_S for row in rows]
        assert statistics.median(share["other"] for share in shares[1:]) < 0.05
        for index in (2, 4):  # after a checkpoint
            assert shares[index]["report"] > 0.9 * SAVE_S / seconds[index]


def test_local_worker_reports_the_same_keys() -> None:
    config = worker_config("ppo", WaitingDrift, rollout={"num_workers": 0})
    optimizer = make_optimizer(SyncSamples, WorkerSet(config))
    for _ in range(3):
        optimizer.step()
    stats = optimizer.stats()
    optimizer.workers.stop()
    assert_sums(stats, SyncSamples.phases)
    assert [each["index"] for each in stats["workers"]["per_worker"]] == [0]
    share = stats["workers"]["share"]
    assert share["sample"] > 0.9
    assert share["idle"] == 0.0, "the local worker has no idle time"
    (own,) = stats["workers"]["per_worker"]
    assert own["memory_bytes"] == pytest.approx(stats["machine"]["driver_memory_bytes"], rel=0.2)
    assert stats["num_bytes_sent"] == stats["num_bytes_received"] == 0
    assert stats["requests_in_flight"] == {"mean": 1.0, "max": 1}


def steps_of_slow_worker(worker_pool: Pool, cls: Any) -> dict[int, dict[str, float]]:
    """Trains with `SecondWaits`, and returns the statistics of each worker by index."""
    workers = worker_pool(worker_config("a2c", SecondWaits))
    optimizer = make_optimizer(cls, workers, **OPTIMIZERS[cls])
    while any(not worker.up for worker in workers.remote):
        optimizer.step()
    optimizer.stats()
    for _ in range(8):
        optimizer.step()
    return {each["index"]: each for each in optimizer.stats()["workers"]["per_worker"]}


def test_workers_wait_for_a_slow_environment_in_sync(worker_pool: Pool) -> None:
    fast, slow = steps_of_slow_worker(worker_pool, SyncSamples).values()
    assert fast["idle_share"] > 0.5 > slow["idle_share"]
    assert fast["env_steps_per_s"] == pytest.approx(slow["env_steps_per_s"])


def test_no_worker_waits_for_a_slow_environment_in_async(worker_pool: Pool) -> None:
    fast, slow = steps_of_slow_worker(worker_pool, AsyncGradients).values()
    assert fast["idle_share"] < 0.5
    assert slow["env_steps_per_s"] < fast["env_steps_per_s"] / 2
    assert slow["gradients_per_s"] < fast["gradients_per_s"] / 2


@pytest.mark.parametrize("cls", [AsyncGradients, DecentralizedAllReduce], ids=lambda cls: cls.name)
def test_each_worker_reports_processors_and_memory_of_its_process(
    worker_pool: Pool, cls: Any
) -> None:
    optimizer = make_optimizer(
        cls, worker_pool(worker_config("ppo", SecondWorks)), **OPTIMIZERS[cls]
    )
    while any(not worker.up for worker in optimizer.workers.remote):
        optimizer.step()
    optimizer.stats()
    deadline_s = time.monotonic() + 60.0
    waits = works = {"cpus": 0.0}
    while not waits["cpus"] or not works["cpus"]:  # on a busy machine, a reading may come later
        assert time.monotonic() < deadline_s, (waits, works)
        until_s = time.monotonic() + 3.0 * STATISTICS_INTERVAL_S
        while time.monotonic() < until_s:
            optimizer.step()
        stats = optimizer.stats()
        waits, works = stats["workers"]["per_worker"]
    assert works["cpus"] > 2.0 * waits["cpus"] > 0.0
    assert works["memory_bytes"] - waits["memory_bytes"] > 100_000_000
    assert stats["workers"]["cpus"]["max"] == works["cpus"]
    assert stats["machine"]["driver_memory_bytes"] > 10_000_000
    assert works["gpu_share"] == works["gpu_memory_bytes"] == 0.0


def test_ranks_report_the_wait_for_the_slowest(worker_pool: Pool) -> None:
    workers = worker_pool(worker_config("ppo", SecondWaits))
    optimizer = make_optimizer(DecentralizedAllReduce, workers, fraction_workers=1.0)
    for _ in range(2):
        optimizer.step()
    optimizer.stats()
    for _ in range(4):
        optimizer.step()
    stats = optimizer.stats()["workers"]
    # Other programs on the machine reduce this share. It was 0.17 at a load average of 17.
    assert stats["share"]["skew"] > 0.05
    assert stats["p99_ms"]["skew"] > 100.0
    assert stats["share"]["learn"] > 0.0
