"""`WeightSync`: decides when the workers of a Collector receive weights, and tracks their lag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polopt.collectors.collector_config import CollectingConfig
from polopt.rollouts.workers.snapshots import WeightSnapshot, WeightSnapshots
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


class WeightSync(WeightSnapshots):
    """Takes snapshots of the local policy's weights, and tracks the lag of each worker's weights.

    The lag is counted in batches. Weights have a lag of `n` if the Collector has returned `n`
    batches since the local policy had these weights. The local policy may have learned from these
    `n` batches.

    Remote workers receive the last snapshot. A snapshot must not be taken in the middle of an
    update. If a background thread collects, the thread that learns should therefore take the
    snapshots (`by_consumer`).

    Args:
        workers: the workers that receive weights.
        config: the options of the Collector. `update_after_each_batch`, `broadcast_interval` and
            `max_weight_update_interval` decide when workers receive weights.

    Attributes:
        num_batches: the number of batches that the Collector has returned.
        by_consumer: if True, only explicit calls of `take` take snapshots.
        num_updates: the number of calls of `update_policy_weights_` by the user.
        ahead: whether fragments are now requested before the current batch is returned.
    """

    def __init__(self, workers: WorkerSet, config: CollectingConfig) -> None:
        super().__init__(lambda: workers.local.policy, workers.transport.put)
        self.last = workers.weights.last  # some workers may already have this snapshot
        self._config = config
        self.num_batches = 0
        self.by_consumer = False
        self.num_updates = 0
        self.ahead = False
        # The value of `num_batches` at the last call of `take`. At that time, the last snapshot was
        # equal to the weights of the local policy.
        self._stamp = 0
        # Worker index -> value of `_stamp` at the request of the worker's last fragment.
        self._stamps: dict[int, int] = {}
        # Worker index -> value of `num_updates` at the request of the worker's last fragment.
        self._updates: dict[int, int] = {}
        self.take()

    @property
    def automatic(self) -> bool:
        """Whether an option of the Collector decides when snapshots are taken."""
        config = self._config
        rules = (config.broadcast_interval, config.max_weight_update_interval)
        return config.update_after_each_batch or any(rule > 0 for rule in rules)

    def take(self, force: bool = False) -> WeightSnapshot:
        """Takes a snapshot, like `WeightSnapshots.take`.

        The weights may have changed without a new version, because the user's own code trains the
        network. Unless `force` is True, such weights receive a new version here.
        """
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

    def for_call(self, handle: WorkerHandle) -> Any:
        """Returns the weights for the request of a fragment, like `WeightSnapshots.for_call`. This
        method takes a new snapshot only if an option of the Collector requires one."""
        if handle.shares_weights:
            return None
        if not self.by_consumer and self._due(self.ahead):
            self.take()
        self._stamps[handle.index] = self._stamp
        self._updates[handle.index] = self.num_updates
        return self.last_for(handle)

    def update_of(self, handle: WorkerHandle) -> int:
        """Returns the value of `num_updates` at the request of the worker's last fragment."""
        return self._updates.get(handle.index, self.num_updates)

    def _due(self, ahead: bool) -> bool:
        config = self._config
        lag = self.num_batches - self._stamp
        return (
            config.update_after_each_batch
            or 0 < config.broadcast_interval <= lag
            or 0 < config.max_weight_update_interval < lag + ahead
        )

    def too_old(self, handles: Iterable[WorkerHandle]) -> list[WorkerHandle]:
        """Returns the workers whose weights will exceed the lag `max_weight_update_interval` when
        the current batch is returned. If there may be such workers, and `by_consumer` is False,
        this method first takes a snapshot.

        Args:
            handles: the workers that are sampling now.
        """
        limit = self._config.max_weight_update_interval
        if limit <= 0:
            return []
        old = [w for w in handles if self.num_batches + 1 - self._stamps[w.index] > limit]
        if not old:
            return []
        if not self.by_consumer:
            self.take()
        current = [w for w in old if self.last and w.sent_snapshot == self.last.number]
        for handle in current:  # these workers already have the newest weights
            self._stamps[handle.index] = self._stamp
        return [w for w in old if self.num_batches + 1 - self._stamps[w.index] > limit]
