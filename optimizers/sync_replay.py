"""SyncReplay: samples go into a replay buffer, and the driver learns from what it draws (DQN, SAC).

RLlib 0.8's SyncReplayOptimizer, with a training intensity that is exact, and with a buffer that can
be saved. Results do not depend on the order in which samples arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.metrics import plots
from polopt.metrics.optimizer_stats import StepResult
from polopt.metrics.tab import Tab
from polopt.optimizers.checks import check_central_gradients
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.replay_optimizer import ReplayOptimizer, ReplayOptions
from polopt.replay.buffer_files import BufferFiles
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.row_store import readable_bytes
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call_workers import restore_samplers, sampler_states
from polopt.rollouts.workers.calls import Reply
from polopt.rollouts.workers.gathering import Fragments, check_batch
from polopt.rollouts.workers.worker_set import WorkerSet

logger = logging.getLogger("polopt")

#: First number of the key of the random numbers that draw rows. Workers have their index there, and
#: evaluation has 2**31.
_DRAWS = 2**31 + 1


class SyncReplayConfig(ReplayOptions):
    """Options of `SyncReplay`, besides the ones of `ReplayOptions`.

    Attributes:
        save_replay_buffer: checkpoints hold the buffer. Without it, a restored run fills the buffer
            to `learning_starts` again before it goes on learning.
    """

    save_replay_buffer: bool = False

    aliases: ClassVar[Mapping[str, str]] = {
        **ReplayOptions.aliases,
        "store_buffer_in_checkpoints": "save_replay_buffer",
    }


class SyncReplay(ReplayOptimizer):
    """Gathers fragments of all workers, inserts them, and learns as often as the intensity says.

    A step samples one fragment of each worker that is up. As long as none fails, a run is
    reproducible bit for bit for one seed, config and number of workers, also if `collection` is
    `overlapped`: then the next fragments are sampled while the driver learns, with weights that are
    one step older. Fragments of a failed worker are reassigned to the others. The buffer knows that
    the fragments of its replacement do not continue the ones before. With `num_workers=0` the local
    worker samples.
    """

    name = "sync_replay"
    config_class = SyncReplayConfig
    config: SyncReplayConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "insert", "draw", "learn")
    runs_in_process = True
    after_failure = "reassign"
    tab: ClassVar[Tab] = Tab(
        "Workers are idle while the driver learns, unless collection is overlapped. Where learning "
        "takes most of the time, more workers gain nothing at this training intensity.",
        plots.REPLAY,
        plots.REPLAY_METRICS,
    )

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.check = check_batch
        self.fragments = Fragments(self.calls, workers)
        self.overlaps = workers.config.rollout.collection == "overlapped"
        self._begin_buffer()
        if self.config.save_replay_buffer:
            size = readable_bytes(self.buffer.nbytes)
            logger.info("each checkpoint holds the replay buffer, up to %s", size)
        self._samplers_blocked_s = 0.0
        self._learn_s = 0.0  # of the last step

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        if rollout.collection == "async" and rollout.num_workers > 0:
            raise ConfigError(
                "key 'collection': got 'async' with optimizer 'sync_replay'. Allowed: 'sync', "
                "'overlapped', or optimizer 'async_replay'"
            )
        check_central_gradients(rollout)

    def step(self) -> StepResult:
        before, batch_size = self.metrics.counts(), self.config.train_batch_size
        with self.timers["broadcast"]:
            self._request()
        with self.timers["sample"]:
            replies = self.fragments.all()
        with self.timers["insert"]:
            for reply in replies:
                self._insert(reply.value)
        self._count_blocked(replies)
        if self.overlaps:
            with self.timers["broadcast"]:
                self._request()
        began_s = self.workers.clock()
        while self.limiter.can_learn(batch_size):
            with self.timers["draw"]:
                rows = self.buffer.sample(batch_size)
                self.limiter.learned(batch_size)
            with self.timers["learn"]:
                errors = self.learn_transitions(rows)
            if self.config.prioritized_replay:
                with self.timers["draw"]:
                    self.buffer.update_priorities(rows.indices, errors)
        self._learn_s = self.workers.clock() - began_s
        self.metrics.rollouts.end_rollout(self.policy.version)
        return self.metrics.counts_since(before)

    def _request(self) -> None:
        """Requests one fragment of each worker that is up, unless that was done."""
        if self.calls.idle:
            workers = self.workers.up()
            self.fragments.request_in_turn(workers, len(workers))

    def _begin_buffer(self) -> None:
        """An empty buffer, with random numbers of its own after each restore."""
        config = self.workers.config
        draws = np.random.SeedSequence(config.seed, spawn_key=(_DRAWS, config.restore_count))
        self.buffer = self.config.make_buffer(self.policy, draws)
        self.limiter = RateLimiter(
            self.config.training_intensity, self.config.learning_starts, clock=self.workers.clock
        )
        saves = self.config.save_replay_buffer
        self.buffer_files = BufferFiles(self.buffer, self.limiter, saves)

    def _insert(self, fragment: SampleBatch) -> None:
        """Adds a fragment to the buffer, which knows whether it continues the worker's last one."""
        self.metrics.add_lag(fragment.version, self.policy.version, weight=fragment.shape[1])
        self.limiter.inserted(self.buffer.add(fragment))

    def _count_blocked(self, replies: list[Reply]) -> None:
        """Counts the time in which samplers stood still while the driver learned in the last step:
        all of it, or, where sampling overlaps learning, what was left after their fragments."""
        busy_s = 0.0
        if self.overlaps and replies:
            busy_s = sum(sum(r.counts.seconds.values()) for r in replies) / len(replies)
        self._samplers_blocked_s += max(0.0, self._learn_s - busy_s)
        self._learn_s = 0.0

    # ---- results --------------------------------------------------------------------------------

    def extra_stats(self) -> dict[str, Any]:
        return {
            **self.buffer_stats(self.buffer.stats()),
            "training_intensity": self.limiter.delivered,
            "learner_blocked_s": self.timers["sample"].total_s,
            "samplers_blocked_s": self._samplers_blocked_s,
        }

    # ---- state ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Waits for pending fragments, and keeps them for the next step."""
        self.calls.wait()

    def worker_states(self) -> dict[str, Any]:
        """Besides statistics, the state of environments and random numbers, as `SyncSamples`."""
        return sampler_states(self.workers)

    def get_driver_state(self) -> dict[str, Any]:
        """With the counts of limiter and buffer, without rows."""
        replay = {"limiter": self.limiter.get_state(), "buffer": self.buffer.get_state()}
        return {**super().get_driver_state(), "replay": replay}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues with an empty buffer, which `buffer_files` fills. Otherwise `learning_starts`
        rows are sampled before learning goes on, at the same intensity as before."""
        super().set_state(state)
        restore_samplers(self.workers, state.get("workers", {}))
        self._begin_buffer()
        if replay := state.get("replay"):
            self.buffer.set_state(replay["buffer"])
            self.limiter.set_state(replay["limiter"], rows=0)
