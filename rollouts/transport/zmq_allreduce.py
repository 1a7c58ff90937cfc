"""`ZmqAllReduce`: sums of small arrays over a group of ranks, by ZeroMQ."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import zmq

from polopt.rollouts.transport.endpoint import Address, Endpoint
from polopt.rollouts.transport.listener import Listener
from polopt.rollouts.transport.messages import configure, milliseconds

#: Events of a connection to a partner after which the partner receives nothing more.
END_OF_CONNECTION = (
    zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)

#: After a connection has ended, messages sent before may arrive for so long.
IN_FLIGHT_S = 0.5


class ZmqAllReduce:
    """Connections of one rank to its partners, the ranks with which it exchanges arrays.

    Each rank receives on one PULL socket that admits its partners and no other (see `Listener`),
    and sends on one PUSH socket for each partner. Messages are the bytes of the arrays. Sums use
    recursive doubling (Thakur et al., 2005): after exchange i, each of 2^i ranks has the sum of all
    of them. All ranks add the same numbers in the same order, so results are equal bit for bit.
    Each rank beyond a power of two first sends its array to a lower one, which returns the result.

    Args:
        host: address of this node at which partners reach it. The system chooses the port.
        rank: 0 to the number of keys - 1.
        public_keys: CURVE keys of all ranks, Z85, by rank.
        secret_key: CURVE key of this rank, Z85.
        passwords: between this rank and each other, by rank.
        timeout_s: limit of each wait for a partner.
        max_bytes: size of the largest array.

    Attributes:
        address: at which it listens.

    Raises:
        zmq.ZMQError: no socket can be bound at that address.
    """

    def __init__(
        self,
        host: str,
        rank: int,
        public_keys: Sequence[bytes],
        secret_key: bytes,
        passwords: Sequence[str],
        timeout_s: float,
        max_bytes: int,
    ) -> None:
        self._rank, self._timeout_s, self._max_bytes = rank, timeout_s, max_bytes
        self._doubling = 1 << (len(public_keys).bit_length() - 1)
        self._beyond = len(public_keys) - self._doubling
        self._keys = {partner: public_keys[partner] for partner in self._partners()}
        self._key_pair = public_keys[rank], secret_key
        self._passwords = passwords
        self._received: dict[str, deque[bytes]] = {k.decode(): deque() for k in self._keys.values()}
        self._senders: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = Listener(self._context, zmq.PULL, host, timeout_s, max_bytes, secret_key)
        self._receiver, self.address = self._listener.socket, self._listener.address
        self._poller.register(self._receiver, zmq.POLLIN)
        for partner, key in self._keys.items():
            self._listener.passwords[key.decode()] = passwords[partner]

    def connect(self, addresses: Sequence[Address], timeout_s: float) -> None:
        """Connects to all partners, and returns after all ranks have connected.

        Args:
            addresses: `address` of all ranks, by rank.
            timeout_s: limit of each wait for a partner.

        Raises:
            OSError: a partner is not reached within the timeout, or does not have its key.
        """
        for partner, key in self._keys.items():
            sender = self._senders[partner] = self._context.socket(zmq.PUSH)
            configure(sender, self._timeout_s, self._max_bytes)
            sender.setsockopt(zmq.RECONNECT_IVL, -1)  # a connection lost is a rank lost
            keys = key, *self._key_pair, self._passwords[partner]
            endpoint = Endpoint(addresses[partner], *keys, self._timeout_s, self._max_bytes)
            self._poller.register(sender.get_monitor_socket(END_OF_CONNECTION), zmq.POLLIN)
            sender.connect(endpoint.authenticate(sender))
        later_s, self._timeout_s = self._timeout_s, timeout_s
        self.sum_(np.zeros(1))
        self._timeout_s = later_s
        self._listener.remove_directory()  # also if this process is killed later

    def sum_(self, array: np.ndarray) -> None:
        """Replaces a contiguous array by its sum over all ranks, in place.

        Raises:
            OSError: a partner has left, or did not send within the timeout. The array then holds a
                partial sum.
            ValueError: the array is larger than the group's limit.
        """
        if array.nbytes > self._max_bytes:
            raise ValueError(f"sum of {array.nbytes} bytes; allowed: up to {self._max_bytes}")
        rank, beyond = self._rank, self._rank + self._doubling
        if rank >= self._doubling:
            self._send(array, rank - self._doubling)
            array[...] = self._receive(array, rank - self._doubling)
            return
        if rank < self._beyond:
            array += self._receive(array, beyond)
        distance = 1
        while distance < self._doubling:
            self._send(array, rank ^ distance)
            array += self._receive(array, rank ^ distance)
            distance *= 2
        if rank < self._beyond:
            self._send(array, beyond)

    def close(self) -> None:
        """Leaves the group; an empty message tells the partners, also where a forked process still
        holds the connections. Takes at most `LINGER_S` seconds."""
        for sender in self._senders.values():
            with contextlib.suppress(zmq.ZMQError):  # the partner has left
                sender.send(b"", zmq.NOBLOCK)
            sender.disable_monitor()
            sender.close()
        self._senders.clear()
        self._listener.close()
        self._context.destroy()

    def _partners(self) -> list[int]:
        if self._rank >= self._doubling:
            return [self._rank - self._doubling]
        distances = [1 << i for i in range(self._doubling.bit_length() - 1)]
        beyond = [self._rank + self._doubling] if self._rank < self._beyond else []
        return [self._rank ^ distance for distance in distances] + beyond

    def _send(self, array: np.ndarray, partner: int) -> None:
        if partner not in self._senders:
            raise ConnectionError("this rank has left the group")
        try:
            self._senders[partner].send(array.tobytes(), zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionError(f"rank {partner} has left") from None

    def _receive(self, array: np.ndarray, partner: int) -> np.ndarray:
        """The next array of a partner, of the same shape and type as `array`."""
        until_s = time.monotonic() + self._timeout_s
        queue = self._received[self._keys[partner].decode()]
        lost: int | None = None
        while not queue:
            wait_ms = milliseconds(until_s - time.monotonic())
            if lost is None:
                ready = dict(self._poller.poll(wait_ms))
            else:
                ready = {self._receiver: zmq.POLLIN} if self._receiver.poll(wait_ms) else {}
            if self._receiver in ready:
                frame = self._receiver.recv(zmq.NOBLOCK, copy=False)
                # Each message carries the key that authenticated it.
                self._received[str(frame.get("User-Id"))].append(frame.bytes)
            elif lost is not None:
                raise ConnectionError(f"rank {lost} has left")
            elif not ready:
                raise TimeoutError(f"rank {partner} sent nothing within {self._timeout_s} s")
            else:  # a rank that left after its last message: that one may still be on its way
                lost = next(r for r, s in self._senders.items() if s.get_monitor_socket() in ready)
                until_s = min(until_s, time.monotonic() + IN_FLIGHT_S)
        data = queue.popleft()
        if len(data) != array.nbytes:
            problem = "has left" if not data else f"sent {len(data)} bytes, not {array.nbytes}"
            raise ConnectionError(f"rank {partner} {problem}")
        return np.frombuffer(data, array.dtype).reshape(array.shape)
