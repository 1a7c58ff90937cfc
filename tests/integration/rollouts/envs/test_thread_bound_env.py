"""Some environments work only in the main thread, or only in the thread that made them. They must
work in every process that runs environments."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from fakes import make_optimizer, worker_config
from gymnasium import spaces

import polopt
from polopt.collectors.gradient_worker import GradientWorkerSet
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.trainer import PolicyOptimizerTrainer

pytestmark = pytest.mark.usefixtures("ray_session")
#: With these options, one exception of an environment ends the run.
STRICT = {"max_consecutive_env_faults": 1, "max_consecutive_failures": 1}


class ThreadBound(gymnasium.Env[np.ndarray, int]):
    """An environment that uses timers with signals, the event loop of its thread, and a database.
    Environments with a time limit, a browser or recorded prices do the same."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.thread = threading.get_ident()
        self.prices = sqlite3.connect(":memory:")
        self.prices.execute("create table prices(time int, price real)")
        self.prices.executemany(
            "insert into prices values(?, ?)", [(time, 1.5 * time) for time in range(10)]
        )
        self.use()

    def use(self, time: int = 0) -> float:
        assert threading.get_ident() == self.thread
        assert threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGALRM, self.too_slow)
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        try:
            return asyncio.get_event_loop().run_until_complete(self.price(time))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    async def price(self, time: int) -> float:
        found = self.prices.execute("select price from prices where time = ?", (time,))
        return float(found.fetchone()[0])

    def too_slow(self, *_: Any) -> None:
        raise TimeoutError("the step takes too long")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        self.use()
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        price = self.use(self.time)
        return np.array([price], np.float32), 1.0, self.time >= 8, False, {}

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        self.prices.close()


def check(workers: WorkerSet) -> None:
    """Checks that no environment and no worker has failed."""
    stats = workers.stats()
    assert stats["num_env_faults"] == 0, stats["last_env_fault"]
    assert stats["num_remote_worker_restarts"] == stats["num_restarts_below"] == 0


@pytest.fixture
def made() -> Iterator[list[WorkerSet]]:
    sets: list[WorkerSet] = []
    yield sets
    for workers in sets:
        workers.stop()


@pytest.mark.parametrize("transport", ["ray", "socket"])
def test_in_a_worker(made: list[WorkerSet], transport: str) -> None:
    rollout = {"num_workers": 1, "transport": transport, "num_cpus_per_worker": 0.1, **STRICT}
    config = worker_config(env=ThreadBound, rollout=rollout)
    workers = WorkerSet(config)
    made.append(workers)
    for _ in range(2):
        optimizer = make_optimizer(SyncSamples, workers)
        assert [optimizer.step().env_steps_sampled for _ in range(3)] == [10] * 3
        check(workers)
        assert workers.reconfigure(config), "environments are made again in the same process"


def test_in_a_process_of_its_own(made: list[WorkerSet]) -> None:
    rollout = {"num_workers": 1, "vectorization_mode": "async", **STRICT}
    workers = WorkerSet(worker_config(env=ThreadBound, rollout=rollout))
    made.append(workers)
    assert make_optimizer(SyncSamples, workers).step().env_steps_sampled == 10
    check(workers)


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


def test_in_an_evaluation_worker(tmp_path: Any) -> None:
    config = {
        "env": ThreadBound,
        "policy": "a2c",
        "optimizer": "sync_samples",
        "num_workers": 1,
        "rollout_fragment_length": 16,
        "min_sample_timesteps_per_iteration": 16,
        "model": {"fcnet_hiddens": [8]},
        "evaluation_interval": 1,
        "evaluation_duration": 2,
        "evaluation_num_workers": 1,
        **STRICT,
    }
    trainer = PolicyOptimizerTrainer(config)
    try:
        for _ in range(1000):
            result = trainer.train()
            if result["evaluation"]["num_evaluations"] >= 2:
                break
        evaluation = result["evaluation"]
        assert evaluation["num_evaluations"] >= 2
        assert evaluation["env_runners"]["episode_return_mean"] == 8.0
        for faults in (evaluation["fault_tolerance"], result["fault_tolerance"]):
            assert faults["num_env_faults"] == faults["num_remote_worker_restarts"] == 0
    finally:
        trainer.stop()
