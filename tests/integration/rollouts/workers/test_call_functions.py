"""Functions that workers run: which are the same, which cannot be sent, and how they fail."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeTransport
from worker_calls import calls_for, echo, fail, fail_if, version_of

from polopt.rollouts.workers.calls import (
    WEIGHTS,
    Calls,
)
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def make(fake: FakeTransport) -> Callable[..., Any]:
    return functools.partial(calls_for, fake)


def run(calls: Calls, worker: WorkerHandle, fn: Callable[..., Any]) -> Any:
    """Calls a function in a worker, and returns its value."""
    calls.send(worker, fn)
    return calls.first().value


def message_of(calls: Calls, worker: WorkerHandle, fn: Callable[..., Any]) -> str:
    """Calls a function in a worker, and returns the message of the error that ends the run."""
    with pytest.raises(FunctionError) as caught:
        run(calls, worker, fn)
    return str(caught.value)


def test_function_that_never_succeeded_is_one_error(make: Any) -> None:
    workers, calls = make(3)
    message = message_of(calls, workers.remote[1], fail)
    head = r"test: function \S*worker_calls\.fail failed in worker 2 \(policy 'A2CPolicy', "
    assert re.match(head + r"environment 'Drift'\): ValueError: expected failure\n", message)
    assert message.endswith("ValueError: expected failure")
    assert "in fail" in message
    assert "call_runner.py" not in message, "the traceback begins in the user's code"
    stats = workers.stats()
    assert stats["num_remote_worker_restarts"] == stats["num_worker_exceptions"] == 0
    assert stats["num_worker_deaths"] == 0


def test_worker_is_replaced_if_a_function_fails_after_a_success(make: Any) -> None:
    workers, calls = make(2, after_failure="drop")
    one, two = workers.remote
    calls.send(one, fail_if, False)
    calls.first()
    calls.send(two, fail_if, True)
    reply = calls.next()
    assert reply.failure is not None
    assert reply.failure.kind == "exception"
    assert "ValueError: expected failure" in reply.failure.message
    assert workers.remote[1] is not two
    message_of(calls, one, fail)


def test_two_lambdas_are_different_functions(make: Any) -> None:
    workers, calls = make(1)
    (worker,) = workers.remote
    assert run(calls, worker, lambda worker: 1) == 1
    assert "ZeroDivisionError" in message_of(calls, worker, lambda worker: 1 / 0)


class FailsIf:
    """A callable object that may fail."""

    def __init__(self, failing: bool) -> None:
        self.failing = failing

    def __call__(self, worker: RolloutWorker) -> None:
        fail_if(worker, self.failing)


@pytest.mark.parametrize(
    "function", [lambda failing: functools.partial(fail_if, fails=failing), FailsIf]
)
def test_partials_and_objects_count_as_their_function(make: Any, function: Any) -> None:
    workers, calls = make(1, after_failure="drop")
    (worker,) = workers.remote
    run(calls, worker, function(False))
    calls.send(worker, function(True))
    assert "ValueError: expected failure" in calls.next().failure.message


def test_each_call_carries_the_current_values_of_a_closure(make: Any) -> None:
    workers, calls = make(1)
    value = 1

    def current(worker: RolloutWorker) -> int:
        return value

    assert run(calls, workers.remote[0], current) == 1
    value = 2
    assert run(calls, workers.remote[0], current) == 2


def test_call_that_cannot_be_pickled_names_function(make: Any) -> None:
    workers, calls = make(1)
    (worker,) = workers.remote
    lock = threading.Lock()

    def holds_a_lock(worker: RolloutWorker) -> Any:
        return lock

    message = message_of(calls, worker, holds_a_lock)
    assert "holds_a_lock failed in worker 1" in message
    assert "the call cannot be pickled: TypeError: cannot pickle '_thread.lock'" in message
    assert workers.faults.num_restarts == 0

    def has_weights(worker: RolloutWorker, weights: Any) -> bool:
        return weights is not None and holds is None

    holds: Any = lock
    with pytest.raises(FunctionError):
        calls.send(worker, has_weights, WEIGHTS)
    holds = None  # as a user who runs the cell of a notebook again
    calls.send(worker, has_weights, WEIGHTS)
    assert calls.first().value


def test_partial_and_callable_object_are_functions(make: Any) -> None:
    class Adder:
        def __call__(self, worker: RolloutWorker, value: int) -> int:
            return value + 1

    workers, calls = make(1)
    for fn in (functools.partial(echo, value=1), functools.partial(Adder(), value=0)):
        assert run(calls, workers.remote[0], fn) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "NoneType"),
        ("done", "str"),
        ((1, 2, 3), "tuple"),
    ],
)
def test_odd_answer_is_the_workers_failure(make: Any, answer: Any, said: str) -> None:
    workers, calls = make(2)
    odd, good = workers.remote
    odd.channel.target.run = lambda *args: answer
    calls.fill(version_of, workers.remote)
    reply = calls.next()
    assert reply.failure is not None
    assert (reply.failure.kind, reply.worker) == ("exception", odd)
    assert f"its answer cannot be used: it is {said}" in reply.failure.message
    assert calls.first().worker is good
    assert calls.first().worker is workers.remote[0], "the replacement answers correctly"


@pytest.mark.parametrize("part", ["record", "error"])
def test_odd_part_of_an_answer_is_the_workers_failure(make: Any, part: str) -> None:
    workers, calls = make(1)
    run = workers.channels[0].target.run
    workers.channels[0].target.run = lambda *args: run(*args)._replace(**{part: "odd"})
    calls.fill(version_of, workers.remote)
    said = {"record": "it is Answer", "error": "its error is str"}[part]
    assert f"its answer cannot be used: {said}" in calls.next().failure.message


def test_value_that_the_owner_cannot_use_is_the_workers_failure(make: Any) -> None:
    def check(value: Any) -> None:
        if value is None:
            raise TypeError("a number was expected; got None")

    workers, calls = make(1, check=check, after_failure="drop")
    calls.send(workers.remote[0], echo, None)
    reply = calls.next()
    assert reply.failure is not None
    said = "its answer cannot be used: TypeError: a number was expected; got None"
    assert said in reply.failure.message
    assert workers.faults.counts["exception"] == 1
