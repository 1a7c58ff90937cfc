"""The driver waits for workers with slow environments, and replaces workers whose environment
hangs. `worker_timeout_s` limits the time without progress, and not the time of the whole call."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from fakes import make_optimizer, worker_config
from gymnasium import spaces

from polopt.collectors.gradient_worker import GradientWorkerSet
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.worker_set import WorkerSet

pytestmark = pytest.mark.usefixtures("ray_session")
LIMIT_S = 3.0
#: The number of steps in a fragment. Each step takes 0.1 s.
STEPS = 50


class Slow(gymnasium.Env[np.ndarray, int]):
    """An environment whose steps take `step_s`, by default 0.1 s. The first `fast_steps` steps take
    no time. The first process that finds the file `hang` removes the file and hangs."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.hang = Path(config.get("hang", "/no such file"))
        self.step_s = config.get("step_s", 0.1)
        self.fast_steps = config.get("fast_steps", 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.fast_steps -= 1
        if self.fast_steps < 0:
            time.sleep(self.step_s)
        if self.hang.exists():
            self.hang.unlink()
            while True:
                time.sleep(3600.0)
        return np.zeros(2, np.float32), 1.0, False, False, {}


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
    assert [optimizer.step().env_steps_sampled for _ in range(2)] == [STEPS] * 2
    assert optimizer.timers["sample"].total_s > 2 * LIMIT_S
    assert workers.faults.num_restarts == 0


def test_steps_that_become_slow_are_no_hang(make: Any) -> None:
    config = {"fast_steps": 5, "step_s": LIMIT_S / 2}
    size = {"num_envs_per_worker": 4, "rollout_fragment_length": 6}
    workers = make(**size, env_config=config, max_consecutive_failures=1)
    optimizer = make_optimizer(SyncSamples, workers)
    assert optimizer.step().env_steps_sampled == 4 * 6
    assert optimizer.timers["sample"].total_s > 4 * LIMIT_S / 2, "four environments are slow"
    assert workers.faults.num_restarts == 0


def test_slow_steps_below_a_gradient_worker_are_no_hang(make: Any) -> None:
    workers = make(GradientWorkerSet, num_workers_below=1)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=2)
    result = optimizer.step()
    assert (result.updates, result.env_steps_sampled) == (2, 2 * STEPS)
    stats = workers.stats()
    assert stats["num_remote_worker_restarts"] == stats["num_restarts_below"] == 0


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
