"""Messages over ZeroMQ: encoding, and the options of every socket.

The first frame of a message is its kind, the number of the call and a pickle. Large out-of-band
buffers of the pickle (protocol 5, PEP 574) follow, one frame each. ZeroMQ delivers a message whole
or not at all.
"""

from __future__ import annotations

import math
import pickle
import signal
import struct
import traceback
from collections.abc import Sequence
from typing import Any

import zmq
from ray import cloudpickle

#: Kinds of messages. HELLO: first message of a worker. LARGE: the answer does not fit into a
#: message, and is to be fetched through Ray. END, from the client: return from `serve`, and its
#: number is that of the oldest call whose answer is wanted; from the server: no answer follows.
HELLO, CALL, ANSWER, LARGE, END = b"H", b"C", b"A", b"L", b"E"
_HEADER = struct.Struct("!cQ")  # kind, number of the call
#: Number of an END after which no answer is wanted.
NONE_WANTED = 2**64 - 1
#: Smaller buffers are copied into the pickle, which costs less than a frame of their own.
FRAME_BYTES = 64 << 10
#: Largest frame of a socket that `auto` opens. ZeroMQ closes a connection whose peer announces a
#: larger one, before it allocates; up to this size it allocates for peers that have not
#: authenticated, too.
AUTO_FRAME_BYTES = 1 << 20
#: The same for `transport: zmq`, and for sums of larger arrays.
MAX_FRAME_BYTES = 64 << 20
#: Room for what CURVE adds to a frame (33 bytes).
ENVELOPE_BYTES = 64
#: Messages that wait for one peer to read them. More than `max_requests_in_flight_per_worker` can
#: be, so that only a peer that reads nothing reaches it.
HIGH_WATER_MARK = 1100
#: A peer that has not authenticated after this time is disconnected.
HANDSHAKE_TIMEOUT_S = 4.0
#: Interval of pings over an idle connection.
HEARTBEAT_INTERVAL_S = 5.0
#: Longest wait that one poll can take (milliseconds in 31 bits).
MAX_POLL_S = 2e6
#: Limit for messages still queued when a socket closes.
LINGER_S = 1.0


def configure(socket: zmq.Socket[bytes], heartbeat_timeout_s: float, max_frame_bytes: int) -> None:
    """Sets the limits that every socket has.

    Args:
        socket: not yet bound or connected.
        heartbeat_timeout_s: a peer that answers no ping for this time is disconnected.
        max_frame_bytes: a peer that announces a larger frame is disconnected.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + ENVELOPE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1e3 * HANDSHAKE_TIMEOUT_S))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * min(HEARTBEAT_INTERVAL_S, heartbeat_timeout_s)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, min(int(1e3 * heartbeat_timeout_s), 2**31 - 1))
    socket.setsockopt(zmq.LINGER, int(1e3 * LINGER_S))


def encode(
    kind: bytes, number: int = 0, content: Any = None, by_value: bool = False
) -> list[bytes | memoryview]:
    """Frames of a message.

    Args:
        kind: see above.
        number: of the call.
        content: a picklable object.
        by_value: functions and classes that another process cannot import, such as those of
            `__main__` and lambdas, are sent by value, as Ray does; takes longer.

    Raises:
        Exception: the object cannot be pickled.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether the pickle contains the buffer."""
        raw = buffer.raw()
        if raw.nbytes >= FRAME_BYTES:
            buffers.append(raw)
        return raw.nbytes < FRAME_BYTES

    dumps = cloudpickle.dumps if by_value else pickle.dumps
    pickled = dumps(content, protocol=5, buffer_callback=keep)
    return [_HEADER.pack(kind, number) + pickled, *buffers]


def fits(frames: Sequence[bytes | memoryview], max_frame_bytes: int) -> bool:
    """Whether a peer with this limit accepts the message; see `configure`."""
    return max([memoryview(frame).nbytes for frame in frames]) <= max_frame_bytes


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


def is_of_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised an exception, which then belongs to this process,
    not to what it was unpickling. Ray's handler of SIGTERM raises SystemExit."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.Signals}
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, KeyboardInterrupt) or not frames.isdisjoint(handlers)


def milliseconds(timeout_s: float) -> int:
    """A timeout as ZeroMQ takes it, rounded up."""
    return math.ceil(1e3 * min(max(timeout_s, 0.0), MAX_POLL_S))
