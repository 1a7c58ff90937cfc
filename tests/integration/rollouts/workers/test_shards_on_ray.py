"""`Calls` of replay shards on Ray, with values that stay in the shards' processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from fakes import pid_of
from ray import cloudpickle
from toy_shards import Shard, Shards, add_rows, count, make_rows
from waiting import wait_until

from polopt.rollouts.transport import socket_channel
from polopt.rollouts.transport.ray_channel import RayTransport
from polopt.rollouts.transport.references import Reference
from polopt.rollouts.transport.socket_channel import SocketTransport, open_transport
from polopt.rollouts.workers.calls import Calls

#: A row has 4 kB, and a fragment has 8 MB.
COLUMNS, ROWS = 1000, 2000
PART_BYTES = 4 * COLUMNS * ROWS
both = pytest.mark.parametrize("shards", ["ray", "socket"], indirect=True)


@contextlib.contextmanager
def started(transport: str) -> Iterator[Shards]:
    opened = open_transport(transport, 60.0)
    made = Shards(opened, 3, COLUMNS, worker_timeout_s=60.0)
    try:
        made.up()
        yield made
    finally:
        made.stop()
        opened.close()


@pytest.fixture(scope="module")
def of_transport(ray_session: None) -> Iterator[dict[str, Shards]]:
    with started("ray") as through_ray, started("socket") as through_sockets:
        yield {"ray": through_ray, "socket": through_sockets}


@pytest.fixture
def shards(of_transport: dict[str, Shards], request: pytest.FixtureRequest) -> Shards:
    found = of_transport[request.param]
    kind = SocketTransport if request.param == "socket" else RayTransport
    assert type(found.transport) is kind
    wait_until(lambda: len(found.up()) == 3)  # an earlier test may have killed one
    return found


def empty(shard: Shard) -> int:
    shard.rows = shard.rows[:0]
    return shard.index


@both
def test_driver_moves_no_data(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(shards, "test")
    answers: list[int] = []
    get, decode = ray.get, socket_channel._decoded

    def measured_get(refs: Any, **options: Any) -> Any:
        found = get(refs, **options)
        answers.append(len(dumps(found)))
        return found

    def measured_decode(message: bytes) -> Any:
        answers.append(len(message))
        return decode(message)

    sent: list[int] = []
    dumps = cloudpickle.dumps

    def measured_dumps(value: Any, *args: Any, **options: Any) -> bytes:
        encoded = dumps(value, *args, **options)
        sent.append(len(encoded))
        return encoded

    for worker in shards.up():
        calls.send(worker, empty)
    calls.all()
    monkeypatch.setattr(ray, "get", measured_get)
    monkeypatch.setattr(socket_channel, "_decoded", measured_decode)
    monkeypatch.setattr(cloudpickle, "dumps", measured_dumps)
    one, two, three = shards.up()
    for worker in (one, two):
        calls.send(worker, make_rows, ROWS, by_reference=True)
    replies = calls.all()
    parts = [reply.value for reply in replies]
    kind = Reference if isinstance(shards.transport, SocketTransport) else ray.ObjectRef
    assert [type(part) for part in parts] == [kind, kind]
    assert [reply.counts.num_bytes for reply in replies] == [PART_BYTES] * 2
    calls.send(three, add_rows, *parts)
    calls.send(one, add_rows, parts[1])
    of_one, of_three = calls.all()
    assert of_one.value == (ROWS, 2.0 * ROWS)
    assert of_three.value == (2 * ROWS, 3.0 * ROWS)
    assert len(answers) == 4
    assert max(answers) < 10_000
    assert max(sent) < 10_000


@both
def test_calls_of_a_shard_run_in_the_order_of_sending(shards: Shards) -> None:
    """This also holds if some of the calls have references, and others do not."""
    kind = Reference if isinstance(shards.transport, SocketTransport) else ray.ObjectRef
    calls = Calls(shards, "test", per_worker=8)
    one, two, _ = shards.up()
    calls.send(two, empty)
    calls.send(one, make_rows, 5, by_reference=True)
    rows = calls.all()[0].value
    for number in range(12):
        if number % 3 == 1:
            calls.send(two, add_rows, rows, by_reference=number % 2 == 0)
        else:
            calls.send(two, count, number)
    replies = [calls.first() for _ in range(12)]
    found = [reply.value for i, reply in enumerate(replies) if i % 3 != 1]
    assert [number for number, _, _ in found] == [0, 2, 3, 5, 6, 8, 9, 11]
    assert [rows for _, _, rows in found] == [0, 5, 5, 10, 10, 15, 15, 20]
    assert [type(replies[i].value) is kind for i in (1, 4, 7, 10)] == [
        False,
        True,
        False,
        True,
    ]
    assert shards.faults.num_restarts == 0


@both
def test_killed_shard_is_replaced(shards: Shards) -> None:
    calls = Calls(shards, "test")
    before = shards.faults.num_restarts
    _, two, _ = shards.up()
    calls.send(two, add_rows, np.ones((3, COLUMNS), np.float32))
    assert calls.first().value[0] >= 3
    os.kill(pid_of(two), signal.SIGKILL)
    for worker in shards.up():
        calls.send(worker, count, "work")
    values = [reply.value for reply in calls.all()]
    assert [(tag, index) for tag, index, _ in values] == [("work", 1), ("work", 2), ("work", 3)]
    assert values[1][2] == 0, "the replacement begins empty"
    assert shards.faults.num_restarts == before + 1
    assert shards.stats()["last_death_worker"] == 2


@both
def test_lost_reference_costs_no_shard_but_its_maker(shards: Shards) -> None:
    calls = Calls(shards, "test", after_failure="drop")
    before = shards.faults.num_restarts
    one, two, _ = shards.up()
    calls.send(one, make_rows, 1, by_reference=True)
    rows = calls.first().value
    os.kill(pid_of(one), signal.SIGKILL)
    calls.send(one, count)
    assert calls.next().failure.kind == "death"
    until_s = time.monotonic() + 60.0
    failure = None
    while failure is None:  # Ray drops the object some seconds after the death of its owner
        calls.send(two, add_rows, rows)
        failure = calls.next().failure
        assert time.monotonic() < until_s
        time.sleep(0.5)
    assert failure.kind == "reference"
    assert "add_rows failed in shard 2: an argument is lost: " in failure.message
    calls.send(two, count, "goes on")
    assert calls.first().worker is two
    assert shards.faults.num_restarts == before + 1


@both
def test_second_group_shares_the_transport(shards: Shards) -> None:
    """Each group gets the answers of its own calls, whichever group waits. When one group ends, the
    other group keeps its connections."""
    restarts = shards.faults.num_restarts
    other = Shards(shards.transport, 1, 2, worker_timeout_s=60.0)
    calls, others = Calls(shards, "test"), Calls(other, "other", per_worker=2)
    (only,) = other.up()
    others.send(only, count, "first")
    others.send(only, count, "second")
    for worker in shards.up():
        calls.send(worker, count, worker.index)
    assert [reply.value[:2] for reply in calls.all()] == [(1, 1), (2, 2), (3, 3)]
    assert [reply.value for reply in others.all()] == [("first", 1, 0), ("second", 1, 0)]
    calls.send(shards.up()[0], count, "sent before")
    other.stop()
    assert calls.first().value[:2] == ("sent before", 1)
    before = getattr(shards.transport, "num_calls", 0)
    for worker in shards.up():
        calls.send(worker, count, "sent after")
    assert len(calls.all()) == 3
    assert shards.faults.num_restarts == restarts
    if isinstance(shards.transport, SocketTransport):
        assert shards.transport.num_calls == before + 3
        assert shards.transport.paths([w.channel for w in shards.remote]) == "socket"
