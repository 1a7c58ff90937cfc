"""Helpers with which tests wait for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], limit_s: float = 120.0, interval_s: float = 0.01
) -> None:
    """Waits until a condition is true. Raises AssertionError after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition does not hold after {limit_s:g} s"
        time.sleep(interval_s)
