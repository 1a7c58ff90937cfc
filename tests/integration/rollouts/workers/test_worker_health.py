"""Tests runs that begin with only some of their workers, workers that join and leave, and workers
that never start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from fakes import (
    FakeTransport,
    FakeWorkerSet,
    in_order,
    make_optimizer,
    of_worker,
    worker_config,
)
from simulated_channel import oldest_first
from toy_envs import Drift

from polopt.common.config import ConfigError
from polopt.common.faults import Fault
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.transport.ray_channel import MAX_ARGUMENT_BYTES
from polopt.rollouts.workers import process_group
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.fault_log import FaultLog
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.presets import PRESETS

DEATH = LostProcessError("the process died")
ALL = ["async_gradients", "sync_samples", "decentralized_allreduce"]


STARTUP_S = 50.0


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def make(fake: FakeTransport) -> Callable[..., FakeWorkerSet]:
    def build(num_workers: int = 2, up: bool = False, **rollout: Any) -> FakeWorkerSet:
        limits = {"num_workers": num_workers, "worker_startup_timeout_s": STARTUP_S}
        return FakeWorkerSet(worker_config(rollout={**limits, **rollout}), fake, up=up)

    return build


def indices(workers: list[Any]) -> list[int]:
    return [worker.index for worker in workers]


# ---- workers that are up -----------------------------------------------------------------


def test_a_run_begins_with_min_workers_and_grows(fake: FakeTransport, make: Any) -> None:
    workers = make(3, min_workers=2)
    fake.script = in_order([3, 1])  # the script fails if the driver waits for a third answer
    assert indices(workers.up()) == [1, 3]
    assert workers.stats()["num_healthy_workers"] == 2
    assert indices(workers.up()) == [1, 3], "the driver does not wait for the third answer"
    workers.remote[1].channel.finish()
    assert indices(workers.up()) == [1, 2, 3]
    assert workers.stats()["num_healthy_workers"] == 3


def test_without_min_workers_waits_for_all_then_for_one(fake: FakeTransport, make: Any) -> None:
    workers = make(2)
    assert indices(workers.up()) == [1, 2]
    for worker in list(workers.remote):
        workers.replace(worker, Fault("death", "gone"))
    assert workers.stats()["num_healthy_workers"] == 0
    fake.script = in_order([2])
    assert indices(workers.up()) == [2]


def test_without_remote_workers_the_local_worker_is_up(make: Any) -> None:
    workers = make(0)
    assert workers.up() == [workers.here]


def test_min_workers_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"min_workers.*got 3 with num_workers=2"):
        RolloutConfig.parse({"num_workers": 2, "min_workers": 3})


def test_trial_reserves_resources_for_min_workers() -> None:
    config = {"env": "CartPole-v1", "num_workers": 5, "min_workers": 2}
    assert len(PRESETS["A3C"].default_resource_request(config).bundles) == 1 + 2


def test_unplaced_workers_are_reported_at_growing_intervals(
    fake: FakeTransport, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workers = make(2, min_workers=1)
    fake.unplaced = {"worker 2"}
    fake.cluster = {"CPU": 0.25}
    fake.script = of_worker(1)
    workers.up()
    assert not caplog.records
    for _ in range(30):
        fake.clock.now_s += 1.0
        assert indices(workers.up()) == [1]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "the first after 5 s, the second after 15 s"
    assert messages[0] == messages[1]
    assert messages[0] == (
        "Ray has no resources yet for worker 2: each needs CPU 0.5 (the cluster has 0.25, of which "
        "0.25 are free). The run continues without them."
    )


def test_slow_start_is_not_called_a_lack_of_resources(
    fake: FakeTransport, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workers = make(3, min_workers=1)
    fake.unplaced = {"worker 3"}
    fake.script = of_worker(1)
    for _ in range(20):
        assert indices(workers.up()) == [1]
        fake.clock.now_s += 1.0
    assert {"no resources yet for worker 3:" in line for line in caplog.messages} == {True}


def test_warning_tells_how_many_workers_lack_resources(
    fake: FakeTransport, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If several workers have no process, Ray does not report which of these workers have
    resources."""
    workers = make(4, min_workers=1)
    fake.unplaced, fake.lacking = {"worker 2", "worker 3", "worker 4"}, 1
    fake.script = of_worker(1)
    for _ in range(20):
        assert indices(workers.up()) == [1]
        fake.clock.now_s += 1.0
    assert {"no resources yet for 1 of workers 2, 3, 4:" in line for line in caplog.messages} == {
        True
    }


def test_a_start_may_take_as_long_as_others_come_up(fake: FakeTransport, make: Any) -> None:
    workers = make(5, min_workers=1)
    for index in range(1, 5):
        fake.clock.now_s += 0.9 * STARTUP_S
        workers.remote[index - 1].channel.finish()
        assert indices(workers.up()) == list(range(1, index + 1))
    assert workers.faults.num_restarts == 0, "the fifth worker has taken 3.6 times the limit"
    fake.clock.now_s += 1.1 * STARTUP_S
    workers.up()
    assert workers.faults.counts["hang"] == 1
    assert workers.faults.last is not None
    # The fifth worker has waited for four starts of 45 s, and then for 55 s.
    assert (
        workers.faults.last.message
        == "no answer for 235.0 s: the start or a set-up call has not ended"
    )


def test_wait_for_resources_is_limited_if_the_run_needs_the_worker(
    fake: FakeTransport, make: Any
) -> None:
    workers = make(2, max_consecutive_failures=1)
    fake.unplaced = {"worker 2"}
    fake.script = of_worker(1)
    with pytest.raises(WorkersFailedError, match=r"did not place the process: each needs CPU 0\.5"):
        workers.up()
    assert fake.clock.now_s >= 1000.0 + STARTUP_S


def test_set_up_calls_run_before_a_worker_is_up(fake: FakeTransport, make: Any) -> None:
    workers = make(2)
    workers.remote[0].channel.finish()
    workers.remote[1].set_up.append((mark, (1,)))
    workers.remote[1].set_up.append((mark, (2,)))
    assert indices(workers.up()) == [1, 2]
    assert workers.channels[1].calls == [("mark", (1,)), ("mark", (2,))]
    assert [channel.target.state for channel in workers.channels] == [{}, {"mark": 2}]


def test_worker_whose_set_up_fails_is_replaced(fake: FakeTransport, make: Any) -> None:
    workers = make(2, min_workers=1)
    fake.script = of_worker(1)
    workers.up()
    workers.faults.success(1)
    workers.remote[1].set_up.append((getattr, ("no_such_attribute",)))
    fake.script = oldest_first
    while not workers.remote[1].up:
        workers.take_started(1.0)
    assert workers.faults.num_restarts == 1
    assert "no_such_attribute" in workers.stats()["last_exception"]


def mark(worker: Any, value: int) -> None:
    worker.state["mark"] = value


# ---- failures in a row -------------------------------------------------------------------


def failures(log: FaultLog, *of_workers: int) -> None:
    for index in of_workers:
        log.failure(index, Fault("death", "gone"))


def test_death_of_all_at_once_counts_as_one_failure() -> None:
    log = FaultLog(max_consecutive_failures=3)
    for index in range(1, 9):
        log.success(index)
    failures(log, *range(1, 9))
    failures(log, 1)  # the failure of a replacement that did not come up
    with pytest.raises(WorkersFailedError, match="3 calls to workers failed in a row"):
        failures(log, 2)
    assert log.counts["death"] == 10
    with pytest.raises(WorkersFailedError):
        failures(FaultLog(max_consecutive_failures=1), 1)


def test_worker_that_always_fails_is_unrecoverable() -> None:
    log = FaultLog(max_consecutive_failures=3)
    for _ in range(2):
        log.success(1)
        failures(log, 2)
    assert not log.is_unrecoverable(2)
    log.success(1)
    failures(log, 2)
    assert log.is_unrecoverable(2)
    log.success(2)
    assert not log.is_unrecoverable(2)


def test_environment_failures_are_counted_up_to_the_next_fragment() -> None:
    log = FaultLog(max_consecutive_failures=2)
    failure = Fault("environment", "it fell")
    log.success(1)
    log.failure(1, failure)
    log.success(1)  # of a call that did not sample
    message = "environments failed in 2 calls to workers, and no call sampled in between"
    with pytest.raises(WorkersFailedError, match=message):
        log.failure(1, failure)


@pytest.mark.parametrize("min_workers", [None, 1])
def test_unrecoverable_worker_ends_the_run_or_is_given_up(
    fake: FakeTransport, min_workers: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenReplacements(FakeWorkerSet):
        """A worker set in which the first call of each replacement fails."""

        def _start(self, index: int) -> Any:
            worker = super()._start(index)
            if len(self.channels) > 2:
                worker.channel.next_error = DEATH
            return worker

    rollout = {"num_workers": 2, "min_workers": min_workers, "max_consecutive_failures": 4}
    workers = BrokenReplacements(worker_config(rollout=rollout), fake)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=5)
    workers.remote[1].channel.next_error = DEATH
    if min_workers is None:
        with pytest.raises(WorkersFailedError, match=r"worker 2 failed 4 times(?s:.*)all workers"):
            optimizer.step()
        return
    for _ in range(2):
        assert optimizer.step().updates == 5
    assert indices(workers.remote) == [1]
    stats = workers.stats()
    assert (stats["num_worker_deaths"], stats["num_remote_worker_restarts"]) == (4, 3)
    assert stats["num_workers_given_up"] == 1
    first, *_, last, given_up = [line for line in caplog.messages if "worker 2" in line]
    assert first == "worker 2 failed (death) and is replaced. the process died"
    assert last == "worker 2 failed (death). the process died"
    assert "The run continues without this process" in given_up


# ---- adding and removing -----------------------------------------------------------------


def test_calls_to_removed_workers_are_forgotten(make: Any) -> None:
    workers = make(3, up=True)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=4)
    optimizer.step()
    channel = workers.remote[1].channel
    channel.finish()  # the call of `stop` in this worker ends
    assert workers.remove_workers([2]) == [2]
    assert not channel.alive
    for _ in range(3):
        assert optimizer.step().updates == 4
    assert optimizer.calls.num_pending == 2
    assert indices(workers.remote) == [1, 3]
    assert indices(workers.add_workers(2)) == [4, 5]
    for _ in range(3):
        assert optimizer.step().updates == 4
    assert optimizer.calls.num_pending == 4
    assert workers.stats()["num_remote_worker_restarts"] == 0


def test_impossible_additions_and_removals_are_refused(make: Any) -> None:
    workers = make(2, up=True)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"got {wrong}\. Allowed: 0 to 2"):
            workers.remove_workers(wrong)
    with pytest.raises(ValueError, match=r"got -1\. Allowed: 0 or more"):
        workers.add_workers(-1)
    with pytest.raises(KeyError):
        workers.remove_workers([1, 7])
    assert indices(workers.remote) == [1, 2], "an error removes no worker"
    optimizer = make_optimizer(SyncSamples, workers)
    assert workers.remove_workers(2) == [1, 2]
    with pytest.raises(WorkersFailedError, match="no workers remain"):
        optimizer.step()


def test_save_does_not_wait_for_starting_workers(fake: FakeTransport, make: Any) -> None:
    workers = make(2, min_workers=1)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=2)
    fake.script = of_worker(1)
    assert optimizer.step().updates == 2
    assert optimizer.calls.num_pending == 1
    optimizer.get_state()
    assert optimizer.calls.num_pending == 0
    assert workers.faults.num_restarts == 0
    assert optimizer.step().updates == 2
    assert workers.channels[1].calls == [], "no call waits for the starting worker"


def test_unplaced_replacement_is_not_a_hang(fake: FakeTransport, make: Any) -> None:
    # Without `min_workers`, the run begins when both workers are up. Later, one worker suffices.
    workers = make(2)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=2)
    optimizer.step()
    workers.remote[1].channel.next_error = DEATH
    fake.unplaced = {"worker 2"}
    while workers.faults.num_restarts == 0:
        optimizer.step()
    fake.script = of_worker(1)
    for _ in range(3):
        assert optimizer.step().updates == 2
        workers.remote[0].channel.finish()
        fake.clock.now_s += 2.0 * STARTUP_S
    assert workers.faults.counts["hang"] == 0
    assert workers.faults.num_restarts == 1


def test_another_config_keeps_processes_that_have_started(make: Any) -> None:
    workers = make(2, min_workers=1)
    workers.remote[0].channel.finish()
    assert workers.reconfigure(workers.config)
    assert [worker.channel for worker in workers.remote] == [
        workers.channels[0],
        workers.channels[2],
    ]


def test_another_config_does_not_wait_for_an_unplaced_worker(
    fake: FakeTransport, make: Any
) -> None:
    workers = make(2, min_workers=1)
    fake.unplaced = {"worker 2"}
    fake.script = of_worker(1)
    workers.up()
    unplaced = workers.remote[1].channel
    config = worker_config(
        rollout={**workers.config.rollout.to_dict(), "env": Drift, "rollout_fragment_length": 7}
    )
    began_s = fake.clock.now_s
    assert workers.reconfigure(config)
    assert fake.clock.now_s == began_s
    assert not unplaced.alive, "another process starts with the new config"
    assert indices(workers.up()) == [1]
    optimizer = make_optimizer(SyncSamples, workers)
    assert optimizer.step().env_steps_sampled == 2 * 7
    fake.script = oldest_first
    fake.unplaced = set()
    while not workers.remote[1].up:
        workers.take_started(1.0)
    assert optimizer.step().env_steps_sampled == 2 * 2 * 7


# ---- with processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[WorkerSet]:
    made = WorkerSet(worker_config("ppo", rollout={"num_workers": 2, "num_cpus_per_worker": 0.1}))
    yield made
    made.stop()


def step_until(optimizer: Any, condition: Any) -> None:
    deadline_s = time.monotonic() + 120.0
    while not condition():
        assert optimizer.step().updates >= 0
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("name", ALL)
def test_workers_are_added_and_removed_during_a_run(workers: WorkerSet, name: str) -> None:
    before = indices(workers.remote)
    # By default, the fragment of the slowest of three workers ends early. With this option, every
    # fragment is complete.
    complete = {"fraction_workers": 1.0} if name == "decentralized_allreduce" else {}
    optimizer = make_optimizer(OPTIMIZERS.get(name), workers, **complete)
    optimizer.step()
    (added,) = workers.add_workers(1)
    step_until(optimizer, lambda: added.up)
    if name == "async_gradients":
        step_until(optimizer, lambda: optimizer.calls.num_calls_of(added))
    else:
        optimizer.step()
        assert optimizer.step().env_steps_trained == 3 * 10
    optimizer.drain()
    assert workers.remove_workers([before[0]]) == before[:1]
    for _ in range(2):
        optimizer.step()
    if isinstance(optimizer, DecentralizedAllReduce):
        assert optimizer.group.ranks == workers.remote
        assert optimizer.num_broken_rounds == 0
    if name != "async_gradients":
        assert optimizer.step().env_steps_trained == 2 * 10
    assert indices(workers.remote) == [before[1], added.index]
    stats = workers.stats()
    assert stats["num_healthy_workers"] == 2
    assert stats["num_remote_worker_restarts"] == 0
    optimizer.drain()
    optimizer.stop()


@pytest.mark.parametrize(
    ("cls", "options"), [(SyncSamples, {}), (AsyncGradients, {"grads_per_step": 1})]
)
def test_missing_resources_are_named_and_used_once_available(
    ray_session: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cls: Any,
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(process_group, "CHECK_INTERVAL_S", 0.5)
    needs = {"custom_resources_per_worker": {"seat": 5.0}, "num_cpus_per_worker": 0.1}
    made = WorkerSet(worker_config(rollout={"num_workers": 2, "min_workers": 1, **needs}))
    try:
        optimizer = make_optimizer(cls, made, **options)
        with caplog.at_level(logging.WARNING, "polopt"):
            step_until(optimizer, lambda: "continues without" in caplog.text)
        message = caplog.records[-1].getMessage()
        assert "Ray has no resources yet for worker" in message
        assert "each needs CPU 0.1 (the cluster has 32, of which" in message
        assert "seat 5 (the cluster has 8, of which 3 are free)" in message
        assert "The run continues without them." in message
        assert optimizer.step().env_steps_trained == 10
        assert made.stats()["num_healthy_workers"] == 1
        placed = next(worker for worker in made.remote if worker.up)
        assert foreach_worker(made, setattr, "mark", 1) == {placed.index: None}
        optimizer.update_algorithm_parameter("lr", 0.25)
        (other,) = (worker for worker in made.remote if worker is not placed)
        made.remove_workers([placed.index])
        step_until(optimizer, lambda: other.up)  # the resources are free now
        assert foreach_worker(made, lambda worker: worker.policy.config.lr) == {other.index: 0.25}
        marked = foreach_worker(made, hasattr, "mark")
        assert marked == {other.index: False}, "calls do not wait for the starting worker"
        assert made.faults.num_restarts == 0
    finally:
        made.stop()


# ---- constructor arguments ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["a2c", "ppo"])
def test_constructor_arguments_are_small(policy: str) -> None:
    network = {"fcnet_hiddens": (2048, 2048)}
    small = worker_config(policy, model=network)
    assert len(ray.cloudpickle.dumps((small, 1))) < 10_000


def test_large_config_is_stored_once_in_the_object_store(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    data = b"x" * (10 * MAX_ARGUMENT_BYTES)
    rollout = {"num_workers": 2, "env_config": {"data": data}, "num_cpus_per_worker": 0.1}
    made = WorkerSet(worker_config(rollout=rollout))
    try:
        optimizer = make_optimizer(SyncSamples, made)
        assert optimizer.step().updates > 0
        assert stored == [made.config_of(1)], "one object for both workers"
    finally:
        made.stop()
