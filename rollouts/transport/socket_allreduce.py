"""`SocketAllReduce`: sums arrays over the processes of one node, by recursive doubling.

The algorithm is from Thakur, Rabenseifner and Gropp, 2005. It needs log2(ranks) exchanges of the
whole array, which suits small arrays. If the number of ranks is not a power of two, each rank
beyond the largest power of two first sends its array to a partner, and finally receives the sum
from this partner.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection

import numpy as np

from polopt.rollouts.transport.sockets import (
    PrivateListener,
    buffer_bytes,
    dial,
    hang_up,
    limit,
)


class SocketAllReduce:
    """The connections of one rank to its partners: the ranks with which it exchanges arrays.

        ranks = SocketAllReduce(rank, world_size, key, timeout_s=60.0)
        ranks.connect(addresses, timeout_s=10.0)    # `address` of every rank, by rank
        ranks.sum_(array)

    Args:
        rank: rank of this process, from 0 to `world_size - 1`.
        world_size: number of ranks.
        key: the key with which the ranks authenticate.
        timeout_s: the longest time to wait for a partner in an exchange.

    Attributes:
        address: address at which this rank listens.

    Raises:
        OSError: the socket cannot be bound.
    """

    def __init__(self, rank: int, world_size: int, key: bytes, timeout_s: float) -> None:
        self._rank = rank
        self._key = key
        self._timeout_s = timeout_s
        # The largest power of two that is at most `world_size`.
        self._doubling = 1 << (world_size.bit_length() - 1)
        self._beyond = world_size - self._doubling  # number of ranks beyond this power of two
        self._connections: dict[int, Connection] = {}  # by rank of the partner
        self._room = 0  # bytes that the kernel buffers for every connection
        self._admitted: queue.SimpleQueue[tuple[Connection, bytes]] = queue.SimpleQueue()
        self._listener = PrivateListener(key, lambda *peer: self._admitted.put(peer))
        self.address = self._listener.address

    def connect(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Connects to all partners, and returns after all ranks have connected.

        Each rank dials its partners with lower ranks, and accepts connections from its partners
        with higher ranks.

        Args:
            addresses: `address` of all ranks, by rank.
            timeout_s: the time limit in seconds for each wait for a partner.

        Raises:
            OSError, EOFError, AuthenticationError: a partner did not connect within the timeout,
                does not have the key, or has left the group.
        """
        missing, until_s = self._partners(), time.monotonic() + timeout_s
        for partner in sorted(p for p in missing if p < self._rank):
            connection = self._connections[partner] = dial(addresses[partner], self._key, timeout_s)
            connection.send_bytes(self._rank.to_bytes(4, "big"))
            missing.remove(partner)
        while missing:
            try:
                left_s = max(0.0, until_s - time.monotonic())
                connection, hello = self._admitted.get(timeout=left_s)
            except queue.Empty:
                raise TimeoutError(f"ranks {missing} did not connect in time") from None
            partner = int.from_bytes(hello, "big")
            if partner in missing:
                self._connections[partner] = connection
                missing.remove(partner)
            else:
                hang_up(connection)
        self._listener.close()
        self._room = min(map(buffer_bytes, self._connections.values()), default=0)
        self._limit(timeout_s)
        self.sum_(np.zeros(1))  # returns once all ranks have connected
        self._limit(self._timeout_s)

    def _limit(self, timeout_s: float) -> None:
        for connection in self._connections.values():
            limit(connection, timeout_s)

    def sum_(self, array: np.ndarray) -> None:
        """Replaces a contiguous array by its sum over all ranks, in place.

        Raises:
            OSError, EOFError: this rank or a partner has left the group. Or a partner did not send
                or receive within the timeout, or sent an array of another size. The array may then
                hold a partial sum.
        """
        rank, beyond = self._rank, self._rank + self._doubling
        if array.size == 0:
            return
        if rank >= self._doubling:
            self._send(array, rank - self._doubling)
            array[...] = self._receive(array, rank - self._doubling)
            return
        if rank < self._beyond:
            array += self._receive(array, beyond)
        distance = 1
        while distance < self._doubling:
            array += self._exchange(array, rank ^ distance)
            distance *= 2
        if rank < self._beyond:
            self._send(array, beyond)

    def close(self) -> None:
        """Leaves the group. The partners notice this at once."""
        for connection in self._connections.values():
            hang_up(connection)
        self._connections.clear()
        self._listener.close()
        while not self._admitted.empty():
            hang_up(self._admitted.get()[0])

    def _partners(self) -> list[int]:
        if self._rank >= self._doubling:
            return [self._rank - self._doubling]
        distances = [1 << i for i in range(self._doubling.bit_length() - 1)]
        beyond = [self._rank + self._doubling] if self._rank < self._beyond else []
        return [self._rank ^ distance for distance in distances] + beyond

    def _exchange(self, array: np.ndarray, partner: int) -> np.ndarray:
        """Sends an array to a partner, and returns the partner's array.

        If an array does not fit into the kernel's buffer, the higher rank receives first. If both
        ranks sent first, each would wait for the other to receive."""
        if array.nbytes > self._room and self._rank > partner:
            other = self._receive(array, partner)
            self._send(array, partner)
            return other
        self._send(array, partner)
        return self._receive(array, partner)

    def _connection(self, partner: int) -> Connection:
        if partner not in self._connections:
            raise ConnectionError("this rank has left the group")
        return self._connections[partner]

    def _send(self, array: np.ndarray, partner: int) -> None:
        try:
            self._connection(partner).send_bytes(array.data.cast("B"))
        except BlockingIOError:
            raise self._timeout(partner, "received") from None

    def _receive(self, array: np.ndarray, partner: int) -> np.ndarray:
        """Receives the next array of a partner. It has the shape and dtype of `array`."""
        received = np.empty_like(array)
        try:
            size = self._connection(partner).recv_bytes_into(received.data.cast("B"))
        except BlockingIOError:
            raise self._timeout(partner, "sent") from None
        except BufferTooShort as error:
            size = len(error.args[0])
        if size != array.nbytes:
            raise ConnectionError(f"rank {partner} sent {size} bytes instead of {array.nbytes}")
        return received

    def _timeout(self, partner: int, did: str) -> TimeoutError:
        return TimeoutError(f"rank {partner} {did} nothing within the timeout")
