"""Messages over ZeroMQ: encoding, keys, and the options of every socket.

A message is a list of frames: one of the kinds below, for calls and answers the number of the call,
a pickle, and the pickle's out-of-band buffers (pickle protocol 5, PEP 574), one frame each. ZeroMQ
delivers a message whole or not at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

#: Kinds of messages. HELLO: first message of a worker. END, from the client: return from `serve`;
#: from the server: no answer follows.
HELLO, CALL, ANSWER, END = b"hello", b"call", b"answer", b"end"
#: Largest frame. ZeroMQ closes a connection whose peer announces a larger one, before it allocates.
MAX_FRAME_BYTES = 64 << 20
#: Messages that wait for one peer to read them. More than `max_requests_in_flight_per_worker` can
#: be, so that only a peer that reads nothing reaches it.
HIGH_WATER_MARK = 1100
#: A peer that has not authenticated after this time is disconnected.
HANDSHAKE_TIMEOUT_S = 4.0
#: Interval of pings over an idle connection.
HEARTBEAT_INTERVAL_S = 5.0
#: Limit for messages still queued when a socket closes.
LINGER_S = 1.0
BACKLOG = 1024


class Endpoint(NamedTuple):
    """Address and keys for one connection of one worker; sent through Ray.

    Attributes:
        address: of the client's ROUTER socket, `tcp://host:port`.
        server_key: public CURVE key of that socket, Z85.
        public_key: CURVE key pair of this connection, Z85.
        secret_key: likewise.
        heartbeat_timeout_s: a client that answers no ping for this time is gone.
    """

    address: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes
    heartbeat_timeout_s: float

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"  # without the secret key


def configure(socket: zmq.Socket[bytes], heartbeat_timeout_s: float) -> None:
    """Sets the limits that every socket has.

    Args:
        socket: not yet bound or connected.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1e3 * HANDSHAKE_TIMEOUT_S))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * min(HEARTBEAT_INTERVAL_S, heartbeat_timeout_s)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, min(int(1e3 * heartbeat_timeout_s), 2**31 - 1))
    socket.setsockopt(zmq.LINGER, int(1e3 * LINGER_S))


def encode(message: Any) -> list[bytes | memoryview]:
    """Frames of a picklable object.

    Raises:
        ValueError: a frame is larger than `MAX_FRAME_BYTES`.
        Exception: the object cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    frames: list[bytes | memoryview] = [
        pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    ]
    frames += [buffer.raw() for buffer in buffers]
    largest = max(memoryview(frame).nbytes for frame in frames)
    if largest > MAX_FRAME_BYTES:
        raise ValueError(
            f"message with a part of {largest} bytes; allowed: up to {MAX_FRAME_BYTES} "
            "(set transport: ray for larger ones)"
        )
    return frames


def decode(frames: Sequence[zmq.Frame]) -> Any:
    """The object of these frames. Arrays in it own their memory and are writable.

    Raises:
        Exception: whatever unpickling raises.
    """
    if not frames:
        raise pickle.UnpicklingError("message without a pickle")
    return pickle.loads(frames[0].buffer, buffers=[bytearray(f.buffer) for f in frames[1:]])
