"""`CollectorThread`: runs a Collector in a background thread with a bounded queue. The name comes
from PyTorchRL."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from polopt.collectors.collector import Collector
from polopt.rollouts.workers.calls import CallsInterrupted

#: After `stop`, workers have this many seconds to end their current step.
STOP_GRACE_S = 1.0


class CollectorEnded(RuntimeError):
    """Raised when no more batches will follow, because the Collector has returned its last batch or
    the thread was stopped."""


class CollectorThread:
    """Iterates over a Collector in a daemon thread, and puts the batches into a bounded queue.

        with CollectorThread(collector, maxsize=2) as batches:
            for batch in batches:
                collector.policy.learn_on_batch(batch)

    When the queue is full, the thread blocks. Each worker then finishes its pending fragment and
    waits.

    If the Collector sends weights automatically (`update_after_each_batch`, `broadcast_interval` or
    `max_weight_update_interval`), each `get` takes a snapshot of the weights for the workers.
    Otherwise, only `update_policy_weights_` takes a snapshot. Both run in the thread that consumes
    batches. If this thread also learns, the policy is then not in the middle of an update.

    Args:
        collector: the Collector to iterate over. Until `stop`, other threads may use only its
            policy and `update_policy_weights_`. `stop` does not shut down the Collector.
        maxsize: the maximum number of batches in the queue.

    Raises:
        ValueError: if `maxsize` is less than 1.
    """

    def __init__(self, collector: Collector, maxsize: int = 1) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize: got {maxsize}. Allowed: 1 or more, as the queue is bounded")
        self.collector = collector
        self.queue: queue.Queue[Any] = queue.Queue(maxsize)
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        collector.weight_sync.take()
        collector.weight_sync.by_consumer = True
        self._thread = threading.Thread(target=self._run, name="polopt-collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in self.collector:
                self.queue.put(batch)
                if self._stopping.is_set():
                    return
        except CallsInterrupted:
            return
        except BaseException as error:  # `get` raises the error in the consumer's thread
            self._error = error
        finally:
            self._ended.set()
            # Wakes a consumer that waits for a batch. If the queue is full, no consumer waits, and
            # `get` sees that `_ended` is set once the queue is empty.
            self._wake()

    def get(self, timeout: float | None = None) -> Any:
        """Waits for the next batch and returns it.

        Args:
            timeout: the maximum time to wait, in seconds. `None` means no limit.

        Raises:
            queue.Empty: if no batch arrives within `timeout`.
            CollectorEnded: if all batches have been returned, or after `stop`.
            Exception: the exception that ended the thread, even if batches remain in the queue.
        """
        if self._error is None and not (self._ended.is_set() and self.queue.empty()):
            if self.collector.weight_sync.automatic and not self._ended.is_set():
                self.collector.weight_sync.take()
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
        """Calls `Collector.update_policy_weights_`, which copies the weights before it returns."""
        return self.collector.update_policy_weights_(weights)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stops the thread, and waits at most about two seconds for its end. Calling `stop` again
        is safe.

        Pending fragments are stopped early. If the thread has not ended after one second, the
        remote workers that have not answered are killed. If environments run in this process, the
        thread ends only after their current step. When `is_alive` is False, other threads may use
        the Collector.
        """
        self._stopping.set()
        calls = self.collector.calls
        if self._thread.is_alive():
            calls.interrupt()
            self._empty()
            self._thread.join(STOP_GRACE_S)
            if self._thread.is_alive():
                calls.kill_busy()
                self._empty()
                self._thread.join(STOP_GRACE_S)
        self._empty()
        self._error = None
        self._ended.set()
        self._wake()
        if not self._thread.is_alive():
            calls.interrupted = False
            self.collector.weight_sync.by_consumer = False

    def _empty(self) -> None:
        """Drops the batches in the queue. This unblocks the thread if it waits to add a batch."""
        while True:
            try:
                self.queue.get_nowait()
            except queue.Empty:
                return

    def __enter__(self) -> CollectorThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
