"""Early stop: when enough workers have finished, the fragments of the others end early.

The driver decides (`Stragglers`) and calls `RolloutWorker.stop_early`, which runs in a concurrency
group of its own, beside the call that samples. In the worker, `EarlyStop` matches that request with
its call, and the sampler checks a flag between steps. Samples made until then are used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stragglers(NamedTuple):
    """Which workers are stragglers, and how much of their fragments they keep.

    Attributes:
        fraction_workers: once this share of the workers has finished, the others are stragglers;
            1: there are no stragglers.
        fraction_samples: a straggler keeps at least this share of its fragment, and one step.
    """

    fraction_workers: float = 1.0
    fraction_samples: float = 0.0

    def remain(self, num_workers: int, num_pending: int) -> bool:
        """Whether enough of `num_workers` have finished, so that the `num_pending` others are
        stragglers."""
        enough = max(1, math.ceil(self.fraction_workers * num_workers))
        return 0 < num_pending <= num_workers - enough

    def keep_steps(self, steps: int) -> int:
        """Least number of steps that a straggler samples of a fragment of `steps`."""
        return max(1, math.ceil(self.fraction_samples * steps))


class EarlyStop:
    """Early stops in the worker, received in another thread than the one that samples.

    Args:
        stop: ends the fragments of the current call once they have a number of steps; None: they
            are not stopped any more.
    """

    def __init__(self, stop: Callable[[int | None], None]) -> None:
        self._lock = threading.Lock()
        self._stop = stop
        self._requested: tuple[int, int] | None = None  # (number of the call, steps to keep)
        self._running: list[int] = []  # calls, a gradient worker's own within its driver's

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """Context of a call in which its early stop takes effect, also one received before."""
        with self._lock:
            self._running.append(call)
            if self._requested is not None and self._requested[0] == call:
                self._stop(self._requested[1])
        try:
            yield
        finally:
            with self._lock:
                self._running.pop()
                if not self._running:
                    self._stop(None)

    def request(self, call: int, keep_steps: int) -> None:
        """Ends the fragments of a call once they have `keep_steps` steps; has no effect on a call
        that has ended."""
        with self._lock:
            self._requested = (call, keep_steps)
            if call in self._running:
                self._stop(keep_steps)
