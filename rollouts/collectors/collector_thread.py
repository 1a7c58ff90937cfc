"""`CollectorThread`: a Collector in the background, behind a bounded queue (PyTorchRL's name)."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from polopt.rollouts.collectors.collector import Collector
from polopt.rollouts.workers.calls import CallsInterrupted

#: Time for workers to end their current step after `stop`.
STOP_GRACE_S = 1.0


class CollectorEnded(RuntimeError):
    """All batches have been returned: `total_frames` are reached, or the thread was stopped."""


class CollectorThread:
    """Iterates a Collector in a daemon thread, which fills a queue of `maxsize` batches.

        with CollectorThread(collector, maxsize=2) as batches:
            for batch in batches:
                collector.policy.learn_on_batch(batch)

    When the queue is full, the thread blocks, and workers stop after the one fragment that each has
    pending. Snapshots of the weights are taken in `get`, by the thread that consumes batches,
    because the policy is not in the middle of an update then. If an option of the collector says
    when weights are sent, each `get` takes a snapshot. Otherwise only `update_policy_weights_`
    does.

    Args:
        collector: used by this thread alone until `stop`, except for its policy and
            `update_policy_weights_`. It is not shut down.
        maxsize: maximum number of batches in the queue.

    Raises:
        ValueError: `maxsize` is less than 1.
    """

    def __init__(self, collector: Collector, maxsize: int = 1) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize: got {maxsize}. Allowed: 1 or more; the queue is bounded")
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
        except BaseException as error:  # raised again in the consumer's thread
            self._error = error
        finally:
            self._ended.set()
            # Wakes a consumer that waits. With a full queue no consumer waits, and the next one
            # finds `_ended` set once the queue is empty.
            self._wake()

    def get(self, timeout: float | None = None) -> Any:
        """The next batch.

        Args:
            timeout: seconds. None: no limit.

        Raises:
            queue.Empty: no batch within `timeout`.
            CollectorEnded: all batches have been returned.
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
        """See `Collector.update_policy_weights_`. Copies the weights before it returns."""
        return self.collector.update_policy_weights_(weights)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread within about two seconds, in any state. May be called twice.

        Pending fragments are stopped early. Workers that do not answer within a second, because
        they hang or are still starting, are killed. Other threads may use the collector afterwards.
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
        """Drops the batches in the queue, which unblocks a thread that waits to add one."""
        while True:
            try:
                self.queue.get_nowait()
            except queue.Empty:
                return

    def __enter__(self) -> CollectorThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
