"""Tests of `SocketAllReduce`. Ranks are threads, or processes if the test kills or stops them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from typing import Any

import numpy as np
import pytest
import torch

from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.transport.socket_allreduce import SocketAllReduce
from polopt.rollouts.transport.sockets import CONNECTION_ERRORS

LIMIT_S = 60.0
KEY = b"the key of this group"


class Ranks:
    """A group of ranks that listen. `connect` forms the group."""

    def __init__(self, world: int, timeout_s: float = LIMIT_S) -> None:
        self.ranks = [SocketAllReduce(rank, world, KEY, timeout_s) for rank in range(world)]
        self.addresses = [rank.address for rank in self.ranks]
        self.threads = ThreadPoolExecutor(world)

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return list(self.threads.map(function, range(len(self.ranks))))

    def connect(self) -> None:
        self.on_all(lambda rank: self.ranks[rank].connect(self.addresses, LIMIT_S))

    def sums(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.on_all(lambda rank: self.ranks[rank].sum_(arrays[rank]))
        return arrays

    def failure_of(self, rank: int, count: int = 1000) -> tuple[Exception, float]:
        """Returns the error of a sum that has to fail, and its duration in seconds."""
        began_s = time.monotonic()
        with pytest.raises(CONNECTION_ERRORS) as caught:
            self.ranks[rank].sum_(np.ones(count, np.float32))
        return caught.value, time.monotonic() - began_s

    def close(self) -> None:
        self.on_all(lambda rank: self.ranks[rank].close())
        self.threads.shutdown()


Make = Callable[..., Ranks]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Ranks] = []

    def build(world: int, timeout_s: float = LIMIT_S) -> Ranks:
        made.append(Ranks(world, timeout_s))
        return made[-1]

    yield build
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("world", range(1, 10))
def test_sums_are_the_same_bits_on_all_ranks(make: Make, world: int) -> None:
    group, rng = make(world), np.random.default_rng(world)
    group.connect()
    for count in (0, 1, 9_155, 300_000):  # the last array is larger than the send buffer
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


@pytest.mark.parametrize("count", [1, 26_000, 26_700, 1_000_000])
def test_arrays_around_the_send_buffer_do_not_block(make: Make, count: int) -> None:
    group = make(4)
    group.connect()
    for _ in range(20):
        sums = group.sums([np.ones(count, np.float32) for _ in range(4)])
        assert sums[3][-1] == 4.0


# ---- partners that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_rank_that_leaves_ends_the_sums_of_all_others(make: Make, world: int) -> None:
    group = make(world)
    group.connect()
    group.ranks[world - 1].close()

    def fail(rank: int) -> float:
        if rank == world - 1:
            return 0.0
        _, duration_s = group.failure_of(rank)
        group.ranks[rank].close()  # as AllReducer does, so the other partners of this rank fail
        return duration_s

    assert max(group.on_all(fail)) < LIMIT_S / 2.0


@contextlib.contextmanager
def partner_process(timeout_s: float) -> Iterator[tuple[SocketAllReduce, int]]:
    """Yields rank 0, and the process id of rank 1. Rank 1 sums arrays of 1000 elements until it is
    killed."""
    own = SocketAllReduce(0, 2, KEY, timeout_s)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            other = SocketAllReduce(1, 2, KEY, LIMIT_S)
            os.write(writer, other.address.encode())
            other.connect([own.address, other.address], LIMIT_S)
            while True:
                other.sum_(np.ones(1000, np.float32))
        os._exit(0)
    try:
        own.connect([own.address, os.read(reader, 4096).decode()], LIMIT_S)
        yield own, child
    finally:
        own.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def sum_until_error(own: SocketAllReduce, count: int = 1000) -> tuple[BaseException, float]:
    began_s = time.monotonic()

    def sums() -> None:
        while time.monotonic() < began_s + LIMIT_S:
            own.sum_(np.ones(count, np.float32))

    with pytest.raises(CONNECTION_ERRORS) as caught:
        sums()
    return caught.value, time.monotonic() - began_s


def test_death_of_a_process_ends_the_sum_at_once() -> None:
    with partner_process(LIMIT_S) as (own, pid):
        own.sum_(np.ones(1000, np.float32))
        os.kill(pid, signal.SIGKILL)
        assert sum_until_error(own)[1] < LIMIT_S / 2.0


@pytest.mark.parametrize(("count", "did"), [(1000, "sent"), (1_000_000, "received")])
def test_stopped_process_ends_the_sum_at_the_deadline(count: int, did: str) -> None:
    with partner_process(0.5) as (own, pid):
        own.sum_(np.ones(1000, np.float32))
        os.kill(pid, signal.SIGSTOP)
        error, duration_s = sum_until_error(own, count)
        assert isinstance(error, TimeoutError)
        assert str(error) == f"rank 1 {did} nothing within the timeout"
        assert 0.45 < duration_s < LIMIT_S / 2.0


@pytest.mark.parametrize("counts", [(2, 3), (3, 2), (2, 200_000), (200_000, 2), (200_000, 300_000)])
def test_array_of_another_size_is_an_error_in_both_ranks(
    make: Make, counts: tuple[int, int]
) -> None:
    group = make(2)
    group.connect()

    def fail(rank: int) -> str:
        try:
            group.ranks[rank].sum_(np.ones(counts[rank]))
        except CONNECTION_ERRORS as error:
            return str(error)
        finally:
            group.ranks[rank].close()  # as AllReducer does
        return "nothing"

    sizes = [8 * count for count in counts]
    messages = group.on_all(fail)
    assert "nothing" not in messages
    expected = [f"rank {1 - r} sent {sizes[1 - r]} bytes instead of {sizes[r]}" for r in range(2)]
    assert set(expected) & set(messages)


def test_every_failure_breaks_the_group(make: Make) -> None:
    """`AllReducer` raises the same exception for every failure, and leaves the group."""
    group = make(2, 0.3)
    group.connect()
    spec = GroupSpec(1, 2, "socket", 0.3, 0.3, KEY)
    reducer = AllReducer(spec, 0)
    assert reducer._sockets is not None
    reducer._sockets.close()
    reducer._sockets = group.ranks[0]
    other = group.threads.submit(lambda: [group.ranks[1].sum_(np.ones(3000)) for _ in range(2)])
    with pytest.raises(GroupBroken, match="rank 1 sent 24000 bytes instead of 8"):
        reducer.sum_(torch.ones(2))
    with pytest.raises(CONNECTION_ERRORS):
        other.result(LIMIT_S)
    with pytest.raises(GroupBroken, match="has left the group"):
        reducer.sum_(torch.ones(2))


# ---- joining -----------------------------------------------------------------------------------


def test_missing_rank_ends_the_join_at_the_deadline(make: Make) -> None:
    group = make(3)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect in time"):
        group.ranks[0].connect(group.addresses, 0.3)
    assert 0.25 < time.monotonic() - began_s < LIMIT_S / 2.0


def test_rank_with_another_key_cannot_join(make: Make) -> None:
    group = make(2)
    stranger = SocketAllReduce(1, 2, b"another key", LIMIT_S)
    joining = group.threads.submit(group.ranks[0].connect, group.addresses, LIMIT_S)
    with pytest.raises(AuthenticationError):
        stranger.connect(group.addresses, LIMIT_S)
    stranger.close()
    group.ranks[1].connect(group.addresses, LIMIT_S)
    joining.result(LIMIT_S)
    sums = group.sums([np.ones(2), np.ones(2)])
    assert sums[0].tolist() == [2.0, 2.0]


def test_silent_peers_and_garbage_delay_no_rank(make: Make) -> None:
    group = make(3)
    began_s = time.monotonic()
    with contextlib.ExitStack() as peers:
        for number in range(100):
            peer = peers.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(group.addresses[number % 3])
            if number % 2:
                peer.sendall(b"GET / HTTP/1.1\r\nHost: polopt\r\n\r\n")
        group.connect()
        sums = group.sums([np.ones(1000) for _ in range(3)])
        assert sums[0].tolist() == sums[2].tolist() == [3.0] * 1000
    assert time.monotonic() - began_s < LIMIT_S / 2.0, "handshakes in turn take 400 s"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_groups_leave_no_descriptors_and_directories(quick_collections: None) -> None:
    def run() -> int:
        group = Ranks(4)
        paths = group.addresses
        assert all(os.path.exists(path) for path in paths)
        group.connect()
        assert not any(os.path.exists(os.path.dirname(path)) for path in paths)
        group.close()
        del group
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = run()
    assert [run() for _ in range(10)][-1] <= before
