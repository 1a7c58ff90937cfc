"""Delays the link of a node of `network_nodes.Network`.

The command is `network_relay.py NODE BRIDGE NAME SECONDS`. NODE and BRIDGE are network namespaces,
and each has a tap device NAME. This program holds both devices. It passes each frame of one to the
other after SECONDS, in order, and prints `ready` once it does so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
#: The largest frame is much smaller, because tap devices do not combine segments.
MOST_BYTES = 65536
#: Frames that wait. Further frames are lost, as in a full router.
MOST_FRAMES = 20_000


def enter(namespace: str) -> None:
    """This process enters a network namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")


def open_tap(namespace: str, name: str) -> int:
    """Returns the file of a tap device in a network namespace."""
    enter(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def relay(first: int, second: int, delay_s: float) -> None:
    """Passes frames between two tap devices, for ever."""
    selector = selectors.DefaultSelector()
    other = {first: second, second: first}
    for tap in other:
        selector.register(tap, selectors.EVENT_READ)
    waiting: deque[tuple[float, int, bytes]] = deque()  # all frames wait equally long
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(left_s):
            if len(waiting) < MOST_FRAMES:
                frame = os.read(key.fd, MOST_BYTES)
                waiting.append((time.monotonic() + delay_s, other[key.fd], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tap, frame = waiting.popleft()
            os.write(tap, frame)


if __name__ == "__main__":
    node, bridge, name, seconds = sys.argv[1:]
    taps = open_tap(node, name), open_tap(bridge, name)
    print("ready", flush=True)
    relay(*taps, float(seconds))
