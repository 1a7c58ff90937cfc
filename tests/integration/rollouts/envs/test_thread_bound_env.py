"""Some environments work only in the main thread, or only in the thread that made them. They must
work in every process that runs environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from thread_bound_env import STRICT, ThreadBound, check

from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.trainer import PolicyOptimizerTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


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
