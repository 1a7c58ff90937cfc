"""`RankLinks`: sums over connections of ranks' own; each rank is a thread here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore

from polopt.rollouts.transport.rank_links import CHUNK_BYTES, RankLinks, address_towards

HOST = "127.0.0.1"
TOKEN = b"0123456789abcdef"


class Group:
    """As many ranks as asked for, each in a thread of its own."""

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.store = PrefixStore("test", HashStore())
        self.store.set_timeout(timedelta(seconds=20))
        self.threads = ThreadPoolExecutor(world)
        self.ranks = self.on_all(self.join)

    def join(self, rank: int) -> RankLinks:
        return RankLinks(self.store, TOKEN, HOST, rank, self.world, 20.0, self.timeout_s)

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        return list(self.threads.map(function, range(self.world)))

    def sums(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.on_all(lambda rank: self.ranks[rank].sum_(arrays[rank]))
        return arrays

    def failure_of(self, rank: int) -> tuple[Exception, float]:
        """What a sum ends with that has to fail, and after how many seconds."""
        began_s = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError)) as caught:
            self.ranks[rank].sum_(np.ones(1000, np.float32))
        return caught.value, time.monotonic() - began_s

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.threads.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def made(*args: Any) -> Group:
        groups.append(Group(*args))
        return groups[-1]

    yield made
    for group in groups:
        group.close()


@pytest.mark.parametrize("world", range(1, 10))
def test_sums_are_right_and_the_same_bits_on_all_ranks(
    make: Callable[..., Group], world: int
) -> None:
    group, rng = make(world), np.random.default_rng(world)
    for count in (1, 9_155, 3 * CHUNK_BYTES // 4 + 5):
        terms = rng.standard_normal((world, count)).astype(np.float32)
        sums = group.sums(list(terms.copy()))
        assert len({result.tobytes() for result in sums}) == 1
        np.testing.assert_allclose(
            sums[0], terms.astype(np.float64).sum(0), rtol=1e-4, atol=1e-5 * world
        )
    counts = group.sums([np.array([rank, 1], np.int64) for rank in range(world)])
    assert counts[-1].tolist() == [world * (world - 1) // 2, world]
    moments = group.sums([np.array([1e17 if rank else 1.0]) for rank in range(world)])
    assert moments[0].dtype == np.float64


def test_each_rank_is_connected_to_few(make: Callable[..., Group]) -> None:
    connected = [sorted(links._links) for links in make(6).ranks]
    assert connected == [[1, 2, 4], [0, 3, 5], [0, 3], [1, 2], [0], [1]]


def test_ranks_ahead_of_others_do_not_disturb_them(make: Callable[..., Group]) -> None:
    group = make(5)

    def rounds(rank: int) -> list[float]:
        got = []
        for number in range(200):
            array = np.full(3, float(number + rank))
            group.ranks[rank].sum_(array)
            got.append(float(array[0]))
        return got

    expected = [5.0 * number + 10.0 for number in range(200)]
    assert group.on_all(rounds) == [expected] * 5


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_rank_that_leaves_is_noticed_by_all_at_once(
    make: Callable[..., Group], world: int
) -> None:
    group = make(world)
    gone = world - 1
    group.ranks[gone].close()

    def fail(rank: int) -> float:
        if rank == gone:
            return 0.0
        _, duration_s = group.failure_of(rank)
        group.ranks[rank].close()  # as AllReducer does, so that those behind it learn of it, too
        return duration_s

    assert max(group.on_all(fail)) < 60.0


def test_silent_rank_times_out_after_the_limit(make: Callable[..., Group]) -> None:
    error, duration_s = make(2, 0.4).failure_of(0)
    assert isinstance(error, TimeoutError)
    assert 0.35 < duration_s < 60.0


def test_a_rank_that_never_comes_ends_the_join() -> None:
    store = PrefixStore("test", HashStore())
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        RankLinks(store, TOKEN, HOST, 0, 2, 0.3, 60.0)
    assert 0.25 < time.monotonic() - began_s < 60.0


def listening(store: PrefixStore) -> tuple[str, int]:
    address, port = store.get("links/0").decode().split()
    return address, int(port)


def test_silent_and_unauthenticated_peers_delay_no_rank() -> None:
    """64 silent peers (1 s for each would be too long), and peers that leave, send something else,
    a wrong token, or a rank that is not expected."""
    store = PrefixStore("test", HashStore())
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(RankLinks, store, TOKEN, HOST, 0, 2, 20.0, 20.0)
        peers = [socket.create_connection(listening(store)) for _ in range(68)]
        peers[0].close()
        peers[1].sendall(b"GET / HTTP/1.1\r\nHost: polopt\r\n\r\n")
        peers[2].sendall(b"0" * 16 + (1).to_bytes(4, "big"))
        peers[3].sendall(TOKEN + (9).to_bytes(4, "big"))
        one = RankLinks(store, TOKEN, HOST, 1, 2, 20.0, 20.0)
        links = zero.result(20.0)
    assert list(links._links) == [1]
    thread = threading.Thread(target=one.sum_, args=(np.ones(2),))
    thread.start()
    array = np.ones(2)
    links.sum_(array)
    thread.join()
    assert array.tolist() == [2.0, 2.0]
    for link in (*peers, links, one):
        link.close()


def test_numbers_right_behind_the_greeting_are_not_lost() -> None:
    store = PrefixStore("test", HashStore())
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(RankLinks, store, TOKEN, HOST, 0, 2, 20.0, 20.0)
        peer = socket.create_connection(listening(store))
        peer.sendall(TOKEN + (1).to_bytes(4, "big") + np.full(4, 5.0).tobytes())
        links = joining.result(20.0)
    array = np.ones(4)
    links.sum_(array)
    assert array.tolist() == [6.0] * 4
    links.close()
    peer.close()


def test_the_address_others_reach_this_machine_at() -> None:
    assert address_towards(HOST) == HOST
    with pytest.raises(socket.gaierror):
        address_towards("no.such.host.invalid")
