"""Training over sockets and training through Ray have the same results and the same failures."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import make_optimizer, pid_of, worker_config
from faulty_envs import NeverResets

from polopt.optimizers.async_gradients import AsyncGradients, compute_gradient
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_replay import SyncReplay
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet, call_method

LIMIT_S = 60.0
Pool = Callable[[WorkerConfig], WorkerSet]
both_transports = pytest.mark.parametrize("transport", ["ray", "socket"])


def async_gradients(pool: Pool, options: dict[str, Any] | None = None, **more: Any) -> Any:
    config = worker_config("a2c", rollout={"num_workers": 1, **(options or {})}, lr=1e-2)
    return make_optimizer(AsyncGradients, pool(config), grads_per_step=10, **more)


def num_socket_calls(optimizer: PolicyOptimizer) -> int:
    """Returns the number of calls that went over sockets so far."""
    return getattr(optimizer.workers.transport, "num_calls", 0)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_weights_are_bitwise_equal_over_sockets_and_through_ray(
    worker_pool: Pool, depth: int
) -> None:
    learned = []
    for transport in ("socket", "ray"):
        optimizer = async_gradients(
            worker_pool, {"transport": transport}, max_requests_in_flight_per_worker=depth
        )
        before = num_socket_calls(optimizer)
        for _ in range(3):
            optimizer.step()
        assert optimizer.stats()["transport"] == transport
        optimizer.drain()
        over_sockets = num_socket_calls(optimizer) - before
        assert (over_sockets >= 30) == (transport == "socket")
        learned.append(optimizer.policy.get_weights().flat.tobytes())
    assert len(set(learned)) == 1


@both_transports
def test_large_weights_train(worker_pool: Pool, transport: str) -> None:
    model = {"fcnet_hiddens": (256, 256)}
    config = worker_config("a2c", rollout={"num_workers": 1, "transport": transport}, model=model)
    optimizer = make_optimizer(AsyncGradients, worker_pool(config), grads_per_step=3)
    assert optimizer.policy.flat.grads.nbytes > 100_000
    assert optimizer.step().updates == 3
    assert optimizer.stats()["transport"] == transport


@both_transports
def test_state_and_options_between_steps(worker_pool: Pool, transport: str) -> None:
    optimizer = async_gradients(worker_pool, {"transport": transport})
    optimizer.step()
    state = optimizer.get_state()
    optimizer.step()
    optimizer.set_state(state)
    optimizer.update_algorithm_parameter("lr", 0.5)
    optimizer.step()
    assert pid_of(optimizer.workers.remote[0]) != os.getpid()
    optimizer.step()
    assert optimizer.workers.faults.num_restarts == 0


def test_failing_environment_is_reported_in_the_same_way(worker_pool: Pool) -> None:
    messages = []
    for transport in ("socket", "ray"):
        options = {"num_workers": 1, "transport": transport}
        workers = worker_pool(worker_config("a2c", NeverResets, rollout=options))
        calls, worker = Calls(workers, "test"), workers.remote[0]
        workers.up()
        calls.send(worker, call_method, "get_weights")
        assert calls.next().failure is None
        calls.send(worker, compute_gradient, WEIGHTS)
        failure = calls.next().failure
        assert failure is not None
        assert failure.kind == "environment"
        messages.append(failure.message.partition("\n")[0])
    assert messages[0] == messages[1]


class Undecodable:
    """An object whose unpickling raises an ImportError, as for a class that only the worker can
    import."""

    def __reduce__(self) -> Any:
        return (importlib.import_module, ("statistics_of_mine",))


class Exits:
    """An object whose unpickling raises SystemExit."""

    def __reduce__(self) -> Any:
        return (sys.exit, ("of the answer",))


#: Functions with which a worker changes its answer, and the error message for each changed answer.
#: `test_calls.py` has further examples.
ODD_ANSWERS: list[tuple[Callable[[Answer], Any], str]] = [
    (lambda _: Undecodable(), "its answer cannot be unpickled"),
    (lambda _: Exits(), "its answer cannot be unpickled: SystemExit: of the answer"),
    (lambda _: None, "its answer cannot be used: it is NoneType"),
]


class OddWorker(RolloutWorker):
    """A worker that applies the function `change`, if it is set, to one answer."""

    change: Callable[[Answer], Any] | None = None

    def run(self, call: int, function: Any, *args: Any) -> Any:
        change, self.change = self.change, None
        answer = super().run(call, function, *args)
        return answer if change is None else change(answer)


class OddWorkerSet(WorkerSet):
    """A worker set whose remote workers are `OddWorker`s."""

    worker_class = OddWorker


@both_transports
def test_odd_answer_is_the_workers_failure(ray_session: None, transport: str) -> None:
    rollout = {"num_workers": 1, "num_cpus_per_worker": 0.1, "transport": transport}
    workers = OddWorkerSet(worker_config("a2c", rollout=rollout, lr=1e-2))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=5)
    try:
        for number, (change, said) in enumerate(ODD_ANSWERS, start=1):
            assert optimizer.step().updates == 5
            optimizer.drain()
            workers.up()
            foreach_worker(workers, setattr, "change", change)
            optimizer.step()
            assert optimizer.step().updates == 5
            faults = workers.faults
            assert faults.counts == {**dict.fromkeys(faults.counts, 0), "exception": number}
            assert faults.num_restarts == number
            assert faults.last is not None
            assert workers.stats()["last_failed_worker"] == 1
            assert said in faults.last.message
            assert (
                "function polopt.optimizers.async_gradients.compute_gradient" in faults.last.message
            )
    finally:
        workers.stop()


@both_transports
def test_killed_and_stopped_workers_are_replaced(worker_pool: Pool, transport: str) -> None:
    options = {"num_workers": 2, "worker_timeout_s": 8.0, "transport": transport}
    optimizer = async_gradients(worker_pool, options)
    optimizer.step()
    for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        while not optimizer.workers.remote[0].up:
            optimizer.step()
        optimizer.drain()
        victim = pid_of(optimizer.workers.remote[0])
        optimizer.step()
        os.kill(victim, sent)
        began_s = time.monotonic()
        while optimizer.workers.faults.num_restarts == number:
            optimizer.step()
            assert time.monotonic() - began_s < LIMIT_S
    assert optimizer.workers.faults.counts["death"] == 1
    assert optimizer.workers.faults.counts["hang"] == 1
    assert optimizer.stats()["transport"] == transport


def test_removed_and_added_workers_connect(worker_pool: Pool) -> None:
    optimizer = async_gradients(worker_pool, {"num_workers": 2, "transport": "socket"})
    optimizer.step()
    optimizer.workers.remove_workers([1])
    optimizer.workers.add_workers(1)
    until_s = time.monotonic() + LIMIT_S
    while not all(worker.up for worker in optimizer.workers.remote):
        optimizer.step()
        assert time.monotonic() < until_s
    optimizer.step()
    assert optimizer.stats()["transport"] == "socket"
    assert optimizer.workers.faults.num_restarts == 0


# ---- all optimizers ----------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[type[PolicyOptimizer], dict[str, Any]]] = {
    "async_gradients": (AsyncGradients, {"grads_per_step": 10}),
    "sync_gradients": (SyncGradients, {"grads_per_step": 10}),
    "sync_samples": (SyncSamples, {}),
    "async_samples": (AsyncSamples, {}),
    "decentralized_allreduce": (DecentralizedAllReduce, {"fraction_workers": 1.0}),
    "sync_replay": (SyncReplay, {"learning_starts": 5, "train_batch_size": 8}),
}
REPRODUCIBLE = ["sync_gradients", "sync_samples", "decentralized_allreduce", "sync_replay"]


def make_named(pool: Pool, name: str, transport: str, **rollout: Any) -> Any:
    cls, options = OPTIMIZERS[name]
    policy = DQNPolicy if cls is SyncReplay else "a2c"
    config = worker_config(policy, rollout={"transport": transport, **rollout}, lr=1e-2)
    return make_optimizer(cls, pool(config), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_of_every_optimizer_go_over_sockets(worker_pool: Pool, name: str) -> None:
    optimizer = make_named(worker_pool, name, "socket")
    optimizer.workers.up()
    for _ in range(3):
        optimizer.step()
    assert num_socket_calls(optimizer) >= 3
    assert optimizer.stats()["transport"] == "socket"
    optimizer.drain()
    assert optimizer.workers.faults.num_restarts == 0


def test_large_calls_go_over_sockets_between_other_calls(worker_pool: Pool) -> None:
    optimizer = make_named(worker_pool, "async_gradients", "auto")
    workers = optimizer.workers
    workers.up()
    large = np.arange(300_000, dtype=np.float32)
    worker, before = workers.remote[0], num_socket_calls(optimizer)
    for values in (large, large[:5], large):
        calls = Calls(workers, "test", per_worker=2)
        calls.send(worker, setattr, "values", values)
        calls.send(worker, getattr, "values")
        assert calls.next().failure is None
        np.testing.assert_array_equal(calls.next().value, values)
    assert num_socket_calls(optimizer) == before + 6
    for _ in range(6):
        optimizer.step()
    optimizer.drain()
    assert workers.faults.num_restarts == 0


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_synchronous_weights_are_equal_over_sockets_and_through_ray(
    worker_pool: Pool, name: str
) -> None:
    learned = []
    for transport in ("socket", "ray"):
        optimizer = make_named(worker_pool, name, transport)
        optimizer.workers.up()  # waits, so all workers take part in the first step
        for _ in range(6):
            optimizer.step()
        optimizer.drain()
        assert optimizer.stats()["transport"] == transport
        assert (num_socket_calls(optimizer) >= 12) == (transport == "socket")
        learned.append(optimizer.policy.get_weights().flat)
    np.testing.assert_array_equal(*learned)


#: The transport on which a test kills workers of an optimizer. On the other one, it is a slow test.
KILLED_ON = dict(zip(OPTIMIZERS, itertools.cycle(["ray", "socket"])))


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        pytest.param(name, transport, marks=[] if transport == usual else pytest.mark.slow)
        for name, usual in KILLED_ON.items()
        for transport in ("ray", "socket")
    ],
)
def test_every_optimizer_replaces_a_killed_worker(
    worker_pool: Pool, name: str, transport: str
) -> None:
    optimizer = make_named(worker_pool, name, transport)
    optimizer.workers.up()
    optimizer.step()
    optimizer.drain()
    victim = pid_of(optimizer.workers.remote[0])
    optimizer.step()
    os.kill(victim, signal.SIGKILL)
    until_s = time.monotonic() + LIMIT_S
    while optimizer.workers.faults.num_restarts == 0:
        optimizer.step()
        assert time.monotonic() < until_s
    optimizer.step()
    assert optimizer.workers.faults.counts["death"] == 1
    assert optimizer.stats()["transport"] == transport


def test_early_stop_reaches_a_worker_that_answers_over_a_socket(worker_pool: Pool) -> None:
    rollout = {"num_workers": 1, "rollout_fragment_length": 10**6}
    optimizer = make_named(worker_pool, "async_samples", "socket", **rollout)
    workers, calls = optimizer.workers, optimizer.calls
    worker = workers.remote[0]
    workers.up()
    calls.send(worker, sample, WEIGHTS)
    calls.stop_early(calls.pending(), 1)
    reply = calls.first()
    assert len(reply.value) < 10**6
    assert reply.counts.num_early_stopped == 1


# ---- configs of version 0.3 --------------------------------------------------------------------


def test_zmq_in_a_config_means_socket(worker_pool: Pool) -> None:
    assert RolloutConfig.parse({"transport": "zmq"}).transport == "socket"
    assert DecentralizedAllReduce.config_class.parse({"backend": "zmq"}).backend == "socket"
    optimizer = make_named(worker_pool, "async_gradients", "zmq")
    optimizer.step()
    assert optimizer.stats()["transport"] == "socket"


@both_transports
def test_large_weights_reach_every_worker(worker_pool: Pool, transport: str) -> None:
    """Two workers make the driver put new weights while a call with the earlier ones is sent."""
    options = {"transport": transport, "num_workers": 2}
    large = {"fcnet_hiddens": (256, 256)}
    workers = worker_pool(worker_config("a2c", rollout=options, model=large))
    optimizer = make_optimizer(
        AsyncGradients, workers, grads_per_step=10, max_requests_in_flight_per_worker=3
    )
    for _ in range(5):
        optimizer.step()
    assert optimizer.stats()["num_gradients"] >= 50
    assert workers.stats()["num_worker_lost_arguments"] == 0
