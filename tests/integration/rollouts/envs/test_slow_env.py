"""The driver waits for workers with slow environments, and replaces workers whose environment
hangs. `worker_timeout_s` limits the time without progress, and not the time of the whole call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from slow_env import LIMIT_S, STEPS, Slow

from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_set import WorkerSet

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def make() -> Any:
    """Returns a function that makes workers with slow environments."""
    made: list[WorkerSet] = []

    def build(kind: Callable[..., WorkerSet] = WorkerSet, **rollout: Any) -> WorkerSet:
        options = {
            "num_workers": 1,
            "num_envs_per_worker": 1,
            "rollout_fragment_length": STEPS,
            "num_cpus_per_worker": 0.1,
            "worker_timeout_s": LIMIT_S,
            **rollout,
        }
        made.append(kind(worker_config(env=Slow, rollout=options)))
        return made[-1]

    yield build
    for workers in made:
        workers.stop()


@pytest.mark.parametrize("transport", ["ray", "socket"])
def test_slow_steps_are_no_hang(make: Any, transport: str) -> None:
    workers = make(transport=transport)
    optimizer = make_optimizer(SyncSamples, workers)
    workers.up()
    assert optimizer.step().env_steps_sampled == STEPS
    assert optimizer.timers["sample"].total_s > LIMIT_S
    assert workers.faults.num_restarts == 0


def test_steps_that_become_slow_are_no_hang(make: Any) -> None:
    config = {"fast_steps": 5, "step_s": LIMIT_S / 2}
    size = {"num_envs_per_worker": 4, "rollout_fragment_length": 6}
    workers = make(**size, env_config=config, max_consecutive_failures=1)
    optimizer = make_optimizer(SyncSamples, workers)
    assert optimizer.step().env_steps_sampled == 4 * 6
    assert optimizer.timers["sample"].total_s > 4 * LIMIT_S / 2, "four environments are slow"
    assert workers.faults.num_restarts == 0


@pytest.mark.parametrize("transport", ["ray", "socket"])
def test_step_that_hangs_costs_its_worker(make: Any, transport: str, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    workers = make(transport=transport, env_config={"hang": str(hang)}, rollout_fragment_length=20)
    optimizer = make_optimizer(SyncSamples, workers)
    assert optimizer.step().env_steps_sampled == 20
    hang.touch()
    assert optimizer.step().env_steps_sampled == 20, "the replacement samples the fragment"
    assert not hang.exists()
    stats = workers.stats()
    assert stats["num_worker_hangs"] == stats["num_remote_worker_restarts"] == 1
    message = stats["last_hang"]
    assert re.search(r"sync_samples.*function \S+\.sample failed in worker 1 ", message)
    found = re.search(r"no answer and no progress for (\d+\.\d) s \(worker_timeout_s=3, ", message)
    assert found is not None, message
    assert LIMIT_S <= float(found[1]) < LIMIT_S + 10.0
    assert message.endswith("A fragment has 20 steps of 1 environment)")
