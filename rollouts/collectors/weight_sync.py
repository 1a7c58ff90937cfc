"""`WeightSync`: when collectors get which weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polopt.rollouts.collectors.config import CollectingConfig
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class WeightSync:
    """Publishes the local policy's weights, and knows how old those are that workers act on.

    Ages are in batches: weights are `n` batches old if since the moment when they were the local
    policy's, `n` batches have been handed out that it can have learned from. Workers get what was
    published last, never what the policy is in the middle of becoming; so whoever collects in a
    thread of its own may leave publishing to the thread that learns (`by_consumer`).

    Args:
        workers: to send to.
        config: its rules: `update_after_each_batch`, `broadcast_interval` and
            `max_weight_update_interval`.

    Attributes:
        handed: batches handed out.
        by_consumer: nothing is published here but by `publish`.
    """

    def __init__(self, workers: WorkerSet, config: CollectingConfig) -> None:
        self._workers = workers
        self._config = config
        self.handed = 0
        self.by_consumer = False
        self._stamp = 0  # `handed` when the published weights were last the local policy's
        workers.take_snapshot()
        self._stamps: dict[int, int] = {}  # the same for what each worker has, by index

    @property
    def automatic(self) -> bool:
        """Whether any rule publishes, or only `publish`."""
        config = self._config
        rules = (config.broadcast_interval, config.max_weight_update_interval)
        return config.update_after_each_batch or any(rule > 0 for rule in rules)

    def take_snapshot(self) -> int:
        """Publishes the local policy's weights as they are, and returns their version.

        Weights that changed without a new version, because somebody trains them with an optimizer
        of his own, get one.
        """
        policy, last = self._workers.local.policy, self._workers.snapshot
        if (
            last is not None
            and last.version == policy.version
            and not np.array_equal(policy.get_weights().flat, last.weights.flat)
        ):
            policy.version += 1
        version = self._workers.take_snapshot().version
        self._stamp = self.handed
        return version

    def weights_for(self, worker: RemoteWorker, ahead: bool) -> Any:
        """The argument for a call that launches a fragment: published weights, or None if the
        worker has those.

        Args:
            worker: whose fragment it is.
            ahead: it is launched before the batch at hand is handed out.
        """
        if not self.by_consumer and self._due(ahead):
            self.take_snapshot()
        self._stamps[worker.index] = self._stamp
        return self._workers.snapshot_for(worker)

    def _due(self, ahead: bool) -> bool:
        config = self._config
        age = self.handed - self._stamp
        return (
            config.update_after_each_batch
            or 0 < config.broadcast_interval <= age
            or 0 < config.max_weight_update_interval < age + ahead
        )

    def too_old(self, workers: Iterable[RemoteWorker]) -> list[RemoteWorker]:
        """Of workers that are sampling, those whose weights would be older than
        `max_weight_update_interval` once the batch at hand is handed out."""
        limit = self._config.max_weight_update_interval
        if limit <= 0:
            return []
        old = [w for w in workers if self.handed + 1 - self._stamps[w.index] > limit]
        if not old:
            return []
        if not self.by_consumer:
            self.take_snapshot()
        snapshot = self._workers.snapshot
        assert snapshot is not None
        current = [w for w in old if w.known_version == snapshot.version]
        for worker in current:  # nobody has changed the weights since
            self._stamps[worker.index] = self._stamp
        return [w for w in old if self.handed + 1 - self._stamps[w.index] > limit]
