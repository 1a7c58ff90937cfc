"""Messages over ZeroMQ: encoding, and the options of every socket.

The first frame of a message is its kind, the number of the call and a pickle. Large out-of-band
buffers of the pickle (protocol 5, PEP 574) follow, one frame each. ZeroMQ delivers a message whole
or not at all.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import zmq

#: Kinds of messages. HELLO: first message of a worker. END, from the client: return from `serve`;
#: from the server: no answer follows.
HELLO, CALL, ANSWER, END = b"H", b"C", b"A", b"E"
_HEADER = struct.Struct("!cQ")  # kind, number of the call
#: Smaller buffers are copied into the pickle, which costs less than a frame of their own.
FRAME_BYTES = 64 << 10
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


def encode(kind: bytes, number: int = 0, content: Any = None) -> list[bytes | memoryview]:
    """Frames of a message.

    Args:
        kind: see above.
        number: of the call.
        content: a picklable object.

    Raises:
        ValueError: a frame is larger than `MAX_FRAME_BYTES`.
        Exception: the object cannot be pickled.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether the pickle contains the buffer."""
        raw = buffer.raw()
        if raw.nbytes >= FRAME_BYTES:
            buffers.append(raw)
        return raw.nbytes < FRAME_BYTES

    pickled = pickle.dumps(content, protocol=5, buffer_callback=keep)
    frames: list[bytes | memoryview] = [_HEADER.pack(kind, number) + pickled, *buffers]
    largest = max(memoryview(frame).nbytes for frame in frames)
    if largest > MAX_FRAME_BYTES:
        raise ValueError(
            f"message with a part of {largest} bytes; allowed: up to {MAX_FRAME_BYTES} "
            "(set transport: ray for larger ones)"
        )
    return frames


def header_of(frames: Sequence[zmq.Frame]) -> tuple[bytes, int]:
    """Kind and number of a message; no kind, if it is malformed."""
    if len(frames[0]) < _HEADER.size:
        return b"", 0
    kind, number = _HEADER.unpack_from(frames[0].buffer)
    return kind, number


def decode(frames: Sequence[zmq.Frame]) -> Any:
    """The content of a message. Arrays in it own their memory.

    Raises:
        Exception: whatever unpickling raises.
    """
    pickled = frames[0].buffer[_HEADER.size :]
    return pickle.loads(pickled, buffers=[bytearray(frame.buffer) for frame in frames[1:]])
