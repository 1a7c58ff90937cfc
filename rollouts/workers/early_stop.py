"""Early stop: when enough workers have finished, the fragments of the others end early.

The driver decides (`Stragglers`) and calls `RolloutWorker.stop_early`, which runs in a concurrency
group of its own, beside the call that samples. In the worker, `EarlyStop` matches that call with
its fragment, and the sampler checks a flag between steps. Samples made until then are used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from polopt.rollouts.workers.remote_worker import RemoteWorker


class Sampler(Protocol):
    """The part of `VectorSampler` that ends fragments early."""

    def stop_early(self, keep_steps: int) -> None: ...

    def cancel_stop(self) -> None: ...


class Stragglers:
    """Decides which workers are stragglers, and how much of their fragments they keep.

    Args:
        fraction_workers: once this share of the workers has finished, the others are stragglers;
            1: there are no stragglers.
        fraction_samples: a straggler keeps at least this share of its fragment, and one step.
    """

    def __init__(self, fraction_workers: float, fraction_samples: float) -> None:
        self._fraction_workers = fraction_workers
        self._fraction_samples = fraction_samples
        self._stopped: dict[int, int] = {}  # last request that was stopped, by worker index

    def remain(self, num_workers: int, num_pending: int) -> bool:
        """Whether enough of `num_workers` have finished, so that the `num_pending` others are
        stragglers."""
        enough = max(1, math.ceil(self._fraction_workers * num_workers))
        return 0 < num_pending <= num_workers - enough

    def keep_steps(self, steps: int) -> int:
        """Least number of steps that a straggler samples of a fragment of `steps`."""
        return max(1, math.ceil(self._fraction_samples * steps))

    def stop_early(self, fragments: Iterable[tuple[RemoteWorker, int, int]]) -> int:
        """Ends fragments early; does not wait.

        Args:
            fragments: `(worker, number of the request, its steps)`. Those that were stopped before
                are skipped.

        Returns:
            number of fragments that were not stopped before.
        """
        new = [part for part in fragments if self._stopped.get(part[0].index) != part[1]]
        for worker, number, steps in new:
            self._stopped[worker.index] = number
            worker.stop_early(number, self.keep_steps(steps))
        return len(new)


class EarlyStop:
    """Early stops in the worker, received in another thread than the one that samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: tuple[int, int] | None = None  # (number of the request, steps to keep)
        self._number: int | None = None  # of the request that is being sampled
        self._sampler: Sampler | None = None

    @contextmanager
    def sampling(self, sampler: Sampler, number: int | None) -> Iterator[None]:
        """Context in which stops of request `number` reach the sampler, including one that was
        received before. A request without a number is never stopped."""
        with self._lock:
            self._sampler, self._number = sampler, number
            if number is not None:
                sampler.cancel_stop()
                if self._stop is not None and self._stop[0] == number:
                    sampler.stop_early(self._stop[1])
        try:
            yield
        finally:
            with self._lock:
                self._sampler = self._number = None
                if number is not None:
                    sampler.cancel_stop()

    def stop(self, number: int, keep_steps: int) -> None:
        """Ends the fragment of request `number` once it has `keep_steps` steps; has no effect on
        one that has ended."""
        with self._lock:
            self._stop = (number, keep_steps)
            if self._sampler is not None and self._number == number:
                self._sampler.stop_early(keep_steps)
