"""`CollectorThread`: a Collector in the background, behind a bounded queue (PyTorchRL's name)."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from polopt.rollouts.collectors.collector import Collector
from polopt.rollouts.collectors.gatherer import CollectionInterrupted

#: How long `stop` waits for workers to end the step they are at.
STOP_GRACE_S = 1.0


class CollectorEnded(RuntimeError):
    """There are no more batches: the collector has given all it was to give, or was stopped."""


class CollectorThread:
    """Iterates a Collector in a daemon thread, as far ahead as the queue is long.

        with CollectorThread(collector, maxsize=2) as batches:
            for batch in batches:
                collector.policy.learn_on_batch(batch)

    When the queue is full the thread blocks, and then so do the workers, which have one fragment
    each on its way. Weights are published by whoever gets batches, in `get`, because that is the
    one moment at which the policy is sure not to be in the middle of an update: if the collector
    has a rule of its own for when weights go out, `get` publishes each time; else they go out by
    `update_policy_weights_`.

    Args:
        collector: used by this thread alone until `stop`, but for its policy and
            `update_policy_weights_`. It is not shut down.
        maxsize: batches in the queue at most.
    """

    def __init__(self, collector: Collector, maxsize: int = 1) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize must be 1 or more, for the queue is bounded; got {maxsize}")
        self.collector = collector
        self.queue: queue.Queue[Any] = queue.Queue(maxsize)
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        collector.weight_sync.take_snapshot()
        collector.weight_sync.by_consumer = True
        self._thread = threading.Thread(target=self._run, name="polopt-collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in self.collector:
                self.queue.put(batch)
                if self._stopping.is_set():
                    return
        except CollectionInterrupted:
            return
        except BaseException as error:  # whatever it is, the consumer has to know
            self._error = error
        finally:
            self._ended.set()
            # Wakes a consumer that waits. If the queue is full nobody waits, and it is found empty
            # later with `_ended` set.
            self._wake()

    def get(self, timeout: float | None = None) -> Any:
        """The next batch.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            queue.Empty: none came in time.
            CollectorEnded: there will be none.
            Exception: whatever ended the thread, at once, whatever is still in the queue.
        """
        if self._error is None and not (self._ended.is_set() and self.queue.empty()):
            if self.collector.weight_sync.automatic and not self._ended.is_set():
                self.collector.weight_sync.take_snapshot()
            batch = self.queue.get(timeout=timeout)
            if batch is not None and self._error is None:
                return batch
        if self._error is not None:
            raise self._error
        self._wake()
        raise CollectorEnded("the collector has ended")

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(None)

    def __iter__(self) -> CollectorThread:
        return self

    def __next__(self) -> Any:
        try:
            return self.get()
        except CollectorEnded:
            raise StopIteration from None

    def update_policy_weights_(self, weights: Any = None) -> int:
        """As the collector's, which takes a copy before it returns."""
        return self.collector.update_policy_weights_(weights)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread within a second or two, whatever it is doing; may be called twice.

        Fragments under way are cut short. Workers that do not answer even then, because they hang
        or are still starting, are ended. Afterwards the collector can be used by others.
        """
        self._stopping.set()
        gatherer = self.collector.gatherer
        if self._thread.is_alive():
            gatherer.interrupt()
            self._empty()
            self._thread.join(STOP_GRACE_S)
            if self._thread.is_alive():
                gatherer.kill_busy()
                self._empty()
                self._thread.join(STOP_GRACE_S)
        self._empty()
        self._error = None
        self._ended.set()
        self._wake()
        if not self._thread.is_alive():
            gatherer.interrupted = False
            self.collector.weight_sync.by_consumer = False

    def _empty(self) -> None:
        """Throws away what is in the queue, which frees a thread that waits for room in it."""
        while True:
            try:
                self.queue.get_nowait()
            except queue.Empty:
                return

    def __enter__(self) -> CollectorThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
