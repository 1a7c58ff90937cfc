"""Environments that raise at random. Each of three optimizers trains with them for a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from faulty_envs import crashing_cartpole

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_set import WorkerSet

NUM_WORKERS, NUM_ENVS, STEPS = 2, 8, 32
SECONDS, SLICE_S = 60.0, 2.0


class Run:
    """An optimizer that trains with environments that raise with probability `p`, and the counters
    of this training."""

    def __init__(self, cls: Any, p: float) -> None:
        rollout = {
            "num_workers": NUM_WORKERS,
            "num_envs_per_worker": NUM_ENVS,
            "rollout_fragment_length": STEPS,
            "env_config": {"p_crash": p, "p_crash_reset": p},
        }
        policy = "ppo" if cls is DecentralizedAllReduce else "a2c"
        learning = {"num_sgd_iter": 2, "sgd_minibatch_size": 128} if policy == "ppo" else {}
        config = worker_config(policy, crashing_cartpole, rollout=rollout, **learning)
        self.workers = WorkerSet(config)
        whole = {"fraction_workers": 1.0} if cls is DecentralizedAllReduce else {}
        self.optimizer = make_optimizer(cls, self.workers, **whole)
        self.num_steps = 0
        self._step()
        self.optimizer.drain()
        self.elapsed_s = 0.0
        self.begun = self.optimizer.metrics.num_env_steps_sampled

    def go_on(self) -> None:
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < SLICE_S:
            self._step()
        self.optimizer.drain()  # otherwise, calls in flight would slow the next optimizer down
        self.elapsed_s += time.perf_counter() - started_s

    def _step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1

    def fragments(self) -> int:
        optimizer = self.optimizer
        if isinstance(optimizer, AsyncGradients):
            return optimizer.metrics.num_gradients_accepted
        if isinstance(optimizer, SyncSamples):
            return self.num_steps * NUM_WORKERS
        return optimizer.num_rounds * NUM_WORKERS

    @property
    def rate(self) -> float:
        return (self.optimizer.metrics.num_env_steps_sampled - self.begun) / self.elapsed_s


@pytest.fixture
def runs(ray_session: None, request: pytest.FixtureRequest) -> Iterator[dict[float, Run]]:
    made = {p: Run(request.param, p) for p in (0.0, 0.005, 0.01)}
    yield made
    for run in made.values():
        run.optimizer.stop()
        run.workers.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "runs", [AsyncGradients, SyncSamples, DecentralizedAllReduce], indirect=True
)
def test_crashing_environments_cost_little(
    runs: dict[float, Run], report: Callable[[str, str], None]
) -> None:
    # The runs take turns, so that other load affects all runs equally.
    for _ in range(int(SECONDS / SLICE_S)):
        for run in runs.values():
            run.go_on()
    for p, run in runs.items():
        optimizer, stats = run.optimizer, run.workers.stats()
        share = run.rate / runs[0.0].rate
        report(
            f"environments raise, p={p}",
            f"{optimizer.name}: {run.rate:.0f} steps/s, {share:.0%} of clean, "
            f"{stats['num_env_faults']} exceptions in "
            f"{optimizer.metrics.num_env_steps_sampled} steps",
        )
        assert stats["num_remote_worker_restarts"] == 0
        assert stats["num_non_finite"] == 0
        # Each exception costs at most one row, and no fragment is lost.
        fragments = run.fragments()
        lost = fragments * NUM_ENVS * STEPS - optimizer.metrics.num_env_steps_sampled
        assert 0 <= lost <= stats["num_env_faults"]
        assert (stats["num_env_faults"] > 100) == (p > 0.0)
        if p > 0.0:
            assert "simulated crash" in stats["last_env_fault"]
            assert stats["last_env_fault_worker"] in (1, 2)
        # An exception costs about as much time as 100 steps of CartPole, half of it to make a new
        # environment. A restart of the worker's process would take as long as 100,000 steps.
        assert share >= 0.3
