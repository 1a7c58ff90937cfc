"""AsyncSamples: the driver learns from fragments as they arrive, and bounds their lag."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes import CheckedWorker, FakeTransport, FakeWorkerSet, make_optimizer, pid_of, worker_config
from simulated_channel import (
    Script,
    SimulatedTicket,
    none_ready,
    oldest_first,
    shuffled_by,
)

from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

ROWS = 10  # rows of a fragment
#: The minibatches are shuffled, so another order of the same rows gives other weights.
PPO = {"num_sgd_iter": 2, "sgd_minibatch_size": 8, "kl_coeff": 0.2, "lr": 1e-2}


class TimedWorker(CheckedWorker):
    """A worker whose replies say that each call takes `seconds`. The fake clock does not move."""

    seconds = 0.0

    def run(self, *args: Any) -> Answer:
        answer = super().run(*args)
        answer.record.seconds = {"sample": self.seconds}
        return answer


def make(
    script: Script = oldest_first, num_workers: int = 3, cls: Any = AsyncSamples, **options: Any
) -> Any:
    fake = FakeTransport()
    fake.script = script
    config = worker_config("ppo", rollout={"num_workers": num_workers}, **PPO)
    return make_optimizer(cls, FakeWorkerSet(config, fake, TimedWorker), **options)


def uneven(seed: int, slow: int = 3) -> Script:
    """Returns a script in which worker `slow` makes fewer than one in ten of the replies."""
    rng = random.Random(seed)

    def script(pending: list[SimulatedTicket]) -> SimulatedTicket:
        quick = [ref for ref in pending if ref.channel.index != slow]
        return rng.choice(pending if rng.random() < 0.1 or not quick else quick)

    return script


def test_fragments_do_not_grow_in_number_after_drains() -> None:
    optimizer = make()
    for _ in range(10):
        assert optimizer.step().env_steps_trained == ROWS
        optimizer.drain()  # as before a checkpoint
        assert len(optimizer.calls.kept) <= 3 * 2
    made = sum(len(channel.values) for channel in optimizer.workers.channels)
    assert made == 10 + len(optimizer.calls.kept), (
        "the driver learns from each fragment, or keeps it"
    )


@pytest.mark.parametrize("requests", [1, 2])
def test_workers_sample_while_the_driver_learns(requests: int) -> None:
    optimizer = make(num_workers=2, max_requests_in_flight_per_worker=requests)
    pending: list[int] = []
    learn = optimizer.policy.learn_on_batch

    def spy(*args: object) -> object:
        pending.append(optimizer.calls.num_pending)
        return learn(*args)

    optimizer.policy.learn_on_batch = spy
    for _ in range(4):
        optimizer.step()
    assert pending == [2 * requests] * 4


def test_sampling_peak_uses_the_time_of_the_workers() -> None:
    """The peak is not computed from the waiting time of the driver, which is near 0 if fragments
    have already arrived."""
    optimizer = make(num_workers=2)
    for channel in optimizer.workers.channels:
        channel.target.seconds = 0.5
    for _ in range(4):
        optimizer.step()
    assert optimizer.extra_stats()["sample_peak_throughput"] == 2 * ROWS / 0.5


@pytest.mark.parametrize("fragments", [3, 6])
def test_bound_of_zero_equals_sync_samples_bit_for_bit(fragments: int) -> None:
    def weights(cls: Any, script: Script, **options: Any) -> bytes:
        optimizer = make(script, cls=cls, train_batch_size=fragments * ROWS, **options)
        optimizer.workers.remote[2].channel.target.seconds = 100.0  # worker 3 is slow
        for _ in range(5):
            optimizer.step()
        return optimizer.policy.get_weights().flat.tobytes()

    expected = weights(SyncSamples, oldest_first)
    for script in (oldest_first, *map(shuffled_by, range(3)), uneven(0)):
        assert weights(AsyncSamples, script, max_rollout_lag=0) == expected
    assert weights(AsyncSamples, uneven(0), max_rollout_lag=1) != expected


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("bound", [0, 1, 5])
def test_lag_in_rollouts_never_exceeds_the_bound(bound: int, size: int, requests: int) -> None:
    optimizer = make(
        uneven(seed=10 * bound + size),
        train_batch_size=size * ROWS,
        max_rollout_lag=bound,
        max_requests_in_flight_per_worker=requests,
    )
    largest = 0
    for step in range(40):
        if step == 10:  # the slow worker dies in its next call
            slow = optimizer.workers.remote[2]
            slow.channel.next_error = LostProcessError("the process died")
        if step == 25:
            optimizer.drain()
        assert optimizer.step().env_steps_trained == size * ROWS
        lag = optimizer.stats()["policy_lag_rollouts"]
        largest = max(largest, lag["max"])
        assert lag["max"] <= bound
    assert slow.removed
    assert optimizer.workers.faults.num_restarts == 1
    assert all(len(channel.values) > 5 for channel in optimizer.workers.channels[:2]), (
        "both fast workers sample"
    )
    ahead = 3 * requests - 1  # fragments that may be requested before the fragment that is learned
    assert largest == bound or ahead // size < bound, "workers sample as far ahead as allowed"


@pytest.mark.parametrize("rate", [0, 1, 4])
def test_fragments_that_wait_are_counted_for_each_batch(rate: int) -> None:
    optimizer = make(num_workers=4, max_requests_in_flight_per_worker=1)
    learn = optimizer.policy.learn_on_batch

    def slow_learn(*args: object) -> object:
        for channel in optimizer.workers.channels[:rate]:
            channel.finish()  # the call ends while the driver learns
        return learn(*args)

    optimizer.policy.learn_on_batch = slow_learn
    for _ in range(2):
        optimizer.step()
    stats = optimizer.stats()
    assert stats["num_batches"] == 2
    assert stats["num_fragments_waiting"] == rate


def test_slow_worker_does_not_take_the_places_of_faster_ones() -> None:
    optimizer = make(num_workers=2, max_rollout_lag=20)
    fake, slow = optimizer.workers.transport, optimizer.workers.remote[1]
    slow.channel.target.seconds = 10.0
    fake.script = lambda pending: next((r for r in pending if r.channel.index == 2), pending[0])
    for _ in range(3):
        optimizer.step()  # the driver measures the duration of the worker's fragments
    fake.script = lambda pending: next(r for r in pending if r.channel.index == 1)
    for _ in range(2):
        optimizer.step()
        calls = optimizer.calls
        # A fragment of this worker takes longer than the driver needs to learn from a batch.
        assert calls.num_work_of(slow) == 1, "no second call yet"
    fake.clock.now_s += 9.99  # the fragment will end soon
    optimizer.step()
    assert calls.num_work_of(slow) == 2


def test_without_a_bound_fragments_of_a_slow_worker_are_older() -> None:
    optimizer = make(uneven(0), train_batch_size=ROWS)
    for _ in range(40):
        optimizer.step()
    assert optimizer.stats()["policy_lag_rollouts"]["max"] > 5


def test_no_wait_for_a_worker_that_is_within_the_bound() -> None:
    optimizer = make(max_rollout_lag=20, max_requests_in_flight_per_worker=1)
    optimizer.step()
    others = shuffled_by(0)
    fake = optimizer.workers.transport
    fake.script = lambda pending: others([r for r in pending if r.channel.index != 3])
    for _ in range(19):
        optimizer.step()
    fake.script = none_ready
    hanging = optimizer.workers.remote[2]
    optimizer.workers.remote[0].channel.finish()
    optimizer.workers.remote[1].channel.finish()
    optimizer.step()
    assert hanging.removed, "its fragment would exceed the bound, so the step waited in vain"


# ---- with processes ----------------------------------------------------------------------


def test_killed_worker_keeps_the_bound(
    worker_pool: Callable[[WorkerConfig], WorkerSet],
) -> None:
    workers = worker_pool(worker_config(rollout={"num_workers": 3}))
    optimizer = make_optimizer(AsyncSamples, workers, max_rollout_lag=3)
    for _ in range(20):
        optimizer.step()
    os.kill(pid_of(workers.remote[1]), signal.SIGKILL)
    deadline_s = time.monotonic() + 120.0
    while workers.faults.num_restarts == 0 or not all(worker.up for worker in workers.remote):
        assert optimizer.step().env_steps_trained == ROWS
        assert time.monotonic() < deadline_s
    for _ in range(20):
        optimizer.step()
    assert optimizer.stats()["policy_lag_rollouts"]["max"] <= 3
    assert workers.stats()["num_worker_deaths"] == 1
