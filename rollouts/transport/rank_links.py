"""`RankLinks`: TCP connections between the ranks of a group, over which small arrays are summed.

gloo hands each sum to threads of its own, which have to be woken: beside two busy cores that takes
milliseconds for an array of any size. Here the rank's own thread sends and receives, so the last
rank finds the others' numbers in its buffer and does not sleep.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Iterator

import numpy as np
from torch.distributed import Store  # type: ignore[attr-defined]

from polopt.rollouts.transport.sockets import MAX_TIMEOUT_S, fill, hang_up

#: Two ranks that send to each other both fill a buffer of the kernel's before either reads. This
#: much always fits, so that neither waits without end.
CHUNK_BYTES = 1 << 16


class RankLinks:
    """A rank's connections, to those alone with which it exchanges numbers.

    Sums by recursive doubling (Thakur et al., 2005): after exchange i, each of 2^i ranks has the
    sum of all of them. All add the same numbers in the same order, so results are the same bit for
    bit. Ranks beyond a power of two hand theirs to another first, and get the result in the end.

    Args:
        store: holds the addresses at which ranks listen; one for each group.
        token: secret of the group, which its ranks got through Ray. A peer that does not send it
            is disconnected.
        host: the address of this rank at which others can reach it.
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        join_timeout_s: until all connections stand.
        timeout_s: of each wait for another rank, later.

    Raises:
        OSError: connections cannot be made within `join_timeout_s`.
        RuntimeError: likewise; another rank has not said where it listens.
    """

    def __init__(
        self,
        store: Store,
        token: bytes,
        host: str,
        rank: int,
        world_size: int,
        join_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._doubling = 1 << (world_size.bit_length() - 1)
        self._beyond = world_size - self._doubling
        self._links: dict[int, socket.socket] = {}
        try:
            self._connect(store, token, host, time.monotonic() + min(join_timeout_s, MAX_TIMEOUT_S))
            for link in self._links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.settimeout(min(timeout_s, MAX_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def sum_(self, array: np.ndarray) -> None:
        """Replaces a contiguous array by its sum over all ranks, in place.

        Raises:
            OSError: another rank has left, or did not come within the timeout. What the array
                holds then must not be used.
        """
        rank, theirs = self._rank, np.empty_like(array)
        if rank >= self._doubling:
            self._send(array, rank - self._doubling)
            self._receive(array, rank - self._doubling)
            return
        if rank < self._beyond:
            self._receive(theirs, rank + self._doubling)
            array += theirs
        for distance in self._distances():
            self._exchange(array, theirs, rank ^ distance)
            array += theirs
        if rank < self._beyond:
            self._send(array, rank + self._doubling)

    def close(self) -> None:
        """Leaves; whoever waits for this rank learns of it at once."""
        for link in self._links.values():
            hang_up(link)
        self._links.clear()

    def _distances(self) -> Iterator[int]:
        distance = 1
        while distance < self._doubling:
            yield distance
            distance *= 2

    def _partners(self) -> list[int]:
        if self._rank >= self._doubling:
            return [self._rank - self._doubling]
        partners = [self._rank ^ distance for distance in self._distances()]
        return partners + ([self._rank + self._doubling] if self._rank < self._beyond else [])

    def _connect(self, store: Store, token: bytes, host: str, until_s: float) -> None:
        """Connects to partners of lower rank, whose kernels accept before they do, and then accepts
        those of higher rank; so there is no circular wait."""
        partners = self._partners()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=1024) as listener:
            store.set(f"links/{self._rank}", f"{host} {listener.getsockname()[1]}")
            for partner in partners:
                if partner < self._rank:
                    address, port = store.get(f"links/{partner}").decode().split()
                    link = socket.create_connection((address, int(port)), _remaining_s(until_s))
                    self._links[partner] = link
                    link.sendall(token + self._rank.to_bytes(4, "big"))
            missing = {partner for partner in partners if partner > self._rank}
            with selectors.DefaultSelector() as selector:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
                try:
                    self._accept(selector, listener, token, missing, until_s)
                finally:
                    for key in list(selector.get_map().values()):
                        if isinstance(key.fileobj, socket.socket):
                            key.fileobj.close()

    def _accept(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        token: bytes,
        missing: set[int],
        until_s: float,
    ) -> None:
        """Reads from all peers as they send, so that a silent one delays no other."""
        while missing:
            for key, _ in selector.select(_remaining_s(until_s)):
                if key.fileobj is listener:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        new, _ = listener.accept()
                        new.setblocking(False)
                        selector.register(new, selectors.EVENT_READ, bytearray())
                    continue
                peer, received = key.fileobj, key.data
                assert isinstance(peer, socket.socket)
                done = _read_greeting(peer, received, len(token) + 4)
                if not done:
                    continue
                selector.unregister(peer)
                rank = int.from_bytes(received[-4:], "big")
                known = hmac.compare_digest(bytes(received[:-4]), token)
                if known and rank in missing:
                    missing.remove(rank)
                    self._links[rank] = peer
                else:
                    peer.close()

    def _send(self, array: np.ndarray, partner: int) -> None:
        self._links[partner].sendall(_bytes(array))

    def _receive(self, array: np.ndarray, partner: int) -> None:
        if not fill(_bytes(array), self._links[partner]):
            raise ConnectionError(f"rank {partner} has left")

    def _exchange(self, mine: np.ndarray, theirs: np.ndarray, partner: int) -> None:
        step = max(1, CHUNK_BYTES // mine.itemsize)
        out, into = mine.reshape(-1), theirs.reshape(-1)
        for first in range(0, len(out), step):
            self._send(out[first : first + step], partner)
            self._receive(into[first : first + step], partner)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).data.cast("B")


def _remaining_s(until_s: float) -> float:
    remaining_s = until_s - time.monotonic()
    if remaining_s <= 0.0:
        raise TimeoutError("other ranks did not connect in time")
    return remaining_s


def _read_greeting(peer: socket.socket, received: bytearray, size: int) -> bool:
    """Reads what has arrived of the first `size` bytes, and not one more; whether these are
    complete, or will never be."""
    try:
        more = peer.recv(size - len(received))
    except BlockingIOError:
        return False
    except OSError:
        return True
    received += more
    return not more or len(received) == size


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches `host`, where all ranks go: so all of
    them can reach it there. Sends nothing.

    Raises:
        OSError: there is no way to `host`.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
