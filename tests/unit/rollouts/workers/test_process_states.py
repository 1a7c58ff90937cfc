"""The states of a process: every transition of the diagram in `worker_handle.py`, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeWorkerSet, worker_config
from simulated_channel import none_ready, oldest_first

from polopt.common.faults import Fault
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.worker_handle import ProcessState, WorkerHandle

STARTING, UP, LEAVING, DOWN, REPLACED, REMOVED = ProcessState
ALLOWED = {
    (STARTING, UP),
    (STARTING, DOWN),
    (STARTING, REMOVED),
    (UP, STARTING),
    (UP, DOWN),
    (UP, REMOVED),
    (UP, LEAVING),
    (LEAVING, REPLACED),
    (LEAVING, REMOVED),
    (DOWN, STARTING),
    (DOWN, REPLACED),
    (DOWN, REMOVED),
}
GONE = Fault("death", "gone")


def made(num_workers: int, **options: Any) -> Any:
    """Returns a set of workers that are starting."""
    rollout = {"num_workers": num_workers, **options}
    return FakeWorkerSet(worker_config(rollout=rollout), up=False)


def states(workers: Any) -> list[ProcessState]:
    return [handle.state for handle in workers.remote]


def index_of(worker: Any) -> int:
    return int(worker.index)


def starts_fail_twice() -> None:
    workers = made(1, max_consecutive_failures=10)
    for number in range(2):
        starting = workers.remote[0]
        starting.channel.die(LostProcessError("killed while it starts"))
        workers.take_started(0.0)
        assert (starting.state, starting.removed) == (REPLACED, True)
        assert workers.restart_counts == {1: number + 1}
        assert states(workers) == [STARTING]
        workers.transport.script = none_ready  # the replacement has not answered yet
    workers.transport.script = oldest_first
    assert workers.up()[0].state is UP


def work_of_a_worker_that_dies_waits_for_its_replacement() -> None:
    workers = made(2, max_consecutive_failures=10)
    calls = Calls(workers, "test")
    one, _ = workers.up()
    calls.send(one, index_of)
    workers.transport.script = none_ready
    one.channel.die(LostProcessError("killed"))
    assert calls.next().failure is not None
    assert (one.state, states(workers)) == (REPLACED, [STARTING, UP])
    assert calls.num_work_of(workers.remote[0]) == 1
    workers.transport.script = oldest_first
    assert calls.first().value == 1
    assert states(workers) == [UP, UP]


def worker_that_fails_too_often_is_removed() -> None:
    workers = made(2, min_workers=1, max_consecutive_failures=2)
    one, two = workers.remote
    workers.take_started(0.0)
    replacement = workers.replace(one, GONE)
    workers.take_started(0.0)
    workers.faults.success(two.index)
    assert workers.replace(replacement, GONE) is None
    assert (one.state, replacement.state) == (REPLACED, REMOVED)
    assert workers.remote == [two]


def failure_that_ends_the_run_leaves_the_process_down() -> None:
    workers = made(2, max_consecutive_failures=1)
    one, two = workers.up()
    with pytest.raises(WorkersFailedError, match="1 calls to workers failed in a row"):
        workers.replace(one, GONE)
    assert states(workers) == [DOWN, UP]
    assert (one.up, one.removed) == (False, False)
    assert workers.stats()["num_healthy_workers"] == 1
    assert workers.up() == [two], "nothing is sent to a process that is down"
    assert workers.replace(one, GONE) is None, "its failure was counted once"
    assert workers.faults.counts["death"] == 1
    assert workers.reconfigure(workers.config)
    assert states(workers) == [STARTING, STARTING]
    workers.up()
    with pytest.raises(WorkersFailedError):
        workers.replace(one, GONE)
    workers.stop()
    assert (one.state, two.state) == (REMOVED, REMOVED)


def elastic_removal_of_a_worker_that_is_up_and_of_one_that_starts() -> None:
    workers = made(2)
    workers.up()
    workers.transport.script = none_ready
    [added] = workers.add_workers(1)
    one, two = workers.remote[:2]
    assert states(workers) == [UP, UP, STARTING]
    assert workers.remove_workers([2, 3]) == [2, 3]
    assert (two.state, added.state) == (REMOVED, REMOVED)
    assert workers.starting == {}
    assert (workers.remote, one.state) == ([one], UP)


def new_config_replaces_a_process_that_still_starts() -> None:
    workers = made(1)
    starting = workers.remote[0]
    workers.transport.script = none_ready
    assert workers.reconfigure(workers.config)
    assert starting.state is REPLACED
    assert not starting.channel.alive
    assert list(workers.starting.values()) == workers.remote != [starting]


def process_on_a_node_that_ends_leaves_once_its_work_has_come_back() -> None:
    workers = made(3)
    calls = Calls(workers, "test")
    one, two, _ = workers.up()
    for handle in (one, two):
        calls.send(handle, index_of)
    workers.transport.ending = {one.channel, two.channel}
    assert [handle.index for handle in workers.up()] == [3], "no new calls"
    assert (one.state, states(workers)) == (LEAVING, [STARTING, STARTING, UP])
    assert calls.first().value == 1
    assert (one.channel.alive, calls.num_pending) == (True, 1)
    assert calls.first().value == 2
    assert (one.state, one.channel.alive) == (REPLACED, False)
    assert (two.state, workers.leaving) == (LEAVING, [two])
    workers.stop()
    assert (two.state, two.channel.alive) == (REMOVED, False)
    assert workers.stats()["num_worker_preemptions"] == 2
    assert workers.stats()["num_remote_worker_restarts"] == 2
    assert workers.faults.last is None, "a preemption is no failure"


WALKS = [
    starts_fail_twice,
    work_of_a_worker_that_dies_waits_for_its_replacement,
    worker_that_fails_too_often_is_removed,
    failure_that_ends_the_run_leaves_the_process_down,
    elastic_removal_of_a_worker_that_is_up_and_of_one_that_starts,
    new_config_replaces_a_process_that_still_starts,
    process_on_a_node_that_ends_leaves_once_its_work_has_come_back,
]


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_walk(walk: Callable[[], None]) -> None:
    walk()


def test_walks_go_through_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    to = ProcessGroup._to

    def noted(group: Any, handle: WorkerHandle, state: ProcessState) -> None:
        seen.add((handle.state, state))
        to(group, handle, state)

    monkeypatch.setattr(ProcessGroup, "_to", noted)
    for walk in WALKS:
        walk()
    assert seen == ALLOWED


@pytest.mark.parametrize(("before", "after"), [*itertools.product(ProcessState, repeat=2)])
def test_other_transitions_raise(before: ProcessState, after: ProcessState) -> None:
    channel: Any = None
    handle = WorkerHandle(3, channel, state=before)
    if (before, after) in ALLOWED:
        handle.to(after)
        assert handle.state is after
        return
    message = f"worker 3 is {before.value}, and cannot be {after.value}"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        handle.to(after)
    assert handle.state is before
