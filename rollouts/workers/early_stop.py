"""Preemption of stragglers: when enough workers have finished, the others are cut short.

One mechanism for all who wait for several workers. The driver's side decides (`Stragglers`) and
calls `RolloutWorker.stop_early`, which runs in a concurrency group of its own beside the fragment
under way; the worker's side (`EarlyStop`) sees to it that the call meets the fragment it is meant
for; the sampler looks for it between steps. Nothing is polled, and what had been sampled is used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polopt.rollouts.sampling.sampler import VectorSampler
    from polopt.rollouts.workers.remote_worker import RemoteWorker


class Stragglers:
    """Who is a straggler, and what one keeps.

    Args:
        fraction_workers: once this share of the workers has finished, the others are stragglers;
            1: nobody ever is.
        fraction_samples: a straggler keeps at least this share of its fragment, and one step.
    """

    def __init__(self, fraction_workers: float, fraction_samples: float) -> None:
        self._fraction_workers = fraction_workers
        self._fraction_samples = fraction_samples
        self._told: dict[int, int] = {}  # by worker: the last request of it that was cut short

    def remain(self, num_workers: int, num_waited_for: int) -> bool:
        """Whether enough of so many workers have finished, so that those that are still waited for
        are stragglers."""
        enough = max(1, math.ceil(self._fraction_workers * num_workers))
        return 0 < num_waited_for <= num_workers - enough

    def keep_steps(self, steps: int) -> int:
        """How many of so many steps a straggler samples at least."""
        return max(1, math.ceil(self._fraction_samples * steps))

    def stop_early(self, fragments: Iterable[tuple[RemoteWorker, int, int]]) -> int:
        """Tells workers to end their fragments; does not wait.

        Args:
            fragments: `(worker, number of the request, its steps)`. One that was told already is
                not told again.

        Returns:
            how many were told.
        """
        new = [part for part in fragments if self._told.get(part[0].index) != part[1]]
        for worker, number, steps in new:
            self._told[worker.index] = number
            call = worker.actor.stop_early.options(concurrency_group="control")
            call.remote(number, self.keep_steps(steps))
        return len(new)


class EarlyStop:
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
