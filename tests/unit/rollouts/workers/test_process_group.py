"""`Calls` and `ProcessGroup` with processes that are not rollout workers, on the virtual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeWorkerSet, worker_config
from simulated_channel import (
    Reference,
    SimulatedTransport,
    VirtualClock,
    in_order,
    none_ready,
    oldest_first,
)
from toy_shards import Shard, Shards, add_rows, count, fail_with_rows, make_rows

from polopt.common.faults import Fault
from polopt.common.weights import Weights
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import LostProcessError, LostReferenceError
from polopt.rollouts.workers import worker_set
from polopt.rollouts.workers.call_workers import restore_statistics
from polopt.rollouts.workers.calls import Calls, Reply
from polopt.rollouts.workers.errors import FunctionError, WorkersFailedError
from polopt.rollouts.workers.process_group import StartUp
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


@pytest.fixture
def transport() -> SimulatedTransport:
    return SimulatedTransport()


def names(*indices: int) -> list[str]:
    return [f"shard {index}" for index in indices]


def test_shards_start_and_answer(transport: SimulatedTransport) -> None:
    counted: list[Reply] = []
    shards = Shards(transport, 3)
    calls = Calls(shards, "test", count=counted.append)
    for shard in shards.remote:
        calls.send(shard, count, shard.index)
    assert [worker.index for worker in shards.up()] == [1, 2, 3]
    transport.script = in_order(names(3, 1, 2))
    assert [calls.first().value for _ in range(3)] == [(3, 3, 0), (1, 1, 0), (2, 2, 0)]
    assert [reply.worker.index for reply in counted] == [3, 1, 2]
    assert all(reply.counts.seconds["other"] >= 0.0 for reply in counted)
    assert calls.idle


def test_value_stays_in_its_process_and_is_an_argument_elsewhere(
    transport: SimulatedTransport,
) -> None:
    shards = Shards(transport, 3)
    calls = Calls(shards, "test")
    one, two, three = shards.up()
    for shard in (one, two):
        calls.send(shard, make_rows, 10 * shard.index, by_reference=True)
    replies = calls.all()
    made = [reply.value for reply in replies]
    assert [type(value) for value in made] == [Reference, Reference]
    assert [reply.counts.num_bytes for reply in replies] == [160, 320], (
        "the bytes of values by reference count, too"
    )
    calls.send(three, add_rows, *made, np.zeros((1, 4), np.float32))
    calls.send(one, add_rows, made[1])
    calls.send(one, add_rows, made[1])
    first, second, of_three = calls.all()
    assert of_three.value == (31, 10 * 1.0 + 20 * 2.0)
    assert (first.value, second.value) == ((20, 40.0), (40, 80.0)), "the value can be used twice"


@pytest.mark.parametrize("rule", ["send again", "reassign", "drop"])
def test_call_whose_argument_is_lost_is_dropped(
    transport: SimulatedTransport, rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shards = Shards(transport, 2)
    calls = Calls(shards, "test", after_failure=rule)
    _, two = shards.up()
    lost = Reference(LostReferenceError("an argument is lost: its owner has exited"))
    for args in ((lost,), (np.ones((3, 4), np.float32),)):
        calls.send(two, add_rows, *args)
    reply = calls.next()
    assert (reply.worker, reply.value) == (two, None)
    assert reply.failure is not None
    assert reply.failure.kind == "reference"
    said = "add_rows failed in shard 2: an argument is lost: its owner has exited"
    assert said in reply.failure.message
    assert said in caplog.text
    assert calls.first().value == (3, 3.0), "the shard continues"
    calls.send(two, add_rows, lost)
    calls.send(two, count, "next")
    assert calls.first().value == ("next", 2, 3)
    assert shards.faults.num_restarts == 0
    stats = shards.stats()
    assert (stats["num_worker_lost_arguments"], stats["last_reference_worker"]) == (2, 2)
    assert said in stats["last_reference"]
    assert calls.idle


def test_function_that_fails_in_a_call_by_reference_is_one_error(
    transport: SimulatedTransport,
) -> None:
    shards = Shards(transport, 2)
    calls = Calls(shards, "test")
    one, two = shards.up()
    calls.send(one, make_rows, 7, by_reference=True)
    rows = calls.first().value
    calls.send(two, fail_with_rows, rows, by_reference=True)
    with pytest.raises(FunctionError) as caught:
        calls.first()
    message = str(caught.value)
    assert "test: function" in message
    assert "fail_with_rows failed in shard 2: ValueError: expected failure with 7 rows" in message
    assert shards.faults.num_restarts == 0


def test_shard_that_dies_is_replaced(transport: SimulatedTransport) -> None:
    shards = Shards(transport, 2)
    calls = Calls(shards, "test")
    one, two = shards.up()
    calls.send(two, add_rows, np.ones((3, 4), np.float32))
    assert calls.first().value[0] == 3
    for shard in (one, two):
        calls.send(shard, count, "work")
    two.channel.die(LostProcessError("gone"))
    assert [reply.value for reply in calls.all()] == [("work", 1, 0), ("work", 2, 0)]
    assert [worker.index for worker in shards.remote] == [1, 2]
    assert shards.remote[1] is not two
    assert shards.stats()["num_worker_deaths"] == 1
    assert shards.restart_counts == {2: 1}
    assert not two.channel.alive


def test_shards_that_never_start_end_the_run(transport: SimulatedTransport) -> None:
    shards = Shards(transport, 1, worker_startup_timeout_s=50.0, max_consecutive_failures=2)
    transport.script = none_ready
    with pytest.raises(WorkersFailedError, match=r"of shard 1 \(hang\):\nno answer for 50\.0 s"):
        shards.up()
    assert transport.clock.now_s == 1100.0  # the clock begins at 1000 s, and two starts take 50 s
    transport.script = oldest_first
    shards.stop()
    assert shards.remote == []
    with pytest.raises(WorkersFailedError, match="no shards remain"):
        shards.up()


def test_stopped_shards_drop_their_state(transport: SimulatedTransport) -> None:
    shards = Shards(transport, 2)
    shards.up()
    targets = [channel.target for channel in transport.channels]
    for target in targets:
        target.state["kept"] = 1
    shards.stop()
    assert [target.state for target in targets] == [{}, {}]
    assert not any(channel.alive for channel in transport.channels)


def version_of(shard: Shard, weights: Weights | None) -> int | None:
    return None if weights is None else weights.version


def test_shards_get_the_weights_of_their_group(transport: SimulatedTransport) -> None:
    shards = Shards(transport, 1)
    calls = Calls(shards, "test")
    (shard,) = shards.up()
    with pytest.raises(FunctionError, match=r"version_of .* shard 1: shards take no weights"):
        calls.send(shard, version_of, WEIGHTS)
    shards.weights = WorkerSet(worker_config(rollout={"num_workers": 0})).weights
    versions: list[Any] = []
    for _ in range(2):
        calls.fill(version_of, [shard])
        versions.append(calls.first().value)
    assert versions == [0, None], "the shard already has the weights"


def two_groups(transport: SimulatedTransport, rule: Any = "send again") -> Any:
    """Makes two shards, two indexers, and one `Calls` for both groups. The last returned value is
    the list of counted replies."""
    counted: list[Reply] = []
    shards = Shards(transport, 2)
    indexers = Shards(transport, 2, who="indexer")
    calls = Calls(shards, "test", count=counted.append, after_failure=rule)
    calls.include(indexers)
    return calls, shards, indexers, counted


def test_replies_of_two_groups_are_in_order_of_arrival(transport: SimulatedTransport) -> None:
    calls, shards, indexers, counted = two_groups(transport)
    for one in (*shards.up(), *indexers.up()):
        calls.send(one, count, one.who)
    order = ["indexer 2", "shard 1", "indexer 1", "shard 2"]
    transport.script = in_order(order)
    found = [calls.first() for _ in order]
    assert [f"{reply.value[0]} {reply.value[1]}" for reply in found] == order
    assert counted == found
    assert calls.idle


@pytest.mark.parametrize("rule", ["send again", "reassign", "drop"])
@pytest.mark.parametrize("ends", ["dies", "is removed"])
def test_failure_affects_only_the_group_of_the_process(
    transport: SimulatedTransport, rule: Any, ends: str
) -> None:
    calls, shards, indexers, _ = two_groups(transport, rule)
    calls.per_worker = 2
    shards.up()
    indexers.up()
    for group in (shards, indexers):
        for one in group.remote:
            calls.send(one, count, one.seat)
            calls.send(one, count, one.seat)
    dying = indexers.remote[0]
    if ends == "dies":
        dying.channel.die(LostProcessError("gone"))
    else:
        indexers.replace(dying, Fault("hang", "it hangs"))
    work = [(reply.value[0], (reply.worker.who, reply.value[1])) for reply in calls.all()]
    of_indexer_1 = [where for seat, where in work if seat == ("indexer", 1)]
    others = [*shards.remote * 2, *indexers.remote[1:] * 2]
    assert sorted(pair for pair in work if pair[0] != ("indexer", 1)) == sorted(
        (one.seat, one.seat) for one in others
    )
    assert len(of_indexer_1) == (0 if rule == "drop" else 2)
    assert {who for who, _ in of_indexer_1} <= {"indexer"}
    if rule == "send again":
        assert of_indexer_1 == [("indexer", 1)] * 2
    assert (shards.faults.num_restarts, indexers.faults.num_restarts) == (0, 1)
    assert indexers.remote[0] is not dying


def two_rows_not_finite(process: Any) -> None:
    process.record.add_faults([Fault("non_finite", "rewards", count=2)])


def test_replies_count_for_their_group(transport: SimulatedTransport) -> None:
    calls, shards, indexers, _ = two_groups(transport)
    calls.send(indexers.up()[0], two_rows_not_finite)
    calls.all()
    assert (shards.faults.counts["non_finite"], indexers.faults.counts["non_finite"]) == (0, 2)


def test_group_with_a_used_name_or_another_transport_is_refused(
    transport: SimulatedTransport,
) -> None:
    calls, _, _, _ = two_groups(transport)
    for other in (Shards(transport, 1), Shards(SimulatedTransport(), 1, who="other")):
        with pytest.raises(ValueError, match="must have the transport of the shards, and a name"):
            calls.include(other)


class NotesClose(SimulatedTransport):
    """A transport that notes how many of its processes were alive when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_at_close: list[int] = []

    def close(self) -> None:
        self.alive_at_close.append(sum(channel.alive for channel in self.channels))


def test_set_closes_only_a_transport_that_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    config = worker_config(rollout={"num_workers": 2})
    given, opened = NotesClose(), NotesClose()
    workers, shards = WorkerSet(config, transport=given), Shards(given, 2)
    shards.stop()
    assert [channel.alive for channel in given.channels] == [True, True, False, False]
    calls = Calls(workers, "test")
    calls.send(workers.up()[0], version_of, WEIGHTS)
    assert calls.first().value == 0
    workers.stop()
    assert given.alive_at_close == []
    monkeypatch.setattr(worker_set, "open_transport", lambda *_: opened)
    WorkerSet(config).stop()
    assert opened.alive_at_close == [0], "closed once, after its processes have ended"


def test_limit_of_a_start_begins_when_ray_has_placed_a_process_that_could_wait() -> None:
    clock = VirtualClock()
    channel, other = object(), object()
    waiting = [channel]
    transport: Any = SimpleNamespace(
        clock=clock, waiting=lambda channels: (waiting, len(waiting)), resources=lambda: ({}, {})
    )
    start_up = StartUp("worker", "", transport)
    worker: Any = SimpleNamespace(index=1, channel=channel, started_s=clock(), began_s=clock())
    hangs: Any = SimpleNamespace(index=2, channel=other, started_s=clock(), began_s=clock())
    options = RolloutConfig(env="CartPole-v1", worker_startup_timeout_s=30.0)
    for _ in range(20):
        clock.advance(10.0)
        overdue = start_up.overdue([worker, hangs], options, enough_up=True)
        late = clock() - hangs.started_s >= 30.0
        assert [found for found, _ in overdue] == ([hangs] if late else [])
    waiting.clear()  # Ray has placed the worker, which now imports its packages
    clock.advance(20.0)
    assert start_up.overdue([worker], options, enough_up=True) == []
    clock.advance(10.0)
    [(found, why)] = start_up.overdue([worker], options, enough_up=True)
    assert found is worker
    assert "has not ended" in why


def test_later_starts_do_not_extend_the_limit_of_a_start() -> None:
    clock = VirtualClock()
    transport: Any = SimpleNamespace(clock=clock, waiting=lambda channels: ([], 0))
    start_up = StartUp("worker", "", transport)
    options = RolloutConfig(env="CartPole-v1", worker_startup_timeout_s=30.0)

    def started(index: int) -> WorkerHandle:
        return WorkerHandle(index, None, clock(), began_s=clock())  # type: ignore[arg-type]

    hangs, beside = started(1), started(2)
    clock.advance(20.0)
    start_up.came_up(beside)  # both have slowed each other down
    found = []
    for _ in range(4):
        found.append(bool(start_up.overdue([hangs], options, enough_up=True)))
        clock.advance(10.0)
        start_up.came_up(started(2))  # a worker that is restarted again and again
    assert found == [False, False, False, True]


class RefusesStatistics(RolloutWorker):
    def set_statistics(self, statistics: dict[str, Any]) -> None:
        raise ValueError("the wrappers differ:\nValueError: in two lines")


def test_text_of_refused_statistics_is_whole() -> None:
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 1}), kind=RefusesStatistics)
    whole = r"^the wrappers differ:\nValueError: in two lines$"
    with pytest.raises(ValueError, match=whole):
        restore_statistics(workers, {"1": {"statistics": {"vector": {}, "envs": []}}})
