"""Training over ZeroMQ and through Ray: same results, same failures."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fakes import FakeWorkerSet, connect_workers, make_optimizer, pid_of, worker_config
from faulty_envs import NeverResets

from polopt.optimizers.async_gradients import AsyncGradients, compute_gradient
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.base import PolicyOptimizer
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport import listener
from polopt.rollouts.transport.messages import AUTO_FRAME_BYTES
from polopt.rollouts.transport.rpc_client import SMALL_MESSAGE_BYTES
from polopt.rollouts.workers.calls import WEIGHTS, Calls
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import Answer, RolloutWorker
from polopt.rollouts.workers.set_up import foreach_worker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet, call_method

LIMIT_S = 60.0
Pool = Callable[[WorkerConfig], WorkerSet]
both_transports = pytest.mark.parametrize("transport", ["ray", "zmq"])


def async_gradients(pool: Pool, options: dict[str, Any] | None = None, **more: Any) -> Any:
    config = worker_config("a2c", rollout={"num_workers": 1, **(options or {})}, lr=1e-2)
    return make_optimizer(AsyncGradients, pool(config), grads_per_step=10, **more)


def network_of(optimizer: PolicyOptimizer) -> str:
    """Of the connections of workers."""
    rpc = optimizer.workers.rpc
    if rpc is None:
        return "ray"
    port = int(rpc.address.rpartition(":")[2])
    # Accepted connections (state 01): local address, address of the worker.
    accepted = re.search(rf":{port:04X} \w+:\w+ 01 ", Path("/proc/net/tcp").read_text())
    return "tcp" if accepted else "ipc"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_weights_are_the_same_bits_on_all_transports(
    worker_pool: Pool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = []
    for network in ("ipc", "tcp", "ray"):
        transport = "ray" if network == "ray" else "zmq"
        monkeypatch.setattr(listener, "is_private", lambda _, n=network: n == "ipc")
        optimizer = async_gradients(
            worker_pool, {"transport": transport}, max_requests_in_flight_per_worker=depth
        )
        for _ in range(3):
            optimizer.step()
        assert optimizer.stats()["transport"] == transport
        optimizer.drain()
        rpc = optimizer.workers.rpc
        # Some of the 30 calls, and of those in flight, are made while the worker connects.
        assert (0 if rpc is None else rpc.num_calls) in (range(15, 36) if rpc else [0])
        assert network_of(optimizer) == network
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
def test_calls_through_ray_come_in_between(worker_pool: Pool, transport: str) -> None:
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


def test_failing_environment_is_reported_alike(worker_pool: Pool) -> None:
    messages = []
    for transport in ("zmq", "ray"):
        options = {"num_workers": 1, "transport": transport}
        workers = worker_pool(worker_config("a2c", NeverResets, rollout=options))
        make_optimizer(AsyncGradients, workers)  # chooses the transport
        calls, worker = Calls(workers, "test"), workers.remote[0]
        calls.send(worker, call_method, "ping")
        assert calls.next().failure is None
        calls.send(worker, compute_gradient, WEIGHTS)
        failure = calls.next().failure
        assert failure is not None
        assert failure.kind == "environment"
        messages.append(failure.message.partition("\n")[0])
    assert messages[0] == messages[1]


class Undecodable:
    """Unpickles to an import error, as a class does that only the worker can import."""

    def __reduce__(self) -> Any:
        return (importlib.import_module, ("statistics_of_mine",))


class Exits:
    """Unpickling it raises SystemExit."""

    def __reduce__(self) -> Any:
        return (sys.exit, ("of the answer",))


#: What a worker makes of its answer, and what is said of it. `test_calls.py` has further ones.
ODD_ANSWERS: list[tuple[Callable[[Answer], Any], str]] = [
    (lambda _: Undecodable(), "its answer cannot be unpickled"),
    (lambda _: Exits(), "its answer cannot be unpickled: SystemExit: of the answer"),
    (lambda _: None, "its answer cannot be used: it is NoneType"),
]


class OddWorker(RolloutWorker):
    """Changes one answer once it has a function `change` to do so."""

    change: Callable[[Answer], Any] | None = None

    def run(self, call: int, function: bytes, *args: Any) -> Any:
        change, self.change = self.change, None
        answer = super().run(call, function, *args)
        return answer if change is None else change(answer)


class OddWorkerSet(WorkerSet):
    """Its remote workers are `OddWorker`s."""

    actor_class = OddWorker


@both_transports
def test_odd_answer_is_the_workers_failure(ray_session: None, transport: str) -> None:
    rollout = {"num_workers": 1, "num_cpus_per_worker": 0.1, "transport": transport}
    workers = OddWorkerSet(worker_config("a2c", rollout=rollout, lr=1e-2))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=5)
    try:
        for number, (change, said) in enumerate(ODD_ANSWERS, start=1):
            assert optimizer.step().updates == 5
            optimizer.drain()
            connect_workers(workers)
            foreach_worker(workers, setattr, "change", change)
            optimizer.step()
            assert optimizer.step().updates == 5
            faults = workers.faults
            assert faults.counts == {"death": 0, "hang": 0, "exception": number, "environment": 0}
            assert faults.num_restarts == number
            assert faults.last is not None
            assert faults.last.worker_index == 1
            assert said in faults.last.message
            assert (
                "function polopt.optimizers.async_gradients.compute_gradient" in faults.last.message
            )
    finally:
        workers.stop()


@both_transports
def test_killed_and_stopped_workers_are_replaced(worker_pool: Pool, transport: str) -> None:
    options = {"num_workers": 2, "worker_timeout_s": 15.0, "transport": transport}
    optimizer = async_gradients(worker_pool, options)
    optimizer.step()
    for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
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
    optimizer = async_gradients(worker_pool, {"num_workers": 2, "transport": "zmq"})
    optimizer.step()
    optimizer.workers.remove_workers([1])
    optimizer.workers.add_workers(1)
    until_s = time.monotonic() + LIMIT_S
    while any(worker.channel is None for worker in optimizer.workers.remote):
        optimizer.step()
        assert time.monotonic() < until_s
    assert optimizer.stats()["transport"] == "zmq"
    assert optimizer.workers.faults.num_restarts == 0


# ---- all optimizers ----------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[type[PolicyOptimizer], dict[str, Any]]] = {
    "async_gradients": (AsyncGradients, {"grads_per_step": 10}),
    "sync_gradients": (SyncGradients, {"grads_per_step": 10}),
    "sync_samples": (SyncSamples, {}),
    "async_samples": (AsyncSamples, {}),
    "decentralized_allreduce": (DecentralizedAllReduce, {"fraction_workers": 1.0}),
}
REPRODUCIBLE = ["sync_gradients", "sync_samples", "decentralized_allreduce"]


def make_named(pool: Pool, name: str, transport: str, **rollout: Any) -> Any:
    cls, options = OPTIMIZERS[name]
    config = worker_config("a2c", rollout={"transport": transport, **rollout}, lr=1e-2)
    return make_optimizer(cls, pool(config), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_of_every_optimizer_go_over_zmq(worker_pool: Pool, name: str) -> None:
    optimizer = make_named(worker_pool, name, "zmq")
    connect_workers(optimizer.workers)
    for _ in range(3):
        optimizer.step()
    assert optimizer.workers.rpc.num_calls >= 3
    assert optimizer.stats()["transport"] == "zmq"
    optimizer.drain()
    assert optimizer.workers.faults.num_restarts == 0


def test_large_calls_and_answers_go_through_ray(worker_pool: Pool) -> None:
    optimizer = make_named(worker_pool, "async_gradients", "auto")
    workers = optimizer.workers
    connect_workers(workers)
    large = np.arange(AUTO_FRAME_BYTES // 4 + 1, dtype=np.float32)
    worker = workers.remote[0]
    for number, (values, counted) in enumerate([(large, 2), (large[:5], 2), (large, 4)]):
        calls = Calls(workers, "test", per_worker=2)
        calls.send(worker, setattr, "values", values)
        calls.send(worker, getattr, "values")
        assert calls.next().failure is None
        np.testing.assert_array_equal(calls.next().value, values)
        assert optimizer.stats()["num_large_messages"] == counted, number
    before = workers.rpc.num_calls
    for _ in range(6):
        optimizer.step()
    optimizer.drain()
    assert workers.rpc.num_calls >= before + 6, "gradients go over ZeroMQ, as before"
    assert workers.faults.num_restarts == 0


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_synchronous_weights_are_equal_on_both(worker_pool: Pool, name: str) -> None:
    learned = []
    for transport in ("zmq", "ray"):
        optimizer = make_named(worker_pool, name, transport)
        connect_workers(optimizer.workers)  # all take part in the first step
        for _ in range(6):
            optimizer.step()
        optimizer.drain()
        assert optimizer.stats()["transport"] == transport
        rpc = optimizer.workers.rpc
        assert (rpc.num_calls >= 12) if transport == "zmq" else (rpc is None)
        learned.append(optimizer.policy.get_weights().flat)
    np.testing.assert_array_equal(*learned)


@both_transports
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_replaces_a_killed_worker(
    worker_pool: Pool, name: str, transport: str
) -> None:
    optimizer = make_named(worker_pool, name, transport)
    connect_workers(optimizer.workers)
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


def test_early_stop_reaches_a_worker_that_serves(worker_pool: Pool) -> None:
    rollout = {"num_workers": 1, "rollout_fragment_length": 10**6}
    optimizer = make_named(worker_pool, "async_samples", "zmq", **rollout)
    workers, calls = optimizer.workers, optimizer.calls
    worker = workers.remote[0]
    connect_workers(workers)
    calls.send(worker, sample, WEIGHTS)
    calls.stop_all(1)
    reply = calls.first()
    assert len(reply.value) < 10**6
    assert reply.counts.num_early_stopped == 1
    assert worker.channel.open, "the worker goes on serving"


class ChoosingWorkerSet(FakeWorkerSet):
    """Worker set in this process that chooses a transport as others do."""

    use_transport = WorkerSet.use_transport


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_auto_goes_by_the_size_of_what_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    cls, options = OPTIMIZERS[name]

    def chosen(steps: int, hiddens: int, **more: Any) -> Any:
        rollout = {"rollout_fragment_length": steps, "transport": "auto"}
        config = worker_config("a2c", rollout=rollout, model={"fcnet_hiddens": (hiddens,) * 2})
        workers = ChoosingWorkerSet(config)
        optimizer = make_optimizer(cls, workers, **options, **more)
        found = optimizer.stats()["transport"]
        workers.close_rpc()
        return found

    assert chosen(5, 8) == "zmq"
    assert chosen(5, 256) == "ray"
    # Two environments with observations of 12 bytes, and one row more than steps.
    most = SMALL_MESSAGE_BYTES // 24 - 1
    assert chosen(most, 8) == "zmq"
    assert chosen(most + 1, 8) == ("ray" if name.endswith("_samples") else "zmq")
    if cls is DecentralizedAllReduce:
        assert chosen(5, 256, keep_local_weights_in_sync=False) == "zmq"
