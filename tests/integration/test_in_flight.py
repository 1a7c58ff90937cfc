"""`InFlight`: order of arrivals, deadlines, and failures."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fakes import FakeRay, FakeWorkerProcess, Ref, in_order, install, none_ready, oldest_first

from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.transport.rpc_future import RpcFuture
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure, WorkersFailedError
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.remote_worker import RemoteWorker

TIMEOUT_S, STARTUP_S = 10.0, 50.0


def make_set(**options: Any) -> Any:
    """As much of a WorkerSet as `InFlight` knows."""
    limits = {"worker_timeout_s": TIMEOUT_S, "worker_startup_timeout_s": STARTUP_S, **options}
    config = RolloutConfig.parse({"env": "CartPole-v1", **limits})
    return SimpleNamespace(
        config=SimpleNamespace(rollout=config),
        faults=FaultLog(config.max_consecutive_failures),
        rpc=None,
        continues_without=lambda worker: False,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return install(monkeypatch)


@pytest.fixture
def calls(fake: FakeRay) -> InFlight:
    return InFlight(make_set())


def make_workers(count: int, answered_s: float | None = 1000.0) -> list[RemoteWorker]:
    return [RemoteWorker(i + 1, None, last_answer_s=answered_s) for i in range(count)]


def launch(calls: InFlight, worker: RemoteWorker, tag: Any = None, **options: Any) -> Ref:
    ref = Ref(value=tag, index=worker.index)
    calls.launch(worker, ref, tag, **options)
    return ref


def test_first_ready_is_served_first(fake: FakeRay, calls: InFlight) -> None:
    for worker in make_workers(3):
        launch(calls, worker, f"of {worker.index}")
    fake.script = in_order([3, 1, 2])
    arrivals = [calls.wait() for _ in range(3)]
    assert [a.worker.index for a in arrivals] == [3, 1, 2]
    assert [a.tag for a in arrivals] == [a.value for a in arrivals] == ["of 3", "of 1", "of 2"]
    assert len(calls) == 0


def test_ready_workers_are_served_in_turn(calls: InFlight) -> None:
    for worker in make_workers(3):
        launch(calls, worker).done = True
    served: Counter[int] = Counter()
    for _ in range(30):
        arrival = calls.wait()
        served[arrival.worker.index] += 1
        launch(calls, arrival.worker).done = True
    assert served == {1: 10, 2: 10, 3: 10}


def test_waiting_for_nothing_is_an_error(calls: InFlight) -> None:
    with pytest.raises(RuntimeError, match="no call is pending"):
        calls.wait()
    assert not calls.any_ready()


def test_no_answer_within_the_limit_is_a_hang(fake: FakeRay, calls: InFlight) -> None:
    worker, other = make_workers(2)
    launch(calls, worker, "slow")
    fake.now_s += 1.0
    launch(calls, other, "later")
    fake.script = none_ready
    arrival = calls.wait()
    assert (arrival.worker, arrival.tag) == (worker, "slow")
    assert arrival.failure is not None
    assert arrival.failure.kind == "hang"
    assert fake.now_s == 1000.0 + TIMEOUT_S
    assert calls.tags() == ["later"], "another worker's call has nothing to do with it"


def test_first_call_has_the_startup_limit(fake: FakeRay, calls: InFlight) -> None:
    (worker,) = make_workers(1, answered_s=None)
    launch(calls, worker)
    fake.script = none_ready
    assert calls.wait().failure is not None
    assert fake.now_s == 1000.0 + STARTUP_S


def test_a_hang_is_found_while_others_are_always_ready(fake: FakeRay, calls: InFlight) -> None:
    quick, stuck = make_workers(2)
    launch(calls, stuck)
    for _ in range(100):
        launch(calls, quick).done = True
        fake.now_s += 1.0
        arrival = calls.wait()
        if arrival.failure is not None:
            break
    assert arrival.worker is stuck
    assert fake.now_s <= 1000.0 + TIMEOUT_S + 1.0


def test_call_that_ended_while_the_driver_was_busy_is_no_hang(
    fake: FakeRay, calls: InFlight
) -> None:
    for worker in make_workers(2):
        for tag in ("first", "second"):
            launch(calls, worker, tag).done = True
    fake.now_s += 100.0 * TIMEOUT_S
    assert calls.any_ready()
    assert all(calls.wait().failure is None for _ in range(4))


def test_rpc_answer_that_waits_for_a_busy_driver_is_no_hang(fake: FakeRay) -> None:
    workers = make_set()
    calls = InFlight(workers)
    taken, waiting = (RpcFuture("ping", Future()) for _ in range(2))
    workers.rpc = SimpleNamespace(poll=lambda timeout_s: waiting.set_value("at the socket"))
    for worker, future in zip(make_workers(2), (taken, waiting), strict=True):
        calls.launch(worker, future)
    fake.now_s += 100.0 * TIMEOUT_S
    taken.set_value("taken")
    arrivals = [calls.wait() for _ in range(2)]
    assert [arrival.value for arrival in arrivals] == ["taken", "at the socket"]


def test_queued_call_behind_an_ended_one_is_no_hang(fake: FakeRay, calls: InFlight) -> None:
    (worker,) = make_workers(1)
    launch(calls, worker, "first").done = True
    second = launch(calls, worker, "second")
    fake.now_s += 2.0 * TIMEOUT_S
    assert calls.wait().tag == "first"
    fake.now_s += 0.9 * TIMEOUT_S  # its time began when the first was seen to have ended
    second.done = True
    assert calls.wait().failure is None


def test_extra_timeout_and_shorter_deadline(fake: FakeRay, calls: InFlight) -> None:
    unchanged, tightened = make_workers(2)
    launch(calls, unchanged, extra_timeout_s=5.0)
    launch(calls, tightened, extra_timeout_s=5.0)
    calls.tighten_deadline(tightened, 2.0)
    calls.tighten_deadline(tightened, 3.0)  # a later limit changes nothing
    fake.script = none_ready
    assert calls.wait().worker is tightened
    assert fake.now_s == 1002.0
    assert calls.wait().worker is unchanged
    assert fake.now_s == 1000.0 + TIMEOUT_S + 5.0


def test_a_failed_workers_other_calls_are_lost_with_it(fake: FakeRay, calls: InFlight) -> None:
    worker, other = make_workers(2)
    failing = launch(calls, worker, "a")
    failing.error = ray.exceptions.ActorDiedError()
    launch(calls, worker, "b")
    launch(calls, other, "c")
    launch(calls, worker, "d")
    arrival = calls.wait()
    assert arrival.tag == "a"
    assert arrival.lost_tags == ("b", "d")
    assert arrival.value is None
    assert calls.tags() == ["c"]
    assert calls.count(worker) == 0


def test_too_many_failures_in_a_row_end_with_one_error(fake: FakeRay) -> None:
    workers = make_set(max_consecutive_failures=3)
    failure = WorkerFailure("exception", 2, "Traceback ...\nValueError: the env is broken")
    workers.faults.failure(failure)
    workers.faults.failure(failure)
    calls = InFlight(workers)
    launch(calls, make_workers(1)[0]).done = True
    calls.wait()  # one success: counting starts again
    workers.faults.failure(failure)
    workers.faults.failure(failure)
    with pytest.raises(WorkersFailedError, match=r"3 calls.* in a row(?s:.*)the env is broken"):
        workers.faults.failure(failure)
    assert workers.faults.counts["exception"] == 5


def test_poll_for_ready_calls_ends_none(fake: FakeRay, calls: InFlight) -> None:
    fake.script = oldest_first
    (worker,) = make_workers(1)
    ref = launch(calls, worker)
    assert not calls.any_ready()
    ref.done = True
    assert calls.any_ready()
    assert len(calls) == 1


def test_gather_is_in_worker_order_and_replaces(fake: FakeRay) -> None:
    workers = make_set()
    calls = InFlight(workers)
    replaced: list[int] = []
    workers.replace = lambda worker, failure: replaced.append(worker.index)
    made = make_workers(3)
    for worker in made:
        launch(calls, worker, f"of {worker.index}")
    launch(calls, made[1]).error = ray.exceptions.ActorDiedError()
    fake.script = in_order([3, 2, 1, 2])
    assert list(calls.gather().items()) == [(1, "of 1"), (2, "of 2"), (3, "of 3")]
    assert replaced == [2]
    assert len(calls) == 0


# ---- with processes ----------------------------------------------------------------------


@pytest.fixture
def processes(ray_session: None) -> list[RemoteWorker]:
    actor_class = ray.remote(num_cpus=0)(FakeWorkerProcess)
    made = [RemoteWorker(i, actor_class.remote()) for i in (1, 2)]
    ray.get([worker.actor.pid.remote() for worker in made])
    return made


def test_exception_hang_and_death_of_a_process(processes: list[RemoteWorker]) -> None:
    calls = InFlight(make_set(worker_timeout_s=10.0))
    killed, asleep = processes
    calls.launch(killed, killed.actor.pid.remote())
    pid = calls.wait().value

    calls.launch(asleep, asleep.actor.fail.remote())
    failure = calls.wait().failure
    assert failure is not None
    assert (failure.kind, failure.worker_index) == ("exception", 2)
    assert "in fail" in failure.message, "the worker's traceback"
    assert "expected failure" in failure.message

    calls.launch(killed, killed.actor.sleep.remote(600.0), "killed")
    calls.launch(asleep, asleep.actor.pid.remote(), "awake")
    assert calls.wait().tag == "awake"
    started_s = time.monotonic()
    calls.launch(asleep, asleep.actor.sleep.remote(600.0), "asleep")
    os.kill(pid, signal.SIGKILL)
    kinds = {a.tag: a.failure.kind for a in (calls.wait(), calls.wait()) if a.failure}
    assert kinds == {"killed": "death", "asleep": "hang"}
    assert time.monotonic() - started_s > 9.9
    ray.kill(asleep.actor)
