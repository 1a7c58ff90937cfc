"""SyncReplay: the driver stores samples in a replay buffer, and learns from drawn rows (DQN, SAC).

The strategy follows RLlib 0.8's SyncReplayOptimizer. The option `training_intensity` sets the ratio
of learning to sampling. Results do not depend on the order in which samples arrive.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Sequences
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.replay_optimizer import ReplayOptimizer, ReplayOptions
from polopt.optimizers.sync_sampling import SyncSampling
from polopt.policies.policy_group import PolicyGroup, learning
from polopt.replay.buffer_files import BufferFiles
from polopt.replay.policy_buffers import PolicyBuffers
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.replay.row_store import readable_bytes
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

logger = logging.getLogger("polopt")

#: The first number of the spawn key that seeds the draws of rows. The spawn keys of workers begin
#: with the index of the worker, and the spawn keys of evaluation begin with 2**31.
_DRAWS = 2**31 + 1


class SyncReplayConfig(ReplayOptions):
    """Options of `SyncReplay`, in addition to the options of `ReplayOptions`.

    Attributes:
        save_replay_buffer: if True, checkpoints contain the replay buffer. If False, a restored run
            first samples `learning_starts` rows into an empty buffer before it continues to learn.
        replay_unit: `transition` draws single transitions. `sequence` draws sequences, for policies
            with memory (`learns_from` is `Sequences`). A batch of transitions has
            `train_batch_size` rows. A batch of sequences has this number of rows after the burn-in,
            or fewer if the sequences contain resets of next-step autoreset mode or end early.
        sequence_length: number of steps of a sequence, including burn-in steps. Sequences
            begin at the first steps of fragments. In a fragment longer than `sequence_length`, the
            last steps would never be drawn. Therefore, `rollout_fragment_length` must not be larger
            than `sequence_length`.
            With `replay_unit: transition`, `sequence_length` must be None.
        burn_in: number of steps at the start of each sequence that only serve to recompute the
            policy's memory with the current weights. These steps do not contribute to the loss
            (Kapturowski et al., 2019).
    """

    save_replay_buffer: bool = False
    replay_unit: Literal["transition", "sequence"] = "transition"
    sequence_length: int | None = pydantic.Field(default=None, ge=1, le=10**6)
    burn_in: int = pydantic.Field(default=0, ge=0, le=10**6)

    @pydantic.model_validator(mode="after")
    def _check_unit(self) -> SyncReplayConfig:
        length, burn_in = self.sequence_length, self.burn_in
        if self.replay_unit == "transition":
            for key, given, idle in (("sequence_length", length, None), ("burn_in", burn_in, 0)):
                if given != idle:
                    raise ValueError(
                        f"key {key!r}: got {given} with replay_unit='transition'; allowed: {idle}, "
                        "or replay_unit='sequence'"
                    )
            return self
        if length is None:
            raise ValueError(
                "key 'sequence_length': got None with replay_unit='sequence'; allowed: a number "
                "of steps"
            )
        if burn_in >= length:
            raise ValueError(
                f"key 'burn_in': got {burn_in} with sequence_length={length}; allowed: 0 to "
                f"{length - 1}"
            )
        if self.train_batch_size % (length - burn_in):
            raise ValueError(
                f"key 'train_batch_size': got {self.train_batch_size} with sequences of "
                f"{length - burn_in} rows after their burn-in; allowed: a multiple of "
                f"{length - burn_in}"
            )
        return self

    def new_buffer(
        self, policy: Any, seed: int | np.random.SeedSequence, num_shards: int = 1, **unit: Any
    ) -> ReplayBuffer:
        unit |= {"unit": self.replay_unit, "burn_in": self.burn_in}
        unit["sequence_length"] = self.sequence_length
        return super().new_buffer(policy, seed, num_shards, **unit)


class SyncReplay(SyncSampling, ReplayOptimizer):
    """Gathers one fragment from each worker, inserts the fragments into a buffer, and learns from
    batches of the buffer. The training intensity determines the number of these batches.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="dqn",
            optimizer={"name": "sync_replay", "training_intensity": 8, "buffer_size": 50_000},
            num_workers=0,                     # the local worker samples
        )

    As long as no worker fails or starts late, a run is reproducible bit for bit for one seed,
    config and number of workers. This is also true with `collection: overlapped`. With this option,
    workers sample the next fragments while the driver learns, so the weights of the workers lack
    the updates of one step. If a worker fails, the workers that are up sample its fragments, and a
    new worker later replaces it. No n-step return or sequence contains steps of both the failed
    worker and the new worker.
    """

    name = "sync_replay"
    config_class = SyncReplayConfig
    config: SyncReplayConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "insert", "draw", "learn")
    async_instead = "async_replay"
    also_learns_from: ClassVar[Mapping[type, tuple[str, Any]]] = {
        Sequences: ("replay_unit", "sequence")
    }

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self._begin_buffer()
        if self.config.save_replay_buffer:
            size = readable_bytes(self.buffer.nbytes)
            logger.info("each checkpoint contains the replay buffer, which has up to %s", size)
        self._samplers_blocked_s = 0.0
        self._learn_s = 0.0  # duration of learning in the last step

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        super().check(rollout, config)
        length, steps = config.sequence_length, rollout.rollout_fragment_length
        if length is not None and steps > length:
            raise ConfigError(
                f"key 'rollout_fragment_length': got {steps} with sequence_length={length}. "
                f"Allowed: 1 to {length}, because sequences begin at the beginnings of fragments"
            )

    @classmethod
    def check_spaces(cls, worker_config: WorkerConfig, config: Any) -> None:
        """Checks that the buffer can hold, for each environment, one fragment and the steps of one
        n-step return or sequence. Also checks that the buffer fits into the free memory."""
        rollout, policy = worker_config.rollout, worker_config.policy
        window = config.sequence_length or max(one.most_steps for one in learning(policy).values())
        envs = rollout.num_envs_per_worker * max(1, rollout.num_workers) * worker_config.num_agents
        needed = envs * (window + rollout.rollout_fragment_length)
        if config.buffer_size < needed:
            raise ConfigError(
                f"key 'buffer_size': got {config.buffer_size:,}. Allowed: {needed:,} or more, "
                f"because the buffer must hold, for each of {envs} environments, one fragment and "
                f"the {window} steps of an n-step return or a sequence"
            )
        super().check_spaces(worker_config, config)

    def step(self) -> StepResult:
        before, batch_size = self.metrics.counts(), self.config.train_batch_size
        with self.timers["broadcast"]:
            self.request()
        with self.timers["sample"]:
            replies = self.fragments.all()
        with self.timers["insert"]:
            for reply in replies:
                self._insert(reply.value)
        self._count_blocked(replies)
        if self.overlaps:
            with self.timers["broadcast"]:
                self.request()
        began_s = self.workers.clock()
        while self.limiter.can_learn(batch_size):
            with self.timers["draw"]:
                rows = self._draw()
                self.limiter.learned(rows.num_rows)
            with self.timers["learn"]:
                errors = self.learn_transitions(rows)
            if self.config.prioritized_replay:
                with self.timers["draw"]:
                    self.buffer.update_priorities(rows.indices, errors)
        self._learn_s = self.workers.clock() - began_s
        self.metrics.rollouts.end_rollout(self.policy.version)
        return self.metrics.counts_since(before)

    def _draw(self) -> Any:
        """Draws a batch of `train_batch_size` rows, for each policy that may learn. A batch of
        sequences can have fewer rows. See `replay_unit`."""
        count, length = self.config.train_batch_size, self.config.sequence_length
        if length is None:
            return self.buffer.sample(count)
        return self.buffer.sample_sequences(count // (length - self.config.burn_in))

    def _begin_buffer(self) -> None:
        """Makes an empty buffer and its rate limiter. The seed of the draws depends on the number
        of times that the run was restored."""
        config = self.workers.config
        key = (_DRAWS, config.restore_count)
        draws = np.random.SeedSequence(config.seed, spawn_key=key)
        if isinstance(self.policy, PolicyGroup):
            buffers = {
                name: self.config.make_buffer(one, draws if place == 0 else draws.spawn(1)[0])
                for place, (name, one) in enumerate(learning(self.policy).items())
            }
            limiters = {name: self._new_limiter() for name in buffers}
            self.buffer: Any = PolicyBuffers(buffers, limiters)
            self.limiter: Any = self.buffer.limiter
        else:
            self.buffer = self.config.make_buffer(self.policy, draws)
            self.limiter = self._new_limiter()
        saves = self.config.save_replay_buffer
        self.buffer_files = BufferFiles(self.buffer, self.limiter, saves)

    def _new_limiter(self) -> RateLimiter:
        return RateLimiter(self.config.training_intensity, self.config.learning_starts)

    def _insert(self, fragment: SampleBatch) -> None:
        """Adds a fragment to the buffer. The buffer itself detects whether the fragment continues
        the last fragment of the same worker."""
        self.metrics.add_lag(fragment.version, self.policy.version, weight=fragment.shape[1])
        self.limiter.inserted(self.buffer.add(fragment), self.buffer.num_drawable > 0)

    def _count_blocked(self, replies: list[Reply]) -> None:
        """Counts the time for which samplers were idle while the driver learned in the last step.

        Without `collection: overlapped`, this is the whole learning time. With this option, it is
        the learning time minus the mean time that a sampler needed for its fragment, or 0.
        """
        busy_s = 0.0
        if self.overlaps and replies:
            busy_s = sum(sum(r.counts.seconds.values()) for r in replies) / len(replies)
        self._samplers_blocked_s += max(0.0, self._learn_s - busy_s)
        self._learn_s = 0.0

    # ---- results --------------------------------------------------------------------------------

    def extra_stats(self) -> dict[str, Any]:
        buffer = self.buffer.stats()
        priority = buffer.get("priority", {"mean": math.nan, "max": math.nan})
        return {
            "buffer_rows": buffer["num_rows"],
            "buffer_fill": buffer["fill"],
            "buffer_bytes": buffer["nbytes"],
            "row_age": buffer["row_age"],
            "num_gaps": buffer["num_gaps"],
            "priority_mean": priority["mean"],
            "priority_max": priority["max"],
            "priority_beta": buffer.get("beta", math.nan),
            "training_intensity": self.limiter.delivered,
            "learner_blocked_s": self.timers["sample"].total_s,
            "samplers_blocked_s": self._samplers_blocked_s,
        }

    # ---- state ----------------------------------------------------------------------------------

    def get_driver_state(self) -> dict[str, Any]:
        """See `ReplayOptimizer.get_driver_state`. Adds the counts of the buffer."""
        return {**super().get_driver_state(), "replay": {"buffer": self.buffer.get_state()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` of any optimizer returned, with an empty buffer.

        If rows were saved, `buffer_files` then fills the buffer. Otherwise, `learning_starts` rows
        are sampled before learning continues. The training intensity does not count these rows.
        """
        super().set_state(state)
        self._begin_buffer()
        if replay := state.get("replay"):
            self.buffer.set_state(replay["buffer"])
        self.restore_limiter(state)
