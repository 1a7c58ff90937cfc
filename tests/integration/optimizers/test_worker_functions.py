"""A function of a strategy that fails in workers raises one error, with both transports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from fakes import make_optimizer, worker_config

from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.workers.errors import FunctionError, WorkersFailedError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]


class OfTheUser(PolicyOptimizer):
    """A user's strategy, which makes each worker run `function`."""

    name = "of_the_user"
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    timeout_s: float | None = None

    def step(self) -> StepResult:
        for worker in self.workers.up():
            self.calls.send(worker, self.function, *self.arguments, timeout_s=self.timeout_s)
        self.calls.first()
        return StepResult(0, 0, 0)


def works(worker: RolloutWorker) -> int:
    return worker.index


def divides_by_zero(worker: RolloutWorker) -> float:
    return 1.0 / (worker.index - worker.index)


def returns_a_lock(worker: RolloutWorker) -> Any:
    return threading.Lock()


def takes_an_argument(worker: RolloutWorker, argument: Any) -> int:
    return worker.index


def never_returns(worker: RolloutWorker) -> None:
    time.sleep(3600.0)


@pytest.fixture
def function_of_the_driver() -> Iterator[Callable[..., Any]]:
    """Returns a function of a module that only the driver can import."""
    module = sys.modules["only_in_the_driver"] = ModuleType("only_in_the_driver")
    exec("def sample_it(worker): return 1", vars(module))
    yield module.sample_it
    del sys.modules["only_in_the_driver"]


def make_strategy(pool: Callable[[WorkerConfig], WorkerSet], transport: str) -> OfTheUser:
    rollout = {"num_workers": 1, "transport": transport, "max_consecutive_failures": 2}
    made: OfTheUser = make_optimizer(OfTheUser, pool(worker_config(rollout=rollout)))
    made.workers.up()
    assert made.stats()["transport"] == transport
    return made


@pytest.fixture(params=["ray", "socket"])
def strategy(worker_pool: Pool, request: pytest.FixtureRequest) -> OfTheUser:
    return make_strategy(worker_pool, request.param)


def error_of(strategy: OfTheUser, function: Callable[..., Any]) -> str:
    """Returns the message of the error that a step raises. Checks that no failure of a worker was
    counted."""
    strategy.function = function
    with pytest.raises(FunctionError) as caught:
        strategy.step()
    faults = strategy.workers.faults
    assert set(faults.counts.values()) == {0}
    assert faults.num_restarts == 0
    message = str(caught.value)
    name = f"{function.__module__}.{function.__qualname__}"
    head = f"optimizer 'of_the_user': function {name} failed in worker 1 (policy 'A2CPolicy', "
    assert message.startswith(head + "environment 'Drift'): "), message
    return message


def test_exception_has_the_users_traceback(strategy: OfTheUser) -> None:
    message = error_of(strategy, divides_by_zero)
    assert "in divides_by_zero" in message
    assert "return 1.0 / (worker.index - worker.index)" in message
    assert message.endswith("ZeroDivisionError: float division by zero")


def test_function_that_cannot_be_encoded(strategy: OfTheUser) -> None:
    lock = threading.Lock()

    def holds_a_lock(worker: RolloutWorker) -> Any:
        return lock

    message = error_of(strategy, holds_a_lock)
    assert "the call cannot be pickled: TypeError: cannot pickle '_thread.lock'" in message


def test_function_that_a_worker_cannot_import(
    strategy: OfTheUser, function_of_the_driver: Callable[..., Any]
) -> None:
    message = error_of(strategy, function_of_the_driver)
    assert "the call cannot be unpickled in the worker" in message
    assert "No module named 'only_in_the_driver'" in message


def test_argument_that_a_worker_cannot_import(
    strategy: OfTheUser, function_of_the_driver: Callable[..., Any]
) -> None:
    # The argument is pickled by the name of its module, which only the driver can import.
    strategy.arguments = (function_of_the_driver,)
    message = error_of(strategy, takes_an_argument)
    assert "cannot be unpickled in the worker" in message
    assert "No module named 'only_in_the_driver'" in message


def test_value_that_cannot_be_pickled(strategy: OfTheUser) -> None:
    message = error_of(strategy, returns_a_lock)
    assert "its value cannot be pickled: TypeError(\"cannot pickle '_thread.lock' obj" in message
    assert "ray::" not in message


def test_worker_continues_after_an_error(strategy: OfTheUser) -> None:
    for function in (divides_by_zero, returns_a_lock):
        error_of(strategy, function)
    strategy.function = works
    strategy.step()
    assert strategy.workers.faults.num_restarts == 0


@pytest.mark.parametrize("transport", ["ray", "socket"])
def test_function_that_never_returns_ends_at_its_limit(ray_session: None, transport: str) -> None:
    strategy = make_strategy(WorkerSet, transport)
    strategy.function = never_returns
    strategy.timeout_s = 1.0
    try:
        with pytest.raises(WorkersFailedError) as caught:
            strategy.step()
    finally:
        strategy.workers.stop()
    message = str(caught.value)
    assert "2 calls to workers failed in a row" in message
    assert "optimizer 'of_the_user': function" in message
    assert ".never_returns failed in worker 1" in message
    assert "no answer and no progress for 1." in message
    counts = strategy.workers.faults.counts
    assert counts == {**dict.fromkeys(counts, 0), "hang": 2}
