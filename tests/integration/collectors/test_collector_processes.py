"""`Collector` with worker processes: killed workers, slow workers, added and removed workers,
resources, and clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
import torch
from collector_toys import FailsAfterSteps, Reach, update
from fakes import (
    inside,
    pid_of,
    worker_config,
)
from faulty_envs import Spoiled
from toy_envs import Clock, Drift, TimestampEnv

from polopt.collectors.collector import Collector, next_seed
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts import ray_session as sessions
from polopt.rollouts.sampling.non_finite import all_finite
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

CHEAP = {"num_cpus": 0.25}


pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def made() -> Iterator[Any]:
    """Returns a function that makes Collectors. The Collectors are shut down after the test."""
    collectors: list[Collector] = []

    def make(env: Any = Drift, policy: Any = "a2c", **options: Any) -> Collector:
        defaults = {"num_collectors": 2, "num_envs": 2, "frames_per_batch": 20, "seed": 0}
        collector = Collector(env, policy, **{**defaults, "remote_configs": CHEAP, **options})
        collectors.append(collector)
        return collector

    yield make
    for collector in collectors:
        collector.shutdown()


@pytest.fixture
def over(worker_pool: Any) -> Iterator[Any]:
    """Returns a function that makes Collectors over two workers of the pool. The tests share these
    workers, so that they do not start for each test."""
    collectors: list[Collector] = []

    def make(env: Any = Drift, seed: int = 0, rollout: Any = None, **options: Any) -> Collector:
        workers = worker_pool(worker_config("a2c", env, seed=seed, rollout=rollout))
        collectors.append(Collector.over(workers, **{"frames_per_batch": 20, **options}))
        return collectors[-1]

    yield make
    for collector in collectors:
        collector.shutdown()


def kill(collector: Collector, index: int) -> None:
    worker = next(w for w in collector.workers.remote if w.index == index)
    os.kill(pid_of(worker), signal.SIGKILL)


@pytest.mark.parametrize("sync", [True, False])
def test_killed_collectors_are_replaced_without_lost_frames(over: Any, sync: bool) -> None:
    collector = over(sync=sync, total_frames=200)
    frames = []
    for i, batch in enumerate(collector):
        frames.append(batch.env_steps)
        if i == 2:
            kill(collector, 1)
    assert collector.workers.faults.counts["death"] == 1
    assert sum(frames) == collector.num_frames == 200
    assert set(frames) == {20}


def test_failing_envs_are_replaced_up_to_the_limit(over: Any, made: Any) -> None:
    env_config = {"raises_after": 12, "worker": 2}
    rollout = {"env_config": env_config, "max_consecutive_env_faults": 1}
    collector = over(lambda ctx: FailsAfterSteps(ctx), rollout=rollout, sync=True, total_frames=60)
    assert sum(batch.env_steps for batch in collector) == 60
    assert collector.workers.faults.counts["environment"] > 0
    unrecoverable = made(
        lambda ctx: FailsAfterSteps(ctx),
        create_env_kwargs={"dies_after": 0},
        num_collectors=1,
        max_consecutive_failures=1,
    )
    with pytest.raises(WorkersFailedError):
        next(unrecoverable)


def ages(collector: Collector, batches: int) -> list[int]:
    """Makes one update after each batch, and returns the lag of the weights, in batches, for each
    step of each environment. The clock in the observations says when each step ended."""
    start = collector.policy.version
    handed_s: list[float] = []
    found = []
    for _ in range(batches):
        batch = next(collector)
        update(collector)
        handed_s.append(time.monotonic())
        before = np.searchsorted(handed_s, batch.all_obs[1:, :, 0].reshape(-1))
        found += (before + start - batch.version).tolist()
    return found


def test_policy_lag_of_workers_is_bounded(over: Any) -> None:
    slow = {"slow": 2, "slow_s": 0.03, "step_s": 0.002}
    rollout = {"num_envs_per_worker": 1, "rollout_fragment_length": 10, "env_config": slow}

    def oldest(**options: Any) -> int:
        collector = over(
            lambda ctx: TimestampEnv(ctx), rollout=rollout, frames_per_batch=0, **options
        )
        found = max(ages(collector, 40))
        collector.shutdown()
        return found

    for limit in (1, 3):
        assert oldest(max_weight_update_interval=limit) <= limit
    assert oldest(update_after_each_batch=True) > 3, (
        "without a maximum interval, the slow worker lags more"
    )


# ---- joining and leaving ------------------------------------------------------------------------


def test_collectors_join_and_leave_while_iterating(made: Any) -> None:
    collector = made(sync=True, broadcast_interval=1)
    assert next(collector).shape == (5, 4)
    update(collector)
    added = collector.add_collectors(num_envs=3)
    assert added == [3]
    next(collector)  # this batch was requested before the new worker was added
    batch = next(collector)
    # The workers have 2, 2 and 3 environments, which are 7 columns. 20 frames over three workers
    # are 7 per worker, for which a worker with 2 environments needs 4 steps.
    assert batch.shape == (4, 7)
    pids = {pid_of(worker) for worker in collector.workers.remote}
    assert len(pids) == 3
    collector.remove_collectors([1])
    next(collector)
    assert next(collector).shape == (5, 5)
    assert [worker.index for worker in collector.workers.remote] == [2, 3]
    with pytest.raises(KeyError):
        collector.remove_collectors([1])
    with pytest.raises(ConfigError, match="spaces"):
        collector.add_collectors(Reach)
    collector.remove_collectors([2, 3])  # their pending fragments are lost
    with pytest.raises(RuntimeError, match="no collectors left"):
        next(collector)
    assert collector.add_collectors(num_collectors=1) == [4]
    assert next(collector).shape == (10, 2)


def test_collectors_can_have_own_environments_and_resources(made: Any) -> None:
    collector = made(
        [lambda: Clock(3, longest=9), lambda: Clock(9)],
        sync=True,
        num_collectors=None,
        remote_configs=[
            {"num_cpus": 0.5, "runtime_env": {"env_vars": {"WHO": "one"}}},
            {"num_cpus": 0.25, "resources": {"seat": 1.0}, "memory": 50_000_000},
        ],
        frames_per_batch=72,
    )
    batch = next(collector)
    # 72 frames are 18 steps of four environments, in episodes of 3 or 9 steps.
    assert batch["truncated"].sum(0).tolist() == [6, 6, 2, 2]

    def look(_: Any) -> tuple[Any, Any]:
        return ray.get_runtime_context().get_assigned_resources(), os.environ.get("WHO")

    looks = [inside(worker, look) for worker in collector.workers.remote]
    (first, owner), (second, no_owner) = [value() for value in looks]
    assert (first["CPU"], owner) == (0.5, "one")
    assert (second["CPU"], second["seat"], second["memory"], no_owner) == (0.25, 1.0, 5e7, None)


def test_environments_in_processes_of_their_own(made: Any) -> None:
    def sign(batch: SampleBatch) -> SampleBatch:
        batch.columns["postprocessed_by"] = np.full(batch.shape, os.getpid())
        return batch

    collector = made(
        lambda ctx: TimestampEnv(ctx),
        num_collectors=1,
        num_envs=1,
        num_workers_per_collector=3,
        postproc=sign,
    )
    batch = next(collector)
    pids = set(batch.obs[..., 1].reshape(-1).tolist())
    assert batch.shape == (7, 3)
    assert len(pids) == 3
    worker = pid_of(collector.workers.remote[0])
    assert worker not in pids
    assert (batch["postprocessed_by"] == worker).all()


def test_seeds_and_state_with_processes(over: Any) -> None:
    one = over(sync=True, seed=1, broadcast_interval=1)
    next(one)
    after = one.set_seed(5)
    seeded = next(one)
    state = one.state_dict()
    assert set(state["collectors"]) == {"0", "1", "2"}
    next(one)  # this batch was pending when the state was taken
    expected = next(one)
    one.shutdown()
    two = over(sync=True, seed=2, broadcast_interval=1)
    assert next(two).all_obs.tobytes() != seeded.all_obs.tobytes()
    # Each of the four environments takes one seed.
    assert two.set_seed(5) == after == next_seed(next_seed(next_seed(next_seed(5))))
    assert next(two).all_obs.tobytes() == seeded.all_obs.tobytes()
    two.load_state_dict(state)
    assert (two.num_frames, two.num_batches) == (state["num_frames"], 2)
    assert next(two).all_obs.tobytes() == expected.all_obs.tobytes()


# ---- clusters -----------------------------------------------------------------------------------

ALONE = """
import ray
from polopt.collectors.collector import Collector, next_seed

def collect(seats):
    with Collector("CartPole-v1", num_collectors=1, frames_per_batch=8) as collector:
        assert next(collector).env_steps == 8
        assert ray.cluster_resources().get("seat", 0.0) == seats

{program}
print("fine")
"""

START = """
collect(0.0)
assert not ray.is_initialized(), "the Collector ends the Ray that it started"
"""

ATTACH = """
collect(8.0)
assert not ray.is_initialized(), "the Collector ends its own connection"
ray.init(log_to_driver=False)
collect(8.0)
assert ray.is_initialized(), "the Collector keeps an earlier connection"
"""


def run_alone(program: str, **env: str) -> None:
    others = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    answer = subprocess.run(
        [sys.executable, "-c", ALONE.format(program=program)],
        capture_output=True,
        text=True,
        timeout=240.0,
        env={**others, **env},
        check=False,
    )
    assert "fine" in answer.stdout, answer.stderr


def test_without_a_cluster_one_is_started_and_ended(ray_session: None) -> None:
    # The cluster of `ray_session` is running. Ray looks for running clusters in its temporary
    # directory, and this test gives Ray an empty directory. Its path is short, because Ray puts
    # Unix sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        run_alone(START, RAY_TMPDIR=folder)


def test_running_cluster_is_used_and_left_running(ray_session: None) -> None:
    run_alone(ATTACH, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert ray.cluster_resources()["seat"] == 8.0


def test_ray_init_config_goes_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(sessions.ray, "is_initialized", lambda: bool(given))
    monkeypatch.setattr(sessions.ray, "init", lambda **options: given.append(options))
    monkeypatch.setattr(sessions.ray, "cluster_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(sessions.ray.util, "get_current_placement_group", lambda: None)
    assert sessions.attach_or_start(2.0, 2, {"num_cpus": 3, "namespace": "mine"})
    assert given == [{"num_cpus": 3, "namespace": "mine"}]
    assert not sessions.attach_or_start(2.0, 2, {"num_cpus": 3}), "Ray is connected already"


def test_example_of_torchrl() -> None:
    """The code is the example of TorchRL's RayCollector, with an environment of Gymnasium."""
    nn = pytest.importorskip("tensordict.nn")
    policy = nn.TensorDictModule(
        torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
    )
    collector = Collector(
        create_env_fn=[lambda: gymnasium.make("Pendulum-v1")],
        policy=policy,
        collector_class="Collector",
        max_frames_per_traj=50,
        init_random_frames=-1,
        reset_at_each_iter=-False,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
        num_collectors=1,
        total_frames=10000,
        frames_per_batch=200,
    )
    with collector:
        batch = next(collector)
    assert batch.env_steps == 200
    # 200 frames are four episodes of `max_frames_per_traj` = 50 frames.
    assert (batch["truncated"].sum(axis=0) == 4).all()


def non_finite_config(
    what: str, policy: str = "a2c", rollout: dict[str, Any] | None = None, **env: Any
) -> WorkerConfig:
    """Returns the config of two workers. The environments of the second worker return non-finite
    data after 12 steps."""
    env_config = {"what": what, "worker": 2, "after": 12, **env}
    return worker_config(policy, Spoiled, rollout={"env_config": env_config, **(rollout or {})})


def test_collector_returns_only_finite_batches() -> None:
    config = non_finite_config("nan reward", rollout={"num_workers": 0}, times=1, worker=0)
    workers = WorkerSet(config)
    collector = Collector.over(workers, total_frames=60, sync=True)
    batches = list(collector)
    assert sum(batch.env_steps for batch in batches) == collector.num_frames >= 60
    assert all(all_finite(batch["rewards"]) for batch in batches)
    assert workers.stats()["num_non_finite"] in (1, 2)


WORKERS = 2


@pytest.mark.parametrize("sync", [True, False])
def test_collector_collects_on_ray(ray_session: None, sync: bool) -> None:
    collector = Collector(
        "CartPole-v1",
        "a2c",
        num_collectors=WORKERS,
        num_envs=2,
        frames_per_batch=40,
        sync=sync,
    )
    with collector:
        batches = [next(collector) for _ in range(3)]
    # Additional steps replace the rows in which an environment only resets. Both environments of a
    # worker take these steps.
    steps = [batch.env_steps for batch in batches]
    assert all(40 <= count < 40 + 2 * WORKERS for count in steps), steps


def test_sync_collector_stops_slow_workers_early(worker_pool: Any) -> None:
    options = {
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 40,
        "env_config": {"slow": 2, "slow_s": 0.04},
    }
    workers = worker_pool(worker_config("a2c", lambda ctx: TimestampEnv(ctx), rollout=options))

    def rows(count: int, **options: Any) -> list[list[int]]:
        collector = Collector.over(workers, sync=True, **options)
        found = [next(collector)["valid"].sum(0).tolist() for _ in range(count)]
        collector.calls.discard()
        return found

    assert rows(1) == [[40, 40]]
    parts = rows(3, fraction_workers=0.5, fraction_samples=0.1)
    assert all(fast == 40 and 4 <= slow < 40 for fast, slow in parts), parts
    assert rows(1, fraction_workers=0.5, fraction_samples=0.75) == [[40, 30]]
