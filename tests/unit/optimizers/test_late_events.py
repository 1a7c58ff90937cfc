"""Events that reach the driver late, on the virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_channel import (
    SimulatedTransport,
    none_ready,
    oldest_first,
    shuffled_by,
)
from simulated_replay import BATCH, credit, make
from toy_shards import Shards, count

from polopt.optimizers.async_replay import Task
from polopt.optimizers.replay_shards import draw
from polopt.policies.policy_group import DEFAULT_POLICY as ONE
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.errors import WorkersFailedError


def test_process_that_started_while_the_driver_was_busy_is_not_replaced() -> None:
    transport = SimulatedTransport()
    shards = Shards(transport, 2, worker_startup_timeout_s=50.0, worker_timeout_s=1000.0)
    calls = Calls(shards, "test")
    one, two = shards.up()
    calls.send(two, count, "work")
    calls.send(one, count, "first")
    transport.script = none_ready
    two.channel.die(LostProcessError("gone"))
    assert calls.next().failure.kind == "death"
    replacement = shards.remote[1]
    replacement.channel.start.done = True  # the replacement answers at once
    transport.clock.advance(60.0)  # the driver learns, evaluates, or waits for the user
    one.channel.tickets[-1].done = True
    transport.script = oldest_first
    assert [reply.value[0] for reply in calls.all()] == ["first", "work"]
    assert shards.stats()["num_worker_hangs"] == 0
    assert shards.remote[1] is replacement


class Failing(Shards):
    def _start_process(self, index: int) -> Any:
        worker = super()._start_process(index)
        worker.channel.start.error = LostProcessError("no library", at_start=True)
        return worker


def test_up_raises_again_where_no_process_is_up_or_starting() -> None:
    shards = Failing(SimulatedTransport(), 1)
    with pytest.raises(WorkersFailedError):
        shards.up()
    waits: list[float] = []

    def take_started(timeout_s: float) -> None:
        waits.append(timeout_s)
        assert len(waits) < 1000, "`up` never returns"
        Shards.take_started(shards, timeout_s)

    shards.take_started = take_started  # type: ignore[method-assign]
    with pytest.raises(WorkersFailedError):
        shards.up()


@pytest.mark.parametrize("error_buffer", [BATCH + 20, None])
@pytest.mark.parametrize("how", ["deaths", "restore"])
def test_run_goes_on_where_shards_lose_their_rows_while_samplers_wait(
    error_buffer: int | None, how: str
) -> None:
    """Fragments of 10 rows do not divide the 61 rows that the shards must hold."""
    options = {"error_buffer": error_buffer, "learning_starts": 61}
    optimizer = make(shuffled_by(1), **options)
    if error_buffer is None:  # draws end last, so the learner is behind
        optimizer.workers.transport.script = lambda pending: next(
            (t for t in pending if t.channel.calls[-1:] and t.channel.calls[-1][0] != "draw"),
            pending[0],
        )

    def blocked() -> bool:
        waiting = sum(task.rows for task in optimizer._tasks()) == 0
        return waiting and credit(optimizer) + 18 > optimizer.limiter.error_buffer

    while optimizer.metrics.num_updates < 30 or not blocked():
        optimizer.step()
    if how == "deaths":
        for shard in optimizer.shards.remote:
            shard.channel.die(LostProcessError("killed"))
    else:
        state = optimizer.get_state()
        optimizer = make(shuffled_by(1), **options)
        optimizer.set_state(state)
    updates = optimizer.metrics.num_updates
    optimizer.workers.transport.script = shuffled_by(3)
    for _ in range(150):
        optimizer.step()
        assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer
    assert optimizer.metrics.num_updates > updates + 10


def kill_shard_in_drain(optimizer: Any) -> Any:
    """Ends all calls to the only shard, but not a last call, with which the shard dies. The driver
    notices the death in `drain`. Returns the shard."""
    (shard,) = optimizer.shards.remote
    optimizer.calls.send(shard, draw, ONE, BATCH, 0.4, tag=Task("batch", policy=ONE))
    for ticket in shard.channel.tickets:
        ticket.done = True
    shard.channel.tickets[-1].error = LostProcessError("killed")
    optimizer.drain()
    assert shard.removed
    return shard


def test_priorities_of_a_dead_shard_do_not_reach_its_replacement() -> None:
    optimizer = make(num_replay_shards=1)
    while optimizer.metrics.num_updates < 5:
        optimizer.step()
    optimizer.calls.send(
        optimizer.shards.remote[0], draw, ONE, BATCH, 0.4, tag=Task("batch", policy=ONE)
    )
    shard = kill_shard_in_drain(optimizer)
    kept = [reply.tag.kind for reply in optimizer.calls.kept if reply.worker is shard]
    assert "batch" in kept
    for _ in range(40):
        optimizer.step()
    names = [name for name, _ in optimizer.shards.remote[0].channel.calls]
    assert "set_priorities" not in names[: names.index("draw")]


def test_rows_that_are_lost_with_their_shard_do_not_count_as_sampled() -> None:
    optimizer = make(num_replay_shards=1, learning_starts=61)
    while optimizer.metrics.num_updates < 5 or not any(
        task.kind == "stored" for task in optimizer._tasks()
    ):
        optimizer.step()
    shard = kill_shard_in_drain(optimizer)
    while any(reply.worker is shard for reply in optimizer.calls.kept):
        optimizer.step()
    missing = optimizer.limiter.get_state()["missing"]
    assert missing >= 61 - optimizer.shards.num_rows(ONE)
