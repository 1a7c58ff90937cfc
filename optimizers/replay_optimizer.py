"""`ReplayOptimizer`, the base class of strategies with a replay buffer, and their options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic

from polopt.common.transitions import Transitions
from polopt.metrics.lag import distribution
from polopt.metrics.number import declare
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.learning.weight_updater import Updates
from polopt.policies.policy_group import learning
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.replay.row_store import ColumnSpec, check_size
from polopt.rollouts.workers.worker_config import WorkerConfig


class ReplayOptions(OptimizerConfig):
    """Options of optimizers with a replay buffer.

    Attributes:
        buffer_size: number of rows that the buffer can hold. Each environment step is one row, and
            some next observations need a further row. In a full buffer, a new row replaces the
            oldest row.
        learning_starts: number of rows that the buffer must hold before learning begins.
        train_batch_size: number of rows of one update.
        training_intensity: number of rows learned per row sampled, once learning has begun. For
            example, with batches of 32 rows, an intensity of 8 means one update for every 4
            environment steps. With `sync_replay`, after every step, the rows learned differ from
            the intensity times the rows sampled by less than one batch. With `async_replay`,
            `error_buffer` limits the difference.
        prioritized_replay: if True, rows are drawn in proportion to `|TD error|^alpha` (Schaul et
            al., 2016). If False, all rows have the same probability.
        prioritized_replay_alpha: the exponent alpha of the priorities. An exponent of 0 would give
            all rows the same probability.
        prioritized_replay_beta: exponent of the importance-sampling weights at the start of a run.
        final_prioritized_replay_beta: exponent of the importance-sampling weights at the end of the
            annealing. With 1, the weights correct the whole bias of prioritized draws.
        prioritized_replay_beta_annealing_timesteps: number of environment steps over which the
            exponent of the importance-sampling weights changes from its first to its final value.
        prioritized_replay_eps: a constant that is added to each absolute TD error, so that every
            row can be drawn.
    """

    buffer_size: int = pydantic.Field(default=50_000, ge=1, le=2**31 - 1)
    learning_starts: int = pydantic.Field(default=1000, ge=0, le=10**10)
    train_batch_size: int = pydantic.Field(default=32, ge=1, le=10**8)
    training_intensity: float = pydantic.Field(
        default=8.0,
        gt=0.0,
        le=1e6,
        description="a number above 0, at most 1e+06. For one update after every n environment "
        "steps, train_batch_size / n",
    )
    prioritized_replay: bool = False
    prioritized_replay_alpha: float = pydantic.Field(default=0.6, gt=0.0, le=10.0)
    prioritized_replay_beta: float = pydantic.Field(default=0.4, ge=0.0, le=10.0)
    final_prioritized_replay_beta: float = pydantic.Field(default=1.0, ge=0.0, le=10.0)
    prioritized_replay_beta_annealing_timesteps: int = pydantic.Field(default=10**6, ge=1, le=2**62)
    prioritized_replay_eps: float = pydantic.Field(default=1e-6, gt=0.0, le=1e6)

    @classmethod
    def fit_preset(cls, options: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
        fitting = dict(options)
        if options.get("prioritized_replay") is False:
            for key in options:  # these options have no meaning without priorities
                if "prioritized_replay_" in key and key not in given:
                    del fitting[key]
        size, starts = options.get("buffer_size"), "learning_starts"
        if isinstance(size, int) and starts not in given:
            fitting[starts] = min(size, options.get(starts, cls.model_fields[starts].default))
        return fitting

    @pydantic.model_validator(mode="after")
    def _check_sizes(self) -> ReplayOptions:
        for key in ("learning_starts", "train_batch_size"):
            if (given := getattr(self, key)) > self.buffer_size:
                raise ValueError(
                    f"key {key!r}: got {given} with buffer_size={self.buffer_size}; allowed: at "
                    "most buffer_size"
                )
        if not self.prioritized_replay:
            for key, field in ReplayOptions.model_fields.items():
                given = getattr(self, key)
                if "prioritized_replay_" in key and given != field.default:
                    raise ValueError(
                        f"key {key!r}: got {given} with prioritized_replay=False; allowed: "
                        f"{field.default}, or prioritized_replay=True"
                    )
        return self

    def new_buffer(
        self, policy: Any, seed: int | np.random.SeedSequence, num_shards: int = 1, **unit: Any
    ) -> ReplayBuffer:
        """Returns an empty buffer for `buffer_size / num_shards` rows.

        Args:
            policy: config of a `ReplayPolicy`.
            seed: seed of the draws.
            num_shards: number of buffers of the run, which share `buffer_size`.
            unit: further arguments of `ReplayBuffer`.
        """
        return ReplayBuffer(
            self.buffer_size // num_shards,
            policy.gamma,
            policy.n_step,
            seed=seed,
            alpha=self.prioritized_replay_alpha if self.prioritized_replay else None,
            beta=self.prioritized_replay_beta,
            final_beta=self.final_prioritized_replay_beta,
            beta_rows=self.prioritized_replay_beta_annealing_timesteps,
            priority_epsilon=self.prioritized_replay_eps,
            capacity_key="buffer_size",
            **unit,
        )

    def make_buffer(self, policy: Any, seed: int | np.random.SeedSequence = 0) -> ReplayBuffer:
        """Returns an empty buffer for the transitions of a policy. The operating system provides
        memory only as the buffer fills.

        Args:
            policy: a `ReplayPolicy`.
            seed: seed of the draws.

        Raises:
            ConfigError: the full buffer would be larger than the free memory, or an option of the
                buffer is out of range.
        """
        buffer = self.new_buffer(policy.config, seed)
        action = policy.dist.random(np.random.default_rng(0), 1)
        buffer.allocate(
            ColumnSpec(policy.encoder.row_shape, policy.encoder.row_dtype),
            ColumnSpec(action.shape[1:], action.dtype),
        )
        return buffer


class ReplayOptimizer(PolicyOptimizer):
    """Base class of strategies whose driver learns from rows of a replay buffer. `policy` is a
    `ReplayPolicy`. A subclass makes the rate limiter.

    In `step`, a subclass decides where rows are stored and drawn, and learns from them:

        errors = self.learn_transitions(rows)          # makes and counts one update
        buffer.update_priorities(rows.indices, errors)
    """

    config_class = ReplayOptions
    config: ReplayOptions
    learns_from: ClassVar[type] = Transitions
    limiter: RateLimiter
    numbers = (
        *declare("""
            training_intensity (rows/row): rows learned per row sampled since learning began. It
                should be close to the option `training_intensity`
            buffer_fill (share, title=Fill of the replay buffer): share of the replay buffer in use.
                Learning begins when the buffer has `learning_starts` rows
            buffer_rows (rows): transitions in the buffer
            buffer_bytes (bytes): memory of a full buffer
        """),
        *distribution(
            "row_age",
            "rows",
            "age of the rows drawn in the interval: the rows that were stored after this row",
            "age. The bins are sixteenths of `buffer_size`",
            ("row_age", "", ""),
        ),
        *declare("""
            num_gaps (fragments): fragments that did not continue the previous fragment of their
                worker, because of a failure or of data that were not finite
            priority_mean (metric=priority{over=mean}): mean of the absolute TD errors that became
                priorities in the interval. NaN if rows are drawn uniformly
            priority_max (metric=priority{over=max}): largest of these TD errors
            priority_beta (metric=priority{over=beta}): current exponent of the importance-sampling
                weights. NaN if rows are drawn uniformly
            learner_blocked_s (s, total, metric=blocked_s{who=learner}): time for which the learner
                waited for rows, since the start of this process
            samplers_blocked_s (s, total, metric=blocked_s{who=samplers}): time for which samplers
                waited for the learner, since the start of this process
        """),
    )

    @classmethod
    def check_spaces(cls, worker_config: WorkerConfig, config: Any) -> None:
        """Checks that the full buffers of all policies that learn fit into the free memory."""
        spaces = worker_config.observation_space, worker_config.action_space
        policy = worker_config.policy_class(*spaces, worker_config.policy)
        nbytes = sum(config.make_buffer(one).nbytes for one in learning(policy).values())
        check_size(nbytes, "buffer_size", config.buffer_size)

    def learn_transitions(self, rows: Any) -> np.ndarray:
        """Makes one update of the driver's policy, and counts the update and its rows. A row counts
        again each time that the policy learns from it.

        Args:
            rows: the batch, as `Transitions` or `Sequences`.

        Returns:
            the absolute TD errors `[B]` of the rows or sequences before the update. They are the
            new priorities.

        Raises:
            NonFiniteError: too many consecutive updates were skipped.
        """
        learner: Any = self.policy
        updates = Updates(learner)
        stats, errors = learner.learn_on_transitions(rows)
        self.workers.faults.note_update(updates.num > 0, why="gradient of the batch")
        learned = min(updates.num, 1) * rows.num_rows  # a group makes an update for each policy
        self.metrics.add_training(learned, updates.num, stats, rows.num_rows)
        self.metrics.add_update_rows(updates.num, learned)
        new_priorities: np.ndarray = errors
        return new_priorities

    def get_driver_state(self) -> dict[str, Any]:
        """See `PolicyOptimizer.get_driver_state`. Adds the counts of the rate limiter. The state
        does not contain the rows that are stored."""
        return {**super().get_driver_state(), "limiter": self.limiter.get_state()}

    def restore_limiter(self, state: Mapping[str, Any]) -> None:
        """Makes a new rate limiter continue from a state that `get_state` of any optimizer
        returned. The buffers are empty, so `learning_starts` rows are sampled before learning
        continues. The training intensity does not count these rows."""
        # In former checkpoints of SyncReplay, the limiter is in `replay`.
        saved = state.get("limiter") or state.get("replay", {}).get("limiter")
        if saved:
            self.limiter.set_state(saved, rows=0)
