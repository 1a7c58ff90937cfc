"""Processes whose nodes announce their end, under every strategy, on the virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from simulated_channel import (
    SimulatedChannel,
    SimulatedTransport,
    none_ready,
    oldest_first,
    shuffled_by,
)
from simulated_replay import make as make_replay
from toy_shards import Shards, add_rows, count, make_rows

from polopt.common.faults import Fault
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.rollouts.transport.channel import LostProcessError, LostReferenceError
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.worker_handle import ProcessState

STRATEGIES = ("async_gradients", "sync_gradients", "sync_samples", "async_samples", "async_replay")


def made(name: str, seed: int) -> Any:
    """Returns an optimizer of this name with three simulated workers."""
    if name == "async_replay":
        return make_replay(shuffled_by(seed), num_replay_shards=3)
    transport = FakeTransport()
    transport.script = shuffled_by(seed)
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 3}), transport)
    options = {"grads_per_step": 5} if name.endswith("gradients") else {}
    return make_optimizer(OPTIMIZERS.get(name), workers, **options)


def steps_of_answers(transport: Any) -> int:
    """Returns the number of environment steps in all answers that have arrived so far, from the
    processes that are up and from all others."""
    answers = [
        ticket.answer
        for channel in transport.channels
        for ticket in channel.tickets
        if ticket.done and ticket.error is None and isinstance(ticket.answer, Answer)
    ]
    return sum(answer.record.env_steps for answer in answers)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_step_is_lost_or_counted_twice_in_20_preemptions(name: str) -> None:
    optimizer, rng = made(name, 7), random.Random(7)
    workers, transport = optimizer.workers, optimizer.workers.transport
    groups = [workers, optimizer.shards] if name == "async_replay" else [workers]
    for _ in range(20):
        for _ in range(rng.randrange(1, 4 if len(groups) == 1 else 40)):
            optimizer.step()
        group = rng.choice(groups)
        transport.ending.add(rng.choice([one for one in group.remote if one.up]).channel)
    while any(not group.up() or group.leaving for group in groups):
        optimizer.step()
    optimizer.drain()
    kept = sum(reply.counts.env_steps for reply in optimizer.calls.kept)
    optimizer.calls.count()
    assert optimizer.metrics.num_env_steps_sampled + kept == steps_of_answers(transport)
    left = sum(group.faults.counts["preemption"] for group in groups)
    assert left == 20
    assert sum(group.faults.num_restarts for group in groups) == 20
    assert all(group.faults.last is None for group in groups), "no failure was counted"
    assert all(group.faults.counts["reference"] == 0 for group in groups)
    running = [channel for channel in transport.channels if channel.alive]
    assert len(running) == sum(len(group.remote) for group in groups), "the others have ended"


def leaving_shard(transport: FakeTransport, **options: Any) -> tuple[Any, Calls, Any, Any]:
    shards = Shards(transport, 2)
    calls = Calls(shards, "test", **options)
    one, two = shards.up()
    return shards, calls, one, two


@pytest.mark.parametrize("rule", ["send again", "reassign", "drop"])
def test_waiting_work_of_a_process_that_leaves(rule: Any) -> None:
    """Two calls wait while the process runs another one. They reach the replacement, or a process
    that is up."""
    transport = FakeTransport()
    shards, calls, one, _ = leaving_shard(transport, after_failure=rule)
    for tag in ("sent", "second", "third"):
        calls.send(one, count, tag)
    transport.ending.add(one.channel)
    replies = calls.all()
    assert [reply.value[0] for reply in replies] == ["sent", "second", "third"]
    where = [reply.worker for reply in replies]
    assert where[0] is one
    elsewhere = shards.remote[1] if rule == "reassign" else shards.remote[0]
    assert where[1:] == [elsewhere, elsewhere]
    assert one.state is ProcessState.REPLACED


def test_values_stay_until_other_processes_have_them() -> None:
    """The value of a process that leaves is an argument of a call that was sent."""
    transport = FakeTransport()
    _, calls, one, two = leaving_shard(transport, per_worker=2)
    calls.send(one, make_rows, 3, by_reference=True)
    transport.ending.add(one.channel)
    rows = calls.first().value
    calls.send(two, count, "busy")
    calls.send(two, add_rows, rows)
    assert calls.first().value[0] == "busy"
    assert one.channel.alive, "the second call has not got the rows yet"
    assert calls.first().value == (3, 3.0)
    calls.send(two, count)
    calls.first()
    assert not one.channel.alive


def test_value_for_a_process_that_has_not_started_comes_to_the_driver() -> None:
    """All nodes but one end at once, so the replacement that needs the value may start too late."""
    transport = FakeTransport()
    shards, calls, one, two = leaving_shard(transport)
    calls.send(one, make_rows, 3, by_reference=True)
    transport.ending |= {one.channel, two.channel}
    rows = calls.first().value
    shards.take_leaving()
    transport.script = none_ready
    calls.send(shards.remote[1], add_rows, rows)
    calls.receive_ended()
    assert (one.channel.alive, two.channel.alive) == (False, False)
    rows.value = LostReferenceError("its process has ended")
    transport.script = oldest_first
    assert calls.first().value == (3, 3.0)


def test_kept_value_keeps_its_process() -> None:
    transport = FakeTransport()
    _, calls, one, two = leaving_shard(transport)
    calls.send(one, make_rows, 3, by_reference=True)
    transport.ending.add(one.channel)
    calls.receive()
    calls.send(two, count)
    calls.receive()
    assert one.channel.alive
    calls.all()
    calls.send(two, count)
    calls.all()
    assert not one.channel.alive


def test_work_for_a_process_that_leaves_reaches_a_replacement_that_is_up() -> None:
    transport = FakeTransport()
    shards, calls, one, _ = leaving_shard(transport)
    calls.send(one, count, "slow")
    shards.leave(one, "test")
    transport.script = lambda pending: next(
        (ticket for ticket in pending if ticket.channel is not one.channel), None
    )
    shards.take_started(1.0)
    assert shards.remote[0].up
    calls.receive_ended()  # the driver knows of the replacement from here on
    calls.send(one, count, "late")
    assert calls.first().value == ("late", 1, 0)
    assert (calls.num_pending, one.state) == (1, ProcessState.LEAVING)


def test_priorities_of_a_shard_that_leaves_do_not_reach_its_replacement() -> None:
    optimizer = make_replay(shuffled_by(1), num_replay_shards=1)
    while optimizer.metrics.num_updates < 5:
        optimizer.step()
    (shard,) = optimizer.shards.remote
    optimizer.shards.leave(shard, "test")
    before = optimizer.calls.num_work_of(shard)
    optimizer._send_priorities(shard, "default_policy", np.arange(3), np.ones(3))
    assert optimizer.calls.num_work_of(shard) == before


def dies(shards: Any, calls: Calls, one: Any) -> None:
    one.channel.die(LostProcessError("gone"))


def hangs(shards: Any, calls: Calls, one: Any) -> None:
    shards.transport.script = none_ready
    shards.transport.clock.advance(10_000.0)


@pytest.mark.parametrize("end", [dies, hangs])
def test_process_that_ends_before_its_work_has_come_back(end: Callable[..., None]) -> None:
    transport = FakeTransport()
    shards, calls, one, _ = leaving_shard(transport)
    calls.send(one, count, "work")
    transport.ending.add(one.channel)
    shards.take_leaving()
    shards.remote[0].channel.start.done = True  # type: ignore[attr-defined]
    shards.take_started(0.0)
    end(shards, calls, one)
    reply = calls.next()
    assert (reply.worker, reply.value) == (one, None)
    transport.script = shuffled_by(1)
    assert calls.first().value == ("work", 1, 0), "the replacement does the work"
    stats = shards.stats()
    assert (stats["num_worker_preemptions"], stats["num_remote_worker_restarts"]) == (1, 1)
    assert (stats["num_worker_deaths"], stats["num_worker_hangs"]) == (0, 0)


def test_death_on_a_preempted_node_is_no_failure() -> None:
    transport = SimulatedTransport()
    shards = Shards(transport, 1, max_consecutive_failures=1)
    calls = Calls(shards, "test")
    for number in range(3):
        (one,) = shards.up()
        calls.send(one, count, "work")
        one.channel.die(LostProcessError("its node was preempted", preempted=True))
        assert calls.first().value == ("work", 1, 0)
        assert shards.stats()["num_worker_preemptions"] == number + 1
    one = shards.remote[0]
    assert shards.stats()["last_preemption"] == "its node was preempted"
    assert (shards.stats()["num_worker_deaths"], one.index) == (0, 1)


def test_process_that_got_sigterm_says_so_in_its_answer() -> None:
    transport = SimulatedTransport()
    shards = Shards(transport, 2)
    calls = Calls(shards, "test", per_worker=2)
    one, _ = shards.up()
    channel: SimulatedChannel = one.channel  # type: ignore[assignment]
    channel.target.leaves = True
    for tag in range(3):
        calls.send(one, count, tag)
    assert [reply.value[0] for reply in calls.all()] == [0, 1, 2]
    assert (one.state, shards.remote[0].up) == (ProcessState.REPLACED, True)
    assert shards.stats()["last_preemption"] == "the process has got SIGTERM"


def test_replacement_has_other_random_numbers() -> None:
    workers = FakeWorkerSet(worker_config(), FakeTransport())
    workers.leave(workers.remote[0], "test")
    workers.leave(workers.remote[0], "test")
    assert workers.restart_counts == {1: 2}
    assert workers.config_of(1).restart_count == 2


def test_only_a_process_that_is_up_leaves() -> None:
    shards = Shards(SimulatedTransport(), 1)
    shards.leave(shards.remote[0], "it still starts")
    assert (shards.leaving, shards.remote[0].state) == ([], ProcessState.STARTING)
    (one,) = shards.up()
    shards.replace(one, Fault("death", "gone"))
    shards.leave(one, "it is gone")
    assert shards.leaving == []
