"""Preemption of stragglers: when enough workers have finished, the others are cut short.

One mechanism for all who wait for several workers. The driver's side decides (`Stragglers`) and
calls `RolloutWorker.cut_short`, which runs in a concurrency group of its own beside the fragment
under way; the worker's side (`CutShort`) sees to it that the call meets the fragment it is meant
for; the sampler looks for it between steps. Nothing is polled, and what had been sampled is used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polopt.rollouts.sampler import VectorSampler
    from polopt.rollouts.worker_set import RemoteWorker


class Stragglers(NamedTuple):
    """Who is a straggler, and what one keeps.

    Attributes:
        fraction_workers: once this share of the workers has finished, the others are stragglers;
            1: nobody ever is.
        fraction_samples: a straggler keeps at least this share of its fragment, and one step.
    """

    fraction_workers: float
    fraction_samples: float

    def enough(self, num_workers: int) -> int:
        """How many of so many workers have to finish."""
        return max(1, math.ceil(self.fraction_workers * num_workers))

    def keep_steps(self, steps: int) -> int:
        """How many of so many steps a straggler samples at least."""
        return max(1, math.ceil(self.fraction_samples * steps))

    def cut_short(self, fragments: Iterable[tuple[RemoteWorker, int, int]]) -> None:
        """Tells workers to end their fragments: `(worker, number of the request, its steps)`.
        Does not wait."""
        for worker, number, steps in fragments:
            call = worker.actor.cut_short.options(concurrency_group="control")
            call.remote(number, self.keep_steps(steps))


class CutShort:
    """The worker's side: takes cuts from another thread than the one that samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut: tuple[int, int] | None = None  # (number of the request, steps to keep)
        self._number: int | None = None  # of the request that is being sampled
        self._sampler: VectorSampler | None = None

    @contextmanager
    def sampling(self, sampler: VectorSampler, number: int | None) -> Iterator[None]:
        """While in it, cuts that name `number` reach the sampler; one that came first does so at
        once. A request without a number can not be cut short."""
        with self._lock:
            self._sampler, self._number = sampler, number
            if number is not None:
                sampler.go_on()
                if self._cut is not None and self._cut[0] == number:
                    sampler.stop_early(self._cut[1])
        try:
            yield
        finally:
            with self._lock:
                self._sampler = self._number = None
                if number is not None:
                    sampler.go_on()

    def cut(self, number: int, keep_steps: int) -> None:
        """Ends the fragment that `number` asked for once it has `keep_steps` steps. If it has
        ended, does nothing."""
        with self._lock:
            self._cut = (number, keep_steps)
            if self._sampler is not None and self._number == number:
                self._sampler.stop_early(keep_steps)
