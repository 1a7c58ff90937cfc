"""`ReplayOptimizer`: what the strategies with a replay buffer share, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pydantic

from polopt.common.transitions import Transitions
from polopt.metrics.lag import AgeHistogram
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.policies.learning.schedules import Schedule, ScheduleValue
from polopt.rollouts.workers.worker_set import WorkerSet


class ReplayOptions(OptimizerConfig):
    """Options of optimizers with a replay buffer.

    Attributes:
        buffer_size: rows (environment steps) that the buffer holds. The newest row replaces the
            oldest.
        learning_starts: rows that have to be in the buffer before learning begins.
        train_batch_size: rows of one update.
        training_intensity: rows learned per row sampled, once learning has begun: with batches of
            32 rows, 8 makes one update for 4 environment steps. What a run delivers differs by less
            than one batch.
        prioritized_replay: draw rows in proportion to `|TD error|^alpha` (Schaul et al., 2016).
            False: all rows with the same probability.
        prioritized_replay_alpha: see there; 0 would be uniform.
        prioritized_replay_beta: exponent of the importance-sampling weights, a number or
            `[[environment steps, value], ...]`. 1 corrects the whole bias.
        prioritized_replay_eps: added to each absolute TD error, so that every row can be drawn.
    """

    buffer_size: int = pydantic.Field(50_000, ge=1, le=10**10)
    learning_starts: int = pydantic.Field(1000, ge=0, le=10**10)
    train_batch_size: int = pydantic.Field(32, ge=1, le=10**8)
    training_intensity: float = pydantic.Field(8.0, gt=0.0, le=1e6)
    prioritized_replay: bool = False
    prioritized_replay_alpha: float = pydantic.Field(0.6, gt=0.0, le=10.0)
    prioritized_replay_beta: ScheduleValue = 0.4
    prioritized_replay_eps: float = pydantic.Field(1e-6, gt=0.0, le=1e6)

    aliases: ClassVar[Mapping[str, str]] = {
        "num_steps_sampled_before_learning_starts": "learning_starts",
        "train_batch_size_per_learner": "train_batch_size",
    }

    @pydantic.model_validator(mode="after")
    def _check_sizes(self) -> ReplayOptions:
        for key in ("learning_starts", "train_batch_size"):
            if (given := getattr(self, key)) > self.buffer_size:
                raise ValueError(
                    f"key {key!r}: got {given} with buffer_size={self.buffer_size}; allowed: at "
                    "most buffer_size"
                )
        if not self.prioritized_replay:
            for key in ("alpha", "beta", "eps"):
                key = f"prioritized_replay_{key}"
                if (given := getattr(self, key)) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"key {key!r}: got {given} with prioritized_replay=False; allowed: "
                        f"{type(self).model_fields[key].default}, or prioritized_replay=True"
                    )
        return self


class ReplayOptimizer(PolicyOptimizer):
    """A strategy whose driver learns from rows that it draws from a replay buffer.

    Attributes:
        row_ages: environment steps between sampling a row and drawing it.
    """

    config_class = ReplayOptions
    config: ReplayOptions
    learns_from: ClassVar[type] = Transitions

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.row_ages = AgeHistogram(self.config.buffer_size)
        self._beta = Schedule(self.config.prioritized_replay_beta)

    @property
    def beta(self) -> float:
        """Exponent of the importance-sampling weights at this moment; 0 where drawing is
        uniform."""
        if not self.config.prioritized_replay:
            return 0.0
        return self._beta(self.metrics.num_env_steps_sampled)

    def learn_transitions(self, rows: Transitions) -> np.ndarray:
        """Makes one update of the driver's policy with B rows; counts the update and the rows, each
        as often as it is drawn.

        Returns:
            absolute TD errors `[B]` before the update: the new priorities of the rows.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        metrics, policy = self.metrics, self.policy
        version = policy.version
        learn: Any = policy
        stats, errors = learn.learn_on_transitions(rows)
        updates = policy.version - version
        self.workers.faults.note_update(updates > 0, why="gradient of the batch")
        metrics.add_training(updates * rows.num_rows, updates, stats, rows.num_rows)
        metrics.add_update_rows(updates, updates * rows.num_rows)
        return errors  # type: ignore[no-any-return]
