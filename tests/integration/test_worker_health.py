"""Worker health: runs that start with some of their workers, workers that join and leave, and
workers that never start."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from fakes import FakeRay, FakeWorkerSet, in_order, install, make_optimizer, worker_config

from polopt.common.config import ConfigError
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.registry import OPTIMIZERS
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.workers import health as health_module
from polopt.rollouts.workers import worker_set as worker_set_module
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure, WorkersFailedError
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.placement import MAX_ARGUMENT_BYTES, actor_argument
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.presets import PRESETS

DEATH = ray.exceptions.ActorDiedError()
ALL = ["async_gradients", "sync_samples", "decentralized_allreduce"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return install(monkeypatch)


def make(num_workers: int = 3, **rollout: Any) -> FakeWorkerSet:
    return FakeWorkerSet(worker_config(rollout={"num_workers": num_workers, **rollout}), up=False)


def indices(workers: list[Any]) -> list[int]:
    return [worker.index for worker in workers]


# ---- workers that are up -----------------------------------------------------------------


def test_a_run_begins_with_min_workers_and_grows(fake: FakeRay) -> None:
    workers = make(3, min_workers=2)
    health = WorkerHealth(workers)
    fake.script = in_order([3, 1])  # a third answer is not waited for
    assert indices(health.up()) == [1, 3]
    assert workers.stats()["num_healthy_workers"] == 2
    assert indices(health.up()) == [1, 3], "no wait for the third"
    workers.remote[1].actor.finish()
    assert indices(health.up()) == [1, 2, 3]
    assert workers.stats()["num_healthy_workers"] == 3


def test_without_min_workers_waits_for_all_then_for_one(fake: FakeRay) -> None:
    workers = make(2)
    health = WorkerHealth(workers)
    assert indices(health.up()) == [1, 2]
    for worker in list(workers.remote):
        workers.replace(worker, WorkerFailure("death", worker.index, "gone"))
    assert workers.stats()["num_healthy_workers"] == 0
    fake.script = in_order([2])
    assert indices(health.up()) == [2]


def test_min_workers_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"min_workers.*got 3 with num_workers=2"):
        RolloutConfig.parse({"num_workers": 2, "min_workers": 3})


def test_trial_reserves_resources_for_min_workers() -> None:
    config = {"env": "CartPole-v1", "num_workers": 5, "min_workers": 2}
    assert len(PRESETS["A3C"].default_resource_request(config).bundles) == 1 + 2


def test_unplaced_workers_are_reported_at_growing_intervals(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = make(2, min_workers=1)
    unplaced = workers.remote[1]
    monkeypatch.setattr(health_module, "waits_for_resources", lambda worker: worker is unplaced)
    monkeypatch.setattr(health_module, "describe_resources", lambda rollout: "each needs 1000 CPUs")
    monkeypatch.setattr(health_module, "time", fake)
    for worker in workers.remote:
        worker.checked_s = fake.now_s
    health = WorkerHealth(workers)
    fake.script = in_order([1])
    health.up()
    assert not caplog.records
    for _ in range(30):
        fake.now_s += 1.0
        assert indices(health.up()) == [1]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "after 5 s, and after 15"
    assert messages[0] == messages[1]
    assert (
        "no resources yet for worker 2: each needs 1000 CPUs. The run continues without"
        in messages[0]
    )


# ---- failures in a row -------------------------------------------------------------------


def failures(log: FaultLog, *of_workers: int) -> None:
    for index in of_workers:
        log.failure(WorkerFailure("death", index, "gone"))


def test_death_of_all_at_once_counts_as_one_failure() -> None:
    log = FaultLog(max_consecutive_failures=3)
    for index in range(1, 9):
        log.success(index)
    failures(log, *range(1, 9))
    failures(log, 1)  # a replacement that does not come up
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


@pytest.mark.parametrize("min_workers", [None, 1])
def test_unrecoverable_worker_ends_the_run_or_is_given_up(
    fake: FakeRay, min_workers: int | None
) -> None:
    rollout = {"num_workers": 2, "min_workers": min_workers, "max_consecutive_failures": 4}
    workers = FakeWorkerSet(worker_config(rollout=rollout))
    start = workers._start

    def start_broken(index: int) -> Any:
        worker = start(index)
        worker.actor.next_error = DEATH
        return worker

    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=5)
    workers._start = start_broken  # type: ignore[method-assign]
    workers.remote[1].actor.next_error = DEATH
    if min_workers is None:
        with pytest.raises(WorkersFailedError, match=r"worker 2 failed 4 times(?s:.*)all of them"):
            optimizer.step()
        return
    for _ in range(2):
        assert optimizer.step().updates == 5
    assert indices(workers.remote) == [1]
    stats = workers.stats()
    assert (stats["num_worker_deaths"], stats["num_remote_worker_restarts"]) == (4, 3)
    assert stats["num_workers_given_up"] == 1


# ---- adding and removing -----------------------------------------------------------------


def test_calls_to_removed_workers_are_forgotten(fake: FakeRay) -> None:
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 3}))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=4)
    optimizer.step()
    actor = workers.remote[1].actor
    actor.finish()  # its call of `stop` ends
    assert workers.remove_workers([2]) == [2]
    assert not actor.alive
    assert len(optimizer.in_flight) == 2
    for _ in range(3):
        assert optimizer.step().updates == 4
    assert indices(workers.remote) == [1, 3]
    assert indices(workers.add_workers(2)) == [4, 5]
    for _ in range(3):
        assert optimizer.step().updates == 4
    assert len(optimizer.in_flight) == 4
    assert workers.stats()["num_remote_worker_restarts"] == 0


def test_impossible_additions_and_removals_are_refused(fake: FakeRay) -> None:
    workers = FakeWorkerSet(worker_config())
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"got {wrong}\. Allowed: 0 to 2"):
            workers.remove_workers(wrong)
    with pytest.raises(ValueError, match=r"got -1\. Allowed: 0 or more"):
        workers.add_workers(-1)
    with pytest.raises(KeyError):
        workers.remove_workers([1, 7])
    assert indices(workers.remote) == [1, 2], "an error removes none"
    optimizer = make_optimizer(SyncSamples, workers)
    assert workers.remove_workers(2) == [1, 2]
    with pytest.raises(WorkersFailedError, match="no workers remain"):
        optimizer.step()


def test_save_does_not_wait_for_starting_workers(fake: FakeRay) -> None:
    workers = make(2, min_workers=1)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=2)
    fake.script = lambda pending: next((ref for ref in pending if ref.index == 1), None)
    assert optimizer.step().updates == 2
    assert len(optimizer.in_flight) == 2, "the other call starts with its worker"
    optimizer.get_state()
    assert [worker.index for worker, _ in optimizer.in_flight.pending()] == [2]
    assert workers.faults.num_restarts == 0
    assert optimizer.step().updates == 2
    assert len(optimizer.in_flight) == 2, "one call per worker"


def test_unplaced_replacement_is_not_a_hang(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = make(2)  # without `min_workers` a run begins with both, and continues with one
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=2)
    optimizer.step()
    optimizer.in_flight.drop(workers.remote[1])
    workers.replace(workers.remote[1], WorkerFailure("death", 2, "gone"))
    monkeypatch.setattr(worker_set_module, "waits_for_resources", lambda worker: not worker.up)
    fake.script = lambda pending: next((ref for ref in pending if ref.index == 1), None)
    for _ in range(3):
        assert optimizer.step().updates == 2
        workers.remote[0].actor.finish()
        fake.now_s += 2.0 * workers.config.rollout.worker_startup_timeout_s
    assert workers.faults.counts["hang"] == 0
    assert workers.faults.num_restarts == 1


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
    # By default the slowest of three workers stops early; here every fragment is complete.
    complete = {"preemption_threshold": 1.0} if name == "decentralized_allreduce" else {}
    optimizer = make_optimizer(OPTIMIZERS.get(name), workers, **complete)
    optimizer.step()
    (added,) = workers.add_workers(1)
    step_until(optimizer, lambda: added.up)
    if name == "async_gradients":
        step_until(optimizer, lambda: optimizer.in_flight.count(added))
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
    monkeypatch.setattr(health_module, "CHECK_INTERVAL_S", 0.5)
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
        assert made.apply(lambda worker: setattr(worker, "mark", 1)) == {placed.index: None}
        optimizer.update_algorithm_parameter("lr", 0.25)
        (other,) = (worker for worker in made.remote if worker is not placed)
        made.remove_workers([placed.index])
        step_until(optimizer, lambda: other.up)  # the resources are free now
        assert made.apply(lambda worker: worker.policy.config.lr) == {other.index: 0.25}
        marked = made.apply(lambda worker: hasattr(worker, "mark"))
        assert marked == {other.index: False}, "no work waits for a worker"
        assert made.faults.num_restarts == 0
    finally:
        made.stop()


# ---- constructor arguments ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["a2c", "ppo"])
def test_constructor_arguments_are_small(policy: str, fake: FakeRay) -> None:
    network = {"fcnet_hiddens": (2048, 2048)}
    small = worker_config(policy, model=network)
    assert actor_argument(small) is small
    assert len(ray.cloudpickle.dumps((small, 1))) < 10_000


def test_large_config_is_stored_once_in_the_object_store(ray_session: None) -> None:
    data = b"x" * (10 * MAX_ARGUMENT_BYTES)
    rollout = {"num_workers": 1, "env_config": {"data": data}, "num_cpus_per_worker": 0.1}
    config = worker_config(rollout=rollout)
    argument = actor_argument(config)
    assert len(ray.cloudpickle.dumps(argument)) < 1000
    made = WorkerSet(config)
    try:
        optimizer = make_optimizer(SyncSamples, made)
        assert optimizer.step().updates > 0
    finally:
        made.stop()
