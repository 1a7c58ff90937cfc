"""`WeightSync`: when workers of a collector receive weights, and the lag of those they have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polopt.rollouts.collectors.collector_config import CollectingConfig
from polopt.rollouts.workers.snapshots import WeightSnapshot, WeightSnapshots
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


class WeightSync(WeightSnapshots):
    """Takes snapshots of the local policy's weights, and tracks how old the weights of each worker
    are.

    The age is called lag, and is counted in batches. Weights have a lag of `n` if `n` batches have
    been returned since the local policy had these weights, because the policy can have learned from
    them. Workers get the last snapshot, and so never weights in the middle of an update. A thread
    that collects may leave snapshots to the thread that learns (`by_consumer`).

    Args:
        workers: the workers that get weights.
        config: the rules: `update_after_each_batch`, `broadcast_interval` and
            `max_weight_update_interval`.

    Attributes:
        num_batches: batches returned.
        by_consumer: only explicit calls of `take` take snapshots.
        num_updates: explicit updates of the user (`update_policy_weights_`).
        ahead: fragments are requested before the current batch has been returned.
    """

    def __init__(self, workers: WorkerSet, config: CollectingConfig) -> None:
        super().__init__(lambda: workers.local.policy, workers.transport.put)
        self.last = workers.weights.last  # which workers may have already
        self._config = config
        self.num_batches = 0
        self.by_consumer = False
        self.num_updates = 0
        self.ahead = False
        self._stamp = 0  # `num_batches` when the snapshot was last the local policy's weights
        self._stamps: dict[int, int] = {}  # `_stamp` of each worker's weights, by index
        self._updates: dict[int, int] = {}  # `num_updates` when its last fragment was launched
        self.take()

    @property
    def automatic(self) -> bool:
        """Whether a rule of the config takes snapshots."""
        config = self._config
        rules = (config.broadcast_interval, config.max_weight_update_interval)
        return config.update_after_each_batch or any(rule > 0 for rule in rules)

    def take(self, force: bool = False) -> WeightSnapshot:
        """As `WeightSnapshots.take`. Weights that changed without a new version, because another
        optimizer than the policy's trains them, get one, unless `force`."""
        policy, last = self._policy(), self.last
        if (
            not force
            and last is not None
            and last.weights.version == policy.version
            and not np.array_equal(policy.get_weights().flat, last.weights.flat)
        ):
            policy.version += 1
        self._stamp = self.num_batches
        return super().take(force)

    def for_call(self, worker: WorkerHandle) -> Any:
        """As `WeightSnapshots.for_call`, for the request of a fragment: with a new snapshot if a
        rule says so, else with the last one."""
        if worker.shares_weights:
            return None
        if not self.by_consumer and self._due(self.ahead):
            self.take()
        self._stamps[worker.index] = self._stamp
        self._updates[worker.index] = self.num_updates
        return self.last_for(worker)

    def update_of(self, worker: WorkerHandle) -> int:
        """`num_updates` when the last fragment of a worker was launched."""
        return self._updates.get(worker.index, self.num_updates)

    def _due(self, ahead: bool) -> bool:
        config = self._config
        lag = self.num_batches - self._stamp
        return (
            config.update_after_each_batch
            or 0 < config.broadcast_interval <= lag
            or 0 < config.max_weight_update_interval < lag + ahead
        )

    def too_old(self, workers: Iterable[WorkerHandle]) -> list[WorkerHandle]:
        """Of workers that are sampling, those whose weights would have a lag above
        `max_weight_update_interval` once the current batch is returned."""
        limit = self._config.max_weight_update_interval
        if limit <= 0:
            return []
        old = [w for w in workers if self.num_batches + 1 - self._stamps[w.index] > limit]
        if not old:
            return []
        if not self.by_consumer:
            self.take()
        current = [w for w in old if self.last and w.sent_snapshot == self.last.number]
        for worker in current:  # the weights have not changed since
            self._stamps[worker.index] = self._stamp
        return [w for w in old if self.num_batches + 1 - self._stamps[w.index] > limit]
