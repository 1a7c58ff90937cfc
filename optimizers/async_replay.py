"""AsyncReplay: samplers, replay shards and the learner run at the same time (Ape-X).

Horgan et al., 2018. A sampler computes the first priorities of its rows. Its fragment goes to a
shard by reference, so the driver moves no data but the batches that it learns from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import pydantic

from polopt.common.config import Automatic, ConfigError
from polopt.metrics import plots
from polopt.metrics.lag import DoublingHistogram
from polopt.metrics.optimizer_stats import StepResult
from polopt.metrics.tab import Tab
from polopt.optimizers.base import OptimizerConfig
from polopt.optimizers.checks import check_central_gradients
from polopt.optimizers.replay_optimizer import ReplayOptimizer, ReplayOptions
from polopt.optimizers.replay_shards import (
    Batch,
    Fragment,
    ReplayShards,
    add,
    draw,
    forget,
    prioritized,
    set_priorities,
)
from polopt.replay.rate_limiter import RateLimiter
from polopt.rollouts.resources import Amount
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import ChannelError
from polopt.rollouts.workers.calls import WEIGHTS, Reply
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: A larger batch stays with its shard until the learner takes it. The kernel would not buffer the
#: whole message, and the shard would wait while the driver learns.
REFERENCE_BYTES = 100_000
#: More calls than a process ever has. Requests have bounds of their own: the limiter, the queue of
#: the learner, and the fragments of each sampler that are not stored yet.
_MOST_CALLS = 10_000


class AsyncReplayConfig(ReplayOptions):
    """Options of `AsyncReplay`, in addition to those of `ReplayOptions`.

    Attributes:
        num_replay_shards: processes that hold the rows, each `buffer_size / num_replay_shards` of
            them. A sampler always stores its fragments in the same shard, so there is at least one
            sampler for each shard. RLlib 0.8: `num_replay_buffer_shards`.
        num_cpus_per_replay_shard: Ray CPUs of each shard.
        learner_queue_size: batches that are drawn ahead, on their way or waiting for the learner.
            RLlib: `learner_queue_size`.
        max_requests_in_flight_per_worker: most fragments requested of each sampler at once. With 2,
            it samples the next one while the driver learns.
        error_buffer: rows by which learning may fall behind `training_intensity` times the rows
            sampled. Learning never runs ahead. At this bound, samplers wait. None: as many rows as
            all fragments that may be under way give, and the batches of the queue, so that samplers
            wait only for a learner that is too slow.
    """

    num_replay_shards: int = pydantic.Field(1, ge=1, le=10_000)
    num_cpus_per_replay_shard: Amount = 1.0
    learner_queue_size: int = pydantic.Field(4, ge=1, le=1000)
    max_requests_in_flight_per_worker: int = pydantic.Field(2, ge=1, le=1000)
    error_buffer: Automatic = pydantic.Field(None, ge=0, le=10**12)

    aliases: ClassVar[Mapping[str, str]] = {
        **ReplayOptions.aliases,
        "num_replay_buffer_shards": "num_replay_shards",
        "max_requests_in_flight_per_env_runner": "max_requests_in_flight_per_worker",
    }

    def limiter(self, rollout: RolloutConfig, **options: Any) -> RateLimiter:
        """The limiter of a run.

        Raises:
            ConfigError: `error_buffer` is so small that samplers and learner block each other.
        """
        rows = rollout.rollout_fragment_length * rollout.num_envs_per_worker
        most = self.most_fragments * rollout.num_workers * rows
        bound = self.error_buffer or (
            math.ceil(self.training_intensity * most)
            + self.learner_queue_size * self.train_batch_size
        )
        limiter = RateLimiter(self.training_intensity, self.learning_starts, bound, **options)
        limiter.check(self.train_batch_size, rows)
        return limiter

    @property
    def most_fragments(self) -> int:
        """Fragments of one sampler that are requested, or sampled and not stored yet, at most."""
        return 2 * self.max_requests_in_flight_per_worker


class Task(NamedTuple):
    """What a call is for: its tag.

    Attributes:
        kind: `fragment` is sampled, `stored` in a shard, a `batch` is drawn, its new priorities are
            `updated`.
        sampler: index of the worker that samples the fragment.
        rows: of the fragment: the most that it can have, or as many as it has.
    """

    kind: str
    sampler: int = 0
    rows: int = 0


def sample(worker: RolloutWorker, weights: Any, options: Any) -> Fragment:
    """Runs in a sampler: samples a fragment, and computes the priorities of the rows that have all
    their steps with it."""
    worker.set_weights(weights)
    batch = worker.next_batch()
    with worker.phase("prioritize"):
        return prioritized(worker, batch, options)


class AsyncReplay(ReplayOptimizer):
    """Samplers sample, shards store and draw, and the driver learns, each without waiting for the
    others. They wait only where the training intensity asks for it.

    A step takes the first reply of any sampler or shard. Results depend on timing. What a process
    that dies has not handed over is lost, and as much is requested again.
    """

    name = "async_replay"
    config_class = AsyncReplayConfig
    config: AsyncReplayConfig
    phases: ClassVar[tuple[str, ...]] = ("request", "wait", "fetch", "learn")
    worker_phases: ClassVar[tuple[str, ...]] = ("prioritize",)
    after_failure = "drop"
    tab: ClassVar[Tab] = Tab(
        "Wait: the driver has no batch, or the training intensity allows none. Fetch: a large batch "
        "is taken from the memory of its shard.",
        (*plots.REPLAY, plots.PRIORITY_LAG, plots.SHARDS),
        (*plots.REPLAY_METRICS, plots.SHARDS_METRIC),
    )

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.limiter = self.config.limiter(workers.config.rollout, clock=workers.clock)
        self.calls.per_worker = _MOST_CALLS
        self.shards = ReplayShards(workers, self.config)
        self.calls.include(self.shards)
        self.priority_lag = DoublingHistogram()
        self._num_requests = 0
        self._requested: Counter[int] = Counter()  # number of its last request, by sampler
        self._num_drawing = 0  # batches that the limiter has counted, and that were not learned
        self._batch_bytes = 0  # of the last batch
        self._blocked_s = Counter[str]()
        self._idle = 0.0, workers.clock()  # share of the samplers that wait, and since when

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        check_central_gradients(rollout.model_copy(update={"collection": "async"}))
        if rollout.collection != "sync":
            raise ConfigError(
                f"key 'collection': got {rollout.collection!r} with optimizer 'async_replay', which "
                "always samples while it learns. Allowed: 'sync'"
            )
        if config.num_replay_shards > rollout.num_workers:
            raise ConfigError(
                f"key 'num_replay_shards': got {config.num_replay_shards} with num_workers="
                f"{rollout.num_workers}: each shard needs a worker that samples for it. Allowed: "
                f"up to {rollout.num_workers}"
            )
        config.limiter(rollout)

    @classmethod
    def further_processes(cls, config: Any) -> list[dict[str, float]]:
        return [{"CPU": config.num_cpus_per_replay_shard}] * config.num_replay_shards

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["request"]:
            self._request_fragments()
            self._request_batches()
        with self.timers["wait"]:
            reply = self._first()
        if reply.tag.kind == "fragment":
            with self.timers["request"]:
                self._store(reply)
        elif reply.tag.kind == "stored":
            self.limiter.inserted(reply.value)
        elif reply.tag.kind == "batch":
            with self.timers["fetch"]:
                batch = self._fetch(reply)
            if batch is not None:
                with self.timers["learn"]:
                    errors = self.learn_transitions(batch.rows)
                with self.timers["request"]:
                    new = batch.rows.indices, errors, self.policy.version
                    self.calls.send(reply.worker, set_priorities, *new, tag=Task("updated"))
        return self.metrics.counts_since(before)
