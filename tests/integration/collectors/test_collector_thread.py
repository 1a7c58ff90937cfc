"""`CollectorThread`: its bounded queue, its errors, and `stop`."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collector_toys import FailsAfterSteps, fake_collector, local_collector, update
from fakes import pid_of, worker_config
from faulty_envs import Spoiled
from gymnasium.vector import SyncVectorEnv
from toy_envs import Clock, TimestampEnv
from waiting import wait_until

from polopt.collectors.collector import Collector
from polopt.collectors.collector_thread import CollectorEnded, CollectorThread
from polopt.rollouts.envs.env_errors import EnvironmentFailedError
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.worker_set import WorkerSet

STOPS_WITHIN_S = 30.0  # `stop` takes at most about two seconds on a machine without other load


def stop_quickly(thread: CollectorThread) -> None:
    started_s = time.monotonic()
    thread.stop()
    assert time.monotonic() - started_s < STOPS_WITHIN_S
    assert not thread.is_alive


def test_all_batches_in_order_then_the_end() -> None:
    direct = [batch.all_obs.tobytes() for batch in local_collector(total_frames=60)]
    with CollectorThread(local_collector(total_frames=60), maxsize=2) as thread:
        assert [batch.all_obs.tobytes() for batch in thread] == direct
        with pytest.raises(CollectorEnded):
            thread.get()
        with pytest.raises(CollectorEnded):
            thread.get(timeout=0.1)


def test_the_queue_is_bounded_and_so_are_the_workers() -> None:
    collector = fake_collector(2)
    thread = CollectorThread(collector, maxsize=3)
    wait_until(thread.queue.full)

    def num_calls() -> int:
        return sum(len(channel.calls) for channel in collector.workers.channels)

    # Three batches are in the queue, one batch waits for a free place, and each worker has one
    # fragment.
    wait_until(lambda: num_calls() >= 3 + 1 + 2)
    time.sleep(0.2)  # enough time for further calls, which must not happen
    assert num_calls() == 3 + 1 + 2
    thread.get()
    wait_until(lambda: num_calls() >= 3 + 1 + 2 + 1)
    stop_quickly(thread)
    with pytest.raises(ValueError, match="bounded"):
        CollectorThread(collector, maxsize=0)


def collector_that_raises(raises_after: int) -> Collector:
    """Returns a local collector whose environment raises after a number of steps."""
    kwargs = {"raises_after": raises_after}
    return local_collector(FailsAfterSteps, create_env_kwargs=kwargs, max_consecutive_env_faults=1)


def test_an_exception_is_raised_at_the_next_get() -> None:
    collector = collector_that_raises(raises_after=15)
    # A batch has 6 steps of two environments, so the third batch fails. `get` then raises the
    # exception, although two complete batches are in the queue.
    thread = CollectorThread(collector, maxsize=8)
    wait_until(lambda: not thread.is_alive)
    for _ in range(2):
        with pytest.raises(EnvironmentFailedError, match="step limit of the test"):
            thread.get()
    stop_quickly(thread)


def test_exception_ends_a_pending_get() -> None:
    collector = collector_that_raises(raises_after=3)
    original = collector.workers.local.sample

    def slowly(*args: Any) -> Any:
        time.sleep(0.3)
        return original(*args)

    collector.workers.local.sample = slowly
    thread = CollectorThread(collector)
    started_s = time.monotonic()
    with pytest.raises(EnvironmentFailedError, match="step limit of the test"):
        thread.get()  # this call begins to wait before the failure
    assert time.monotonic() - started_s < STOPS_WITHIN_S


def test_get_has_a_limit() -> None:
    collector = local_collector(
        lambda ctx: TimestampEnv(ctx), create_env_kwargs={"step_s": 0.2}, frames_per_batch=100
    )
    with CollectorThread(collector) as thread, pytest.raises(queue.Empty):
        thread.get(timeout=0.1)


def test_stop_while_the_queue_is_full() -> None:
    collector = local_collector(lambda: Clock(5))
    thread = CollectorThread(collector)
    # One batch is in the queue, and the second batch waits for a free place.
    wait_until(lambda: thread.queue.full() and collector.num_batches == 2)
    stop_quickly(thread)
    with pytest.raises(CollectorEnded):
        thread.get()
    thread.stop()
    assert next(collector).env_steps == 12, "the collector can be used again"


def test_stop_while_it_samples_locally() -> None:
    collector = local_collector(
        lambda ctx: TimestampEnv(ctx), create_env_kwargs={"step_s": 0.05}, frames_per_batch=100_000
    )
    thread = CollectorThread(collector)
    time.sleep(0.2)
    stop_quickly(thread)


def test_stop_ends_a_pending_get() -> None:
    collector = local_collector(
        lambda ctx: TimestampEnv(ctx), create_env_kwargs={"step_s": 0.05}, frames_per_batch=100_000
    )
    thread = CollectorThread(collector)
    outcome: list[Any] = []

    def consume() -> None:
        try:
            thread.get()
        except CollectorEnded as error:
            outcome.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.2)
    stop_quickly(thread)
    consumer.join(STOPS_WITHIN_S)
    assert len(outcome) == 1


class NeedsMainThread(TimestampEnv):
    """An environment whose steps raise outside the main thread, which alone may set signal
    handlers."""

    def step(self, action: Any) -> Any:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return super().step(action)


class VectorNeedsMainThread(SyncVectorEnv):
    """A vector environment whose steps raise outside the main thread."""

    def step(self, actions: Any) -> Any:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return super().step(actions)


@pytest.mark.parametrize("own_vector", [False, True])
def test_error_in_another_thread_says_what_environments_need(own_vector: bool) -> None:
    def make(ctx: Any) -> Any:
        return (
            VectorNeedsMainThread([lambda: TimestampEnv(ctx)] * 2)
            if own_vector
            else NeedsMainThread(ctx)
        )

    collector = local_collector(make, max_consecutive_env_faults=2)
    with (
        CollectorThread(collector) as thread,
        pytest.raises(
            EnvironmentFailedError, match=r"thread 'polopt-collector'.*num_collectors of 1 or more"
        ),
    ):
        thread.get(timeout=60.0)


def test_weights_are_sent_by_the_thread_that_gets_batches() -> None:
    collector = local_collector(policy="a2c", broadcast_interval=1)
    with CollectorThread(collector) as thread:
        thread.get()
        update(collector)
        assert collector.workers.weights.last.weights.version == 0
        thread.get()
        assert collector.workers.weights.last.weights.version == 1
        update(collector)
        assert thread.update_policy_weights_() == 2


def test_program_ends_while_its_thread_runs() -> None:
    program = (
        "from polopt.collectors.collector import Collector\n"
        "from polopt.collectors.collector_thread import CollectorThread\n"
        "thread = CollectorThread(Collector('CartPole-v1', num_collectors=0, frames_per_batch=9))\n"
        "print(thread.get().env_steps)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200.0)


# ---- with processes -----------------------------------------------------------------------------


@pytest.fixture
def remote(ray_session: None) -> Iterator[Any]:
    """Returns a function that makes Collectors with one worker process. After the test, the
    Collectors are shut down."""
    collectors: list[Collector] = []

    def make(**options: Any) -> Collector:
        defaults = {"num_collectors": 1, "frames_per_batch": 100_000, "seed": 0}
        collector = Collector(
            lambda ctx: TimestampEnv(ctx),
            "a2c",
            **{**defaults, "remote_configs": {"num_cpus": 0.25}, **options},
        )
        collectors.append(collector)
        return collector

    yield make
    for collector in collectors:
        collector.shutdown()


@pytest.fixture
def over(worker_pool: Any) -> Iterator[Any]:
    """Returns a function that makes Collectors over two workers of the pool, which are up."""
    collectors: list[Collector] = []

    def make(
        step_s: float, env: Any = TimestampEnv, env_config: Any = None, **options: Any
    ) -> Collector:
        rollout = {"num_envs_per_worker": 1, "env_config": env_config or {"step_s": step_s}}
        workers = worker_pool(worker_config("a2c", lambda ctx: env(ctx), rollout=rollout))
        wait_until_up(workers)
        collectors.append(Collector.over(workers, **options))
        return collectors[-1]

    yield make
    for collector in collectors:
        collector.shutdown()


def wait_until_up(workers: WorkerSet) -> None:
    while not all(worker.up for worker in workers.remote):
        workers.take_started(1.0)


def test_stop_while_workers_sample(over: Any) -> None:
    sampling = over(0.02, sync=True, frames_per_batch=100_000)
    thread = CollectorThread(sampling)
    time.sleep(0.3)
    stop_quickly(thread)
    assert sampling.workers.faults.num_restarts == 0, "stopping replaces no worker"


def test_not_finite_fragment_that_a_stop_ends_is_sampled_again(over: Any) -> None:
    """The first step of each environment is not finite, so the fragment that `stop` ends is not
    finite either."""
    env_config = {"what": "nan reward", "times": 1}
    collector = over(0.0, Spoiled, env_config, sync=True, frames_per_batch=20_000)
    thread = CollectorThread(collector)
    wait_until(collector.calls.pending)
    stop_quickly(thread)
    for _ in range(2):
        batch = next(collector)
        assert batch.env_steps > 0
        assert np.isfinite(batch["rewards"]).all()
    assert collector.workers.faults.counts["non_finite"] == 2


def test_stop_while_workers_start_or_hang(remote: Any) -> None:
    starting = remote()  # the worker process takes seconds to start
    stop_quickly(CollectorThread(starting))

    hanging = remote(create_env_kwargs={"step_s": 1000.0})
    wait_until_up(hanging.workers)
    thread = CollectorThread(hanging)
    time.sleep(0.3)
    stop_quickly(thread)


def test_persistent_worker_failures_raise(remote: Any) -> None:
    collector = remote(frames_per_batch=10, max_consecutive_failures=1)
    with CollectorThread(collector) as thread:
        thread.get()
        for worker in collector.workers.remote:
            os.kill(pid_of(worker), signal.SIGKILL)
        with pytest.raises(WorkersFailedError):
            list(thread)


def test_collecting_and_learning_overlap(over: Any) -> None:
    def overlap(batches: Any, learning_s: float) -> bool:
        """Returns whether the first step of a batch happened before learning from the previous
        batch ended. The observations contain the time."""
        next(batches)
        time.sleep(learning_s)
        learned_s = time.monotonic()
        return bool(next(batches).all_obs[1, 0, 0] < learned_s)

    options = {"frames_per_batch": 20, "sync": True}
    ahead = over(0.01, **options, broadcast_interval=1)
    assert overlap(ahead, 3.0)
    with CollectorThread(ahead) as thread:
        assert overlap(thread, 3.0)
    ahead.shutdown()
    late = over(0.01, **options, update_after_each_batch=True)
    assert not overlap(late, 0.1), "collecting starts after learning"
