"""`ZmqAllReduce`: each rank is a thread. Groups form over tcp (CURVE) and within a node (PLAIN)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq
from rpc_fakes import connect_raw
from zmq.utils.monitor import recv_monitor_message

from polopt.rollouts.transport.collective import (
    SMALL_TENSOR_BYTES,
    STATISTICS_BYTES,
    GroupSpec,
    largest_sum,
    with_keys,
)
from polopt.rollouts.transport.endpoint import Address
from polopt.rollouts.transport.messages import MAX_FRAME_BYTES
from polopt.rollouts.transport.zmq_allreduce import ZmqAllReduce

HOST = "127.0.0.1"
LIMIT_S = 60.0
AUTHENTICATED = zmq.Event.HANDSHAKE_SUCCEEDED
REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH


class Ranks:
    """A group of ranks that listen; `connect` forms the group."""

    def __init__(
        self,
        world: int,
        timeout_s: float = LIMIT_S,
        network: str = "ipc",
        max_bytes: int = largest_sum(4_000_000),
    ) -> None:
        spec = GroupSpec(0, world, "zmq", timeout_s, timeout_s, max_bytes=max_bytes)
        self.specs = with_keys(spec)
        self.ranks = [
            ZmqAllReduce(
                HOST, r, spec.public_keys, spec.secret_key, spec.passwords, timeout_s, max_bytes
            )
            for r, spec in enumerate(self.specs)
        ]
        assert all(rank.address.ipc for rank in self.ranks)
        self.addresses = [
            rank.address if network == "ipc" else rank.address._replace(ipc="")
            for rank in self.ranks
        ]
        self.threads = ThreadPoolExecutor(world)

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return list(self.threads.map(function, range(len(self.ranks))))

    def connect(self) -> None:
        self.on_all(lambda rank: self.ranks[rank].connect(self.addresses, LIMIT_S))

    def sums(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.on_all(lambda rank: self.ranks[rank].sum_(arrays[rank]))
        return arrays

    def failure_of(self, rank: int) -> tuple[OSError, float]:
        """Error of a sum that has to fail, and its duration in seconds."""
        began_s = time.monotonic()
        with pytest.raises(OSError, match="rank") as caught:
            self.ranks[rank].sum_(np.ones(1000, np.float32))
        return caught.value, time.monotonic() - began_s

    def close(self) -> None:
        # At once, as in processes of their own: each may wait for a partner that has left.
        self.on_all(lambda rank: self.ranks[rank].close())
        self.threads.shutdown()


Make = Callable[..., Ranks]


@pytest.fixture(params=["tcp", "ipc"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Ranks] = []

    def build(world: int, timeout_s: float = LIMIT_S, **more: int) -> Ranks:
        made.append(Ranks(world, timeout_s, request.param, **more))
        return made[-1]

    yield build
    for ranks in made:
        ranks.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("world", range(1, 8))
def test_sums_are_the_same_bits_on_all_ranks(make: Make, world: int) -> None:
    group, rng = make(world), np.random.default_rng(world)
    group.connect()
    for count in (1, 9_155, 300_000):
        terms = rng.standard_normal((world, count)).astype(np.float32)
        sums = group.sums(list(terms.copy()))
        assert len({result.tobytes() for result in sums}) == 1
        np.testing.assert_allclose(
            sums[0], terms.astype(np.float64).sum(0), rtol=1e-4, atol=1e-5 * world
        )
    counts = group.sums([np.array([[rank, 1]], np.int64) for rank in range(world)])
    assert counts[-1].tolist() == [[world * (world - 1) // 2, world]]
    moments = group.sums([np.array([1e17 if rank else 1.0]) for rank in range(world)])
    assert moments[0].dtype == np.float64


def test_faster_ranks_do_not_mix_up_rounds(make: Make) -> None:
    group = make(5)
    group.connect()

    def rounds(rank: int) -> list[float]:
        results = []
        for number in range(200):
            array = np.full(3, float(number + rank))
            group.ranks[rank].sum_(array)
            results.append(float(array[0]))
        return results

    expected = [5.0 * number + 10.0 for number in range(200)]
    assert group.on_all(rounds) == [expected] * 5


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_closed_rank_ends_the_sums_of_all_others(make: Make, world: int) -> None:
    group = make(world)
    group.connect()
    group.ranks[world - 1].close()

    def fail(rank: int) -> float:
        if rank == world - 1:
            return 0.0
        error, duration_s = group.failure_of(rank)
        assert "has left" in str(error)
        group.ranks[rank].close()  # as AllReducer does, so that the next partners fail, too
        return duration_s

    assert max(group.on_all(fail)) < LIMIT_S / 2.0


def test_silent_rank_ends_the_sum_at_the_deadline(make: Make) -> None:
    group = make(2, 0.5)
    group.connect()
    error, duration_s = group.failure_of(0)
    assert isinstance(error, TimeoutError)
    assert 0.45 < duration_s < LIMIT_S


def test_missing_rank_ends_the_join_at_the_deadline(make: Make) -> None:
    group = make(2)
    with pytest.raises(TimeoutError, match=r"rank 1 sent nothing within 0.3 s"):
        group.ranks[0].connect(group.addresses, 0.3)


def test_array_of_another_size_is_an_error(make: Make) -> None:
    group = make(2)
    group.connect()
    other = group.threads.submit(lambda: group.ranks[1].sum_(np.ones(3)))
    with pytest.raises(ConnectionError, match="rank 1 sent 24 bytes, not 16"):
        group.ranks[0].sum_(np.ones(2))
    with pytest.raises(ConnectionError, match="rank 0 sent 16 bytes, not 24"):
        other.result(LIMIT_S)


def test_group_of_small_sums_accepts_no_larger_ones(make: Make) -> None:
    limit = largest_sum(SMALL_TENSOR_BYTES)
    assert limit == SMALL_TENSOR_BYTES + STATISTICS_BYTES
    group = make(2, max_bytes=limit)
    group.connect()
    sums = group.sums([np.ones(limit // 4, np.float32) for _ in range(2)])
    assert sums[0].min() == 2.0
    with pytest.raises(ValueError, match=f"allowed: up to {limit}"):
        group.ranks[0].sum_(np.ones(limit // 4 + 1, np.float32))
    for rank in group.ranks:  # who is not a rank may announce so much, too
        assert limit <= rank._receiver.maxmsgsize < limit + 100
    assert largest_sum(SMALL_TENSOR_BYTES + 4) > MAX_FRAME_BYTES


def test_silent_and_unknown_peers_delay_no_rank(make: Make, context: zmq.Context[Any]) -> None:
    """64 silent connections, raw bytes, no key, and an unknown key."""
    group = make(2)
    peers = [connect_raw(group.addresses[0]) for _ in range(66)]
    peers[0].close()
    peers[1].sendall(b"GET / HTTP/1.1\r\nHost: polopt\r\n\r\n")
    intruders = []
    for keys in (None, zmq.curve_keypair()):
        intruder = sender(context, group, keys)
        intruder.send(np.full(1000, 9e9).tobytes(), zmq.NOBLOCK)
        intruders.append(intruder)
    monitor = intruders[1].get_monitor_socket()
    assert monitor.poll(int(1e3 * LIMIT_S)), "an answer beside 64"
    assert recv_monitor_message(monitor)["event"] == REFUSED
    began_s = time.monotonic()
    group.connect()
    sums = group.sums([np.ones(1000), np.ones(1000)])
    assert sums[0].tolist() == sums[1].tolist() == [2.0] * 1000
    assert time.monotonic() - began_s < LIMIT_S / 2.0, "64 timeouts of a handshake are 256 s"
    for peer in peers:
        peer.close()


def sender(
    context: zmq.Context[Any],
    group: Ranks,
    keys: tuple[bytes, bytes] | None,
    password: str = "wrong",
) -> zmq.Socket[Any]:
    """A PUSH socket that connects to rank 0."""
    made = context.socket(zmq.PUSH)
    made.linger = 0
    address = group.addresses[0]
    if keys is not None and address.ipc:
        made.plain_username, made.plain_password = keys[0], password.encode()
    elif keys is not None:
        made.curve_serverkey = group.specs[0].public_keys[0]
        made.curve_publickey, made.curve_secretkey = keys
    made.get_monitor_socket(AUTHENTICATED | REFUSED)
    made.connect(address.ipc or address.tcp)
    return made


def test_unknown_key_is_refused(make: Make, context: zmq.Context[Any]) -> None:
    group = make(2)
    events, partner = [], group.specs[1]
    for keys in (zmq.curve_keypair(), (partner.public_keys[1], partner.secret_key)):
        peer = sender(context, group, keys, partner.passwords[0])
        monitor = peer.get_monitor_socket()
        assert monitor.poll(int(1e3 * LIMIT_S))
        events.append(recv_monitor_message(monitor)["event"])
    assert events == [REFUSED, AUTHENTICATED]


def test_rank_cannot_take_the_place_of_another(context: zmq.Context[Any]) -> None:
    group = Ranks(3)
    events, other = [], group.specs[2]
    for named in (1, 2):
        keys = other.public_keys[named], other.secret_key
        peer = sender(context, group, keys, other.passwords[0])
        monitor = peer.get_monitor_socket()
        assert monitor.poll(int(1e3 * LIMIT_S))
        events.append(recv_monitor_message(monitor)["event"])
    assert events == [REFUSED, AUTHENTICATED]
    group.close()


def test_joined_group_leaves_no_directory(make: Make) -> None:
    group = make(4)
    paths = [rank.address.ipc.removeprefix("ipc://") for rank in group.ranks]
    assert all(os.path.exists(path) for path in paths)
    group.connect()
    assert not any(os.path.exists(os.path.dirname(path)) for path in paths)


def test_peer_at_a_ranks_address_cannot_take_its_place(
    make: Make, context: zmq.Context[Any]
) -> None:
    group = make(2)
    false_rank = context.socket(zmq.PULL)
    false_rank.curve_server = 1
    false_rank.curve_publickey, false_rank.curve_secretkey = zmq.curve_keypair()
    port = false_rank.bind_to_random_port(f"tcp://{HOST}")
    with pytest.raises(OSError, match="rank 1"):
        group.ranks[0].connect([group.addresses[0], Address(f"tcp://{HOST}:{port}")], 2.0)
    assert not false_rank.poll(0)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_fifty_groups_leak_no_descriptors(make: Make) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = 0
    for number in range(51):
        group = Ranks(2)
        group.connect()
        group.close()
        before = before if number else count()
    assert count() <= before
