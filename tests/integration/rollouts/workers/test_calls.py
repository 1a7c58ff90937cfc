"""`Calls`: order of replies, limits, failures, and work for workers that are not up."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeTransport, FakeWorkerSet, in_order, of_worker
from faulty_envs import Spoiled, num_faults
from simulated_channel import none_ready, oldest_first
from worker_calls import STARTUP_S, TIMEOUT_S, calls_for, echo, fail, fail_if, version_of

from polopt.common.faults import Fault
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.calls import (
    START_CHECK_S,
    WEIGHTS,
    Calls,
    CallsInterrupted,
    CallsLostError,
    Reply,
)
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.errors import NonFiniteError, WorkersFailedError
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSpec

DEATH = LostProcessError("the process died")
RULES = ["send again", "reassign", "drop"]
every_rule = pytest.mark.parametrize("rule", RULES)


# ---- functions that run in workers -------------------------------------------------------------


def fail_in(worker: RolloutWorker, index: int) -> None:
    if worker.index == index:
        raise ValueError("expected failure")


# ---- fakes -------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def make(fake: FakeTransport) -> Callable[..., Any]:
    return functools.partial(calls_for, fake)


def update(workers: FakeWorkerSet, count: int = 1) -> None:
    """Makes `count` updates of the driver's weights."""
    policy = workers.local.policy
    for _ in range(count):
        policy.flat.grads.fill_(0.1)
        policy.apply_flat()


def values(replies: list[Reply]) -> list[Any]:
    return [reply.value for reply in replies]


# ---- order -------------------------------------------------------------------------------------


def test_first_is_in_order_of_arrival(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(3)
    for worker in workers.remote:
        calls.send(worker, echo, worker.index, tag=f"of {worker.index}")
    fake.script = in_order([3, 1, 2])
    replies = [calls.first() for _ in range(3)]
    assert [(r.worker.index, r.value) for r in replies] == [(3, 3), (1, 1), (2, 2)]
    assert [r.tag for r in replies] == ["of 3", "of 1", "of 2"]
    assert calls.idle


def test_all_is_in_order_of_workers_and_calls(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(3, per_worker=2)
    for number in range(2):
        for worker in reversed(workers.remote):
            calls.send(worker, echo, (worker.index, number))
    fake.script = in_order([3, 1, 2, 2, 3, 1])
    replies = calls.all()
    assert values(replies) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert calls.all() == []


def test_all_keeps_the_place_of_work_that_was_reassigned(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(3, after_failure="reassign")
    workers.remote[0].channel.next_error = DEATH
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
    fake.script = in_order([1, 3, 2, 1])
    replies = calls.all()
    assert values(replies) == [1, 2, 3]
    assert [reply.worker.index for reply in replies] == [1, 2, 3]


def test_ready_workers_are_served_in_turn(make: Any) -> None:
    workers, calls = make(3)
    calls.fill(version_of, workers.remote)
    served: Counter[int] = Counter()
    for _ in range(30):
        for worker in workers.remote:
            worker.channel.finish()
        reply = calls.first()
        served[reply.worker.index] += 1
        calls.fill(version_of, [reply.worker])
    assert served == {1: 10, 2: 10, 3: 10}


def test_wait_without_pending_calls_is_an_error(make: Any) -> None:
    _, calls = make()
    for wait in (calls.first, calls.next, calls.receive):
        with pytest.raises(RuntimeError, match="no call is pending"):
            wait()
    assert calls.all() == []


def test_local_worker_runs_calls_during_the_wait(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(0, count=counted.append)
    (here,) = workers.up()
    calls.fill(sample, [here])
    calls.send(here, echo, 7, tag="second")
    first, second = calls.all()
    assert first.worker is here
    assert first.counts.env_steps == 10
    assert (second.value, second.tag) == (7, "second")
    assert counted == [first, second]
    calls.send(here, fail)
    with pytest.raises(ValueError, match="expected failure"):
        calls.first()


# ---- limits ------------------------------------------------------------------------------------


def test_fill_sends_calls_up_to_the_limit_of_a_worker(make: Any) -> None:
    workers, calls = make(2, per_worker=3)
    calls.fill(version_of, workers.remote)
    calls.fill(version_of, workers.remote)
    assert [calls.num_calls_of(worker) for worker in workers.remote] == [3, 3]
    reply = calls.first()
    calls.fill(version_of, [reply.worker])
    assert calls.num_pending == 6


def test_further_work_waits_in_the_driver(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(1, per_worker=2)
    (worker,) = workers.remote
    for number in range(5):
        calls.send(worker, echo, number)
    assert calls.num_pending == 5
    assert [call.args for call in calls.pending()] == [(0,), (1,)]
    assert [calls.first().value for _ in range(5)] == [0, 1, 2, 3, 4]


def test_no_answer_within_the_limit_is_a_hang(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2)
    slow, other = workers.remote
    calls.send(slow, echo, tag="slow")
    fake.clock.now_s += 1.0
    calls.send(other, echo, tag="later")
    fake.script = none_ready
    reply = calls.next()
    assert (reply.worker, reply.tag, reply.value) == (slow, "slow", None)
    assert reply.failure is not None
    assert reply.failure.kind == "hang"
    assert "worker_calls.echo failed in worker 1" in reply.failure.message
    assert "no answer and no progress for 10.0 s (worker_timeout_s=10, " in reply.failure.message
    assert "A fragment has 5 steps of 2 environments" in reply.failure.message
    assert fake.clock.now_s == 1000.0 + TIMEOUT_S
    assert [call.tag for call in calls.pending() if call.worker is other] == ["later"]


def test_hang_of_a_worker_with_its_own_environments_names_them(
    fake: FakeTransport, make: Any
) -> None:
    workers, calls = make(1)
    workers.add_workers([WorkerSpec(env="CartPole-v1", num_envs=3)])
    for worker in workers.remote:
        calls.send(worker, echo)
    fake.script = none_ready
    hangs = [calls.next() for _ in range(2)]
    said = {one.worker.index: one.failure.message for one in hangs if one.failure is not None}
    assert "environment 'Drift')" in said[1]
    assert "environment 'CartPole-v1')" in said[2]
    assert "5 steps of 2 environments" in said[1]
    assert "5 steps of 3 environments" in said[2]


def test_hang_is_found_while_others_are_always_ready(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, after_failure="drop")
    quick, stuck = workers.remote
    calls.send(stuck, echo)
    for _ in range(100):
        calls.send(quick, echo)
        quick.channel.finish()
        fake.clock.now_s += 1.0
        reply = calls.next()
        if reply.failure is not None:
            break
    assert reply.worker is stuck
    assert fake.clock.now_s <= 1000.0 + TIMEOUT_S + 1.0


def test_call_that_ended_while_the_driver_was_busy_is_no_hang(
    fake: FakeTransport, make: Any
) -> None:
    workers, calls = make(2, per_worker=2)
    calls.fill(version_of, workers.remote)
    for worker in workers.remote:
        worker.channel.finish()
    fake.clock.now_s += 100.0 * TIMEOUT_S
    assert [reply.failure for reply in calls.all()] == [None] * 4
    assert workers.faults.num_restarts == 0


def test_queued_call_behind_an_ended_one_is_no_hang(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(1, per_worker=2)
    (worker,) = workers.remote
    calls.send(worker, echo, "first")
    worker.channel.finish()
    calls.send(worker, echo, "second")
    fake.clock.now_s += 2.0 * TIMEOUT_S
    assert calls.first().value == "first"
    # The time limit of the second call began when the driver received the answer to the first call.
    fake.clock.now_s += 0.9 * TIMEOUT_S
    assert calls.first().value == "second"
    assert workers.faults.num_restarts == 0


def test_call_can_have_its_own_limit(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, after_failure="drop")
    longer, usual = workers.remote
    calls.send(longer, echo, tag="longer", timeout_s=TIMEOUT_S + 5.0)
    calls.send(usual, echo, tag="usual")
    fake.script = none_ready
    assert calls.next().tag == "usual"
    assert fake.clock.now_s == 1000.0 + TIMEOUT_S
    assert calls.next().tag == "longer"
    assert fake.clock.now_s == 1000.0 + TIMEOUT_S + 5.0
    calls.send(workers.up()[0], echo, timeout_s=0.5)
    now_s = fake.clock.now_s
    assert calls.next().failure is not None
    assert fake.clock.now_s == now_s + 0.5


def test_deadline_of_pending_calls_can_be_tightened(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, after_failure="drop")
    unchanged, tightened = workers.remote
    for worker in workers.remote:
        calls.send(worker, echo)
    calls.tighten_deadline(tightened, 2.0)
    calls.tighten_deadline(tightened, 3.0)  # a later deadline has no effect
    fake.script = none_ready
    assert calls.next().worker is tightened
    assert fake.clock.now_s == 1002.0
    assert calls.next().worker is unchanged
    assert fake.clock.now_s == 1000.0 + TIMEOUT_S


def test_first_raises_if_all_calls_are_lost(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, up=False, after_failure="drop")
    one, two = workers.up()
    calls.send(one, echo, "of one")
    one.channel.next_error = DEATH
    calls.send(one, echo, "of one")
    calls.send(two, echo, "of two")
    fake.script = in_order([1, 1, 2])
    assert calls.first().value == "of one", "sent before the death"
    assert calls.first().value == "of two"
    with pytest.raises(RuntimeError, match="would never end"):
        calls.first()
    assert workers.faults.num_restarts == 1
    fake.script = oldest_first
    workers.take_started(START_CHECK_S)
    present = workers.up()
    for worker in present:
        worker.channel.next_error = DEATH
        calls.send(worker, echo, "lost")
    message = r"none is sent again \(after_failure='drop'\). The last failure: the process died"
    with pytest.raises(CallsLostError, match=message):
        calls.first()
    assert calls.idle
    assert workers.faults.num_restarts == 3
    (replacement,) = workers.up()  # waits for the first replacement
    assert replacement not in present
    calls.send(replacement, echo, "done")
    assert calls.first().value == "done"


@pytest.mark.parametrize("rule", ["send again", "reassign"])
def test_first_waits_for_calls_that_are_sent_again(
    fake: FakeTransport, make: Any, rule: str
) -> None:
    workers, calls = make(1, up=False, after_failure=rule)
    workers.up()[0].channel.next_error = DEATH
    calls.send(workers.remote[0], echo, "work")
    assert calls.first().value == "work"
    assert workers.faults.num_restarts == 1


def test_ended_calls_are_received_without_a_wait(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2)
    calls.receive_ended()
    assert not calls.kept, "nothing is pending"
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
    calls.receive_ended()
    assert not calls.kept, "nothing has ended"
    workers.remote[1].channel.finish()
    calls.receive_ended()
    assert values(list(calls.kept)) == [2]
    assert fake.clock.now_s == 1000.0
    assert workers.faults.num_restarts == 0
    assert values(calls.all()) == [1, 2]


# ---- work for workers that are not up ----------------------------------------------------------


def test_work_waits_until_its_worker_is_up(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, up=False)
    for worker in workers.remote:
        calls.send(worker, version_of, WEIGHTS)
    assert [channel.calls for channel in workers.channels] == [[], []]
    assert calls.num_pending == 2
    assert not calls.pending()
    fake.script = of_worker(2)
    reply = calls.first()
    assert reply.worker.index == 2
    assert calls.num_pending == 1
    fake.script = oldest_first
    assert calls.first().worker.index == 1


def test_call_carries_the_weights_at_the_time_of_sending(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, up=False)
    for worker in workers.remote:
        calls.send(worker, version_of, WEIGHTS)
    update(workers, 3)
    fake.script = of_worker(1)
    assert calls.first().value == 3
    update(workers, 4)
    fake.script = of_worker(2)
    assert calls.first().value == 7, "not the weights at the time of `send`"


def test_first_reply_of_a_replacement_has_current_weights(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, up=False)
    calls.fill(version_of, workers.up())
    workers.remote[0].channel.finish()
    calls.first()
    calls.send(workers.remote[0], version_of, WEIGHTS)
    channel = workers.remote[1].channel
    channel.finish()
    calls.first()
    channel.next_error = DEATH
    calls.fill(version_of, workers.up())
    fake.script = of_worker(2)
    failed = calls.next()
    assert failed.failure is not None
    for _ in range(5):  # the replacement is starting while the other worker continues
        fake.script = of_worker(1)
        reply = calls.first()
        assert reply.worker.index == 1
        update(workers, 100)
        calls.fill(version_of, [reply.worker])
    fake.script = of_worker(2)
    reply = calls.first()
    assert (reply.worker.index, reply.value) == (2, 500)
    assert [name for name, _ in workers.channels[2].calls] == ["version_of"]


def test_drain_does_not_wait_for_starting_workers(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(2, up=False)
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
    fake.script = of_worker(1)
    assert calls.first().value == 1
    calls.send(workers.remote[0], echo, 1)
    calls.drain()
    assert values(list(calls.kept)) == [1]
    assert calls.num_pending == 1
    fake.script = oldest_first
    assert values(calls.all()) == [1, 2]


def test_replacement_that_never_starts_ends_the_run(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(1, up=False, rollout={"max_consecutive_failures": 3})
    calls.send(workers.remote[0], echo)
    fake.script = none_ready
    with pytest.raises(WorkersFailedError, match="the start or a set-up call has not ended"):
        calls.first()
    assert fake.clock.now_s >= 1000.0 + 3.0 * STARTUP_S
    assert workers.faults.counts["hang"] == 3


# ---- failures ----------------------------------------------------------------------------------


def send_and_kill(workers: FakeWorkerSet, calls: Calls) -> Reply:
    """Makes three calls to worker 1 and one call to worker 2. `Calls` holds the third call, because
    a worker has at most two calls. Then worker 1 fails."""
    one, two = workers.remote
    one.channel.next_error = DEATH
    for name in "abc":
        calls.send(one, echo, name)
    calls.send(two, echo, "d")
    return calls.next()


@every_rule
def test_work_of_a_failed_worker_follows_the_rule(
    fake: FakeTransport, make: Any, rule: str
) -> None:
    workers, calls = make(2, per_worker=2, after_failure=rule)
    reply = send_and_kill(workers, calls)
    assert reply.failure is not None
    assert (reply.failure.kind, reply.worker.index, reply.value) == ("death", 1, None)
    assert reply.worker.removed
    assert workers.stats()["num_remote_worker_restarts"] == 1
    replies = calls.all()
    found = [(r.worker.index, r.value) for r in replies]
    assert (
        found
        == {
            "send again": [(1, "a"), (1, "b"), (1, "c"), (2, "d")],
            "reassign": [(1, "a"), (1, "b"), (2, "c"), (2, "d")],
            "drop": [(2, "d")],
        }[rule]
    )
    assert calls.idle


def test_reassigned_work_does_not_wait_for_the_replacement(fake: FakeTransport, make: Any) -> None:
    workers, calls = make(3, up=False, after_failure="reassign")
    workers.up()
    workers.remote[0].channel.next_error = DEATH
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
    fake.script = lambda pending: next(one for one in pending if one not in workers.starting)
    assert [(r.worker.index, r.value) for r in calls.all()] == [(2, 1), (2, 2), (3, 3)]
    assert not workers.remote[0].up


@every_rule
def test_all_does_not_wait_for_a_removed_worker(fake: FakeTransport, make: Any, rule: str) -> None:
    workers, calls = make(3, per_worker=2, after_failure=rule)
    for name in "abc":
        calls.send(workers.remote[1], echo, name)
    calls.send(workers.remote[2], echo, "d")
    workers.remote[1].channel.finish()
    workers.remove_workers([2])
    replies = calls.all()
    assert sorted(values(replies)) == (list("abcd") if rule == "reassign" else ["d"])
    assert calls.idle
    assert workers.faults.num_restarts == 0


@every_rule
@pytest.mark.parametrize("how", ["all", "drain", "first"])
def test_wait_ends_if_all_pending_workers_are_removed(make: Any, rule: str, how: str) -> None:
    workers, calls = make(2, after_failure=rule)
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
    calls.receive()
    workers.remote[1].channel.finish()
    workers.remove_workers([2])
    if how == "all":
        assert values(calls.all()) == ([1, 2] if rule == "reassign" else [1])
    elif how == "drain":
        calls.drain()
        assert len(calls.kept) == (2 if rule == "reassign" else 1)
    else:
        assert calls.first().value == 1
        if rule != "reassign":
            with pytest.raises(RuntimeError, match="no call is pending"):
                calls.first()


@every_rule
def test_work_for_a_removed_worker_is_reassigned_or_dropped(make: Any, rule: str) -> None:
    workers, calls = make(2, after_failure=rule)
    removed = workers.remote[1]
    workers.remove_workers([2])
    calls.drain()  # `Calls` notices that the worker was removed
    calls.fill(version_of, [removed])
    replies = calls.all()
    assert [r.worker.index for r in replies] == ([1] if rule == "reassign" else [])


def test_work_sent_to_a_replaced_worker_reaches_its_successor(make: Any) -> None:
    workers, calls = make(2)
    replaced = workers.remote[0]
    workers.replace(replaced, Fault("death", "gone"))
    calls.drain()
    calls.send(replaced, echo, 1)
    reply = calls.first()
    assert (reply.worker, reply.value) == (workers.remote[0], 1)


def test_all_does_not_wait_for_a_worker_that_is_given_up(fake: FakeTransport, make: Any) -> None:
    limits = {"min_workers": 1, "max_consecutive_failures": 3}
    workers, calls = make(2, rollout=limits)
    one, two = workers.remote
    for worker in (one, one, one, one, two):
        calls.send(worker, fail_in, 2)
    fake.script = in_order([1, 2, 1, 2, 1, 2, 1])
    assert [reply.worker for reply in calls.all()] == [one] * 4
    assert workers.remote == [one]
    assert workers.faults.num_given_up == 1
    assert calls.idle


def test_exceptions_in_a_row_end_the_run(make: Any) -> None:
    workers, calls = make(1, rollout={"max_consecutive_failures": 3})
    calls.send(workers.remote[0], fail_if, False)
    calls.first()
    calls.send(workers.remote[0], fail_if, True)
    with pytest.raises(WorkersFailedError, match=r"3 calls.* in a row(?s:.*)expected failure"):
        calls.first()
    assert workers.faults.counts["exception"] == 3


def test_success_of_a_call_that_is_not_work_does_not_reset_the_failures(make: Any) -> None:
    workers, _ = make(2, rollout={"max_consecutive_failures": 3})
    pings = Calls(workers, "test", is_work=False)
    failure = Fault("exception", "it fails")
    for _ in range(2):
        workers.replace(workers.remote[0], failure)
        run(pings, workers.remote[1], echo)
    with pytest.raises(WorkersFailedError, match="3 calls to workers failed in a row"):
        workers.replace(workers.remote[0], failure)


# ---- functions ---------------------------------------------------------------------------------


def run(calls: Calls, worker: WorkerHandle, fn: Callable[..., Any]) -> Any:
    """Calls a function in a worker, and returns its value."""
    calls.send(worker, fn)
    return calls.first().value


# ---- counts ------------------------------------------------------------------------------------


def test_reply_is_counted_once_when_it_is_taken(fake: FakeTransport, make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(2, count=counted.append)
    calls.fill(sample, workers.remote)
    calls.drain()
    assert len(calls.kept) == 2
    assert counted == [], "no reply was taken yet"
    first = calls.first()
    assert counted == [first]
    calls.fill(sample, [first.worker])
    replies = calls.all()
    assert counted == [first, *replies]
    assert [reply.counts.env_steps for reply in counted] == [10, 10, 10]


def test_first_takes_only_replies_that_may_be_taken(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(3, count=counted.append)
    calls.fill(sample, workers.remote)
    calls.drain()
    first, second, third = calls.kept
    assert calls.first(lambda reply: reply is second) is second
    assert counted == [second]
    assert calls.first(lambda reply: reply is third, count=False) is third
    assert counted == [second]
    assert calls.all() == [first]
    calls.fill(sample, [workers.remote[0], workers.remote[2]])
    last = calls.first(lambda reply: reply.worker.index == 3)
    assert last.worker.index == 3, "replies that may not be taken are kept meanwhile"
    assert [reply.worker.index for reply in calls.kept] == [1]
    with pytest.raises(RuntimeError, match="would never end"):
        calls.first(lambda reply: False)


def test_next_counts_the_reply_unless_the_caller_counts_it(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(2, count=counted.append)
    calls.fill(sample, workers.remote)
    later = calls.next(count=False)
    assert counted == []
    now = calls.next()
    assert counted == [now]
    calls.count([later])
    assert counted == [now, later]
    with pytest.raises(RuntimeError, match="is counted, and cannot be counted"):
        calls.count([later])
    assert counted == [now, later], "each reply is counted once"


def test_what_was_taken_is_counted_at_the_latest_by_the_owner(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(3, count=counted.append)
    calls.fill(sample, workers.remote)
    taken = [calls.next(count=False) for _ in range(3)]
    calls.drop(taken[:1])
    calls.count()
    assert counted == taken[1:]
    calls.count()
    assert counted == taken[1:]
    with pytest.raises(RuntimeError, match="is lost, and cannot be counted"):
        calls.count(taken[:1])


def test_a_call_has_one_state_after_the_other(make: Any) -> None:
    workers, calls = make(1, per_worker=1)
    calls.send(workers.remote[0], echo, tag="first")
    calls.send(workers.remote[0], echo, tag="second")
    first, second = calls.pending_work()
    assert [first.state, second.state] == ["sent", "waiting"]
    calls.receive()
    assert [first.state, second.state] == ["answered", "sent"]
    assert calls.first(count=False) is first
    assert first.state == "taken"
    calls.count([first])
    assert first.state == "counted"
    workers.remote[0].channel.die()
    failed = calls.next()
    assert failed is second
    assert [second.state, second.failure is None] == ["lost", False]
    (repeated,) = calls.pending_work()
    assert repeated is not second
    assert [repeated.state, repeated.tag, repeated.order] == ["waiting", "second", second.order]


def sample_then_fail(worker: RolloutWorker, fails: bool) -> None:
    worker.next_batch()
    fail_if(worker, fails)


def test_steps_of_a_call_that_fails_are_counted(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(1, count=counted.append, after_failure="drop")
    calls.send(workers.remote[0], version_of, WEIGHTS)
    calls.send(workers.remote[0], sample_then_fail, False)
    calls.all()
    calls.send(workers.remote[0], sample_then_fail, True)
    assert calls.next().failure is not None
    assert [reply.counts.env_steps for reply in counted] == [0, 10, 10]
    assert counted[2].failure is not None
    assert "sample" in counted[2].counts.seconds


def test_call_of_a_process_that_dies_is_not_counted(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(1, count=counted.append, after_failure="drop")
    workers.remote[0].channel.next_error = DEATH
    calls.fill(sample, workers.remote)
    calls.next()
    assert counted == []


def test_faults_are_counted_with_their_reply(make: Any) -> None:
    spoils = {"env_config": {"what": "nan reward", "times": 1, "worker": 1}}
    workers, calls = make(2, env=Spoiled, rollout=spoils)
    calls.fill(sample, workers.remote)
    calls.drain()
    assert workers.faults.counts["non_finite"] == 0
    one, two = calls.all()
    assert [num_faults(reply.counts.faults, "non_finite") for reply in (one, two)] == [1, 0]
    assert workers.faults.counts["non_finite"] == 1
    assert workers.stats()["last_non_finite_worker"] == 1
    assert one.counts.env_steps == two.counts.env_steps == 10, "only finite rows count"


def test_non_finite_data_in_a_row_end_the_run(make: Any) -> None:
    rollout = {"env_config": {"what": "nan reward"}, "max_consecutive_non_finite": 3}
    workers, calls = make(1, env=Spoiled, rollout=rollout)
    calls.fill(sample, workers.remote)
    with pytest.raises(NonFiniteError, match=r"worker 1: 3 fragments in a row.*reward"):
        calls.first()
    assert workers.faults.counts["non_finite"] == 3
    assert workers.faults.num_restarts == 0


# ---- early stop and interruption ---------------------------------------------------------------


def test_wait_stops_stragglers_and_drops_work_that_was_not_sent(
    fake: FakeTransport, make: Any
) -> None:
    workers, calls = make(3, after_failure="reassign")
    stopped: list[tuple[int, int]] = []
    for worker in workers.remote:
        calls.send(worker, echo, worker.index)
        calls.send(worker, echo, -worker.index)
        worker.channel.stop_early = lambda _, keep, i=worker.index: stopped.append((i, keep))
    fake.script = in_order([1, 1, 2, 2, 3])
    replies = calls.all(Stragglers(0.6, 0.25), steps=lambda work: 20)
    assert values(replies) == [1, -1, 2, -2, 3]
    assert stopped == [(3, 5)]  # 25 percent of 20 steps are kept


def test_discard_drops_everything_that_is_pending(make: Any) -> None:
    counted: list[Reply] = []
    workers, calls = make(2, count=counted.append)
    for worker in workers.remote:
        for number in range(3):
            calls.send(worker, echo, number)
    calls.receive()
    calls.discard()
    assert calls.idle
    assert counted == []


def test_interrupted_wait_continues_later(make: Any) -> None:
    workers, calls = make(2)
    calls.fill(version_of, workers.remote)
    calls.interrupt()
    with pytest.raises(CallsInterrupted):
        calls.first()
    assert calls.num_pending == 2
    calls.send(workers.remote[0], echo)
    assert calls.num_calls_of(workers.remote[0]) == 1
    calls.interrupted = False
    assert [reply.failure for reply in calls.all()] == [None] * 3


@every_rule
def test_workers_killed_by_an_interruption_are_replaced_later(make: Any, rule: str) -> None:
    workers, calls = make(2, after_failure=rule)
    calls.fill(version_of, workers.remote)
    calls.interrupt()
    calls.kill_busy()
    assert not any(worker.channel.alive for worker in workers.remote)
    for worker in workers.remote:
        worker.channel.alive = True  # with Ray, killing a dead process again has no effect
        worker.channel.die()
    with pytest.raises(CallsInterrupted):
        calls.first()
    assert workers.faults.num_restarts == 0
    calls.interrupted = False
    assert len(calls.all()) == (0 if rule == "drop" else 2)
    assert workers.faults.num_restarts == 2


@every_rule
def test_failure_during_an_interruption_is_handled_once(
    make: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, calls = make(2, after_failure=rule)
    worker = workers.remote[0]
    worker.channel.next_error = DEATH
    calls.send(worker, echo, "work")
    (call,) = calls.pending()
    result = type(call.ticket).result

    def interrupted(ticket: Any, timeout_s: float) -> Any:
        calls.interrupt()
        return result(ticket, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(type(call.ticket), "result", interrupted)
        with pytest.raises(CallsInterrupted):
            calls.first()
    assert workers.faults.counts["death"] == 0
    calls.interrupted = False
    assert values(calls.all()) == ([] if rule == "drop" else ["work"])
    assert (workers.faults.counts["death"], workers.faults.num_restarts) == (1, 1)
    assert worker.removed


def test_load_counts_pending_calls(make: Any) -> None:
    workers, calls = make(3)
    calls.fill(version_of, workers.remote)
    calls.all()
    # When the three calls end, 3, 2 and 1 calls are pending.
    assert calls.load.report() == {"mean": 2.0, "max": 3}


def test_infinite_limit_is_allowed(make: Any) -> None:
    workers, calls = make(1, rollout={"worker_timeout_s": 1e7})
    calls.send(workers.remote[0], echo, 1, timeout_s=math.inf)
    assert calls.first().value == 1
