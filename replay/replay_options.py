"""`ReplayOptions`: the options of a strategy that replays."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from polopt.common.clock import Clock
from polopt.common.config import Config, ConfigError
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer


class ReplayOptions(Config):
    """Options of the buffer and of the rate limiter. The config of a replay strategy inherits them.

    Attributes:
        replay_capacity: rows of all shards together.
        replay_unit: `transition`, or `sequence` for policies with memory.
        replay_sequence_length: steps of a sequence, burn-in included; 0: those of a fragment.
        replay_burn_in: first steps of a sequence, which bring the memory up to date.
        prioritized_replay: whether rows are drawn in proportion to their priority.
        prioritized_replay_alpha: exponent of the priorities.
        prioritized_replay_beta: exponent of the importance weights at the start.
        final_prioritized_replay_beta: at the end.
        prioritized_replay_beta_annealing_steps: environment steps from the one to the other.
        prioritized_replay_eps: added to the priorities.
        learning_starts: environment steps in the buffer before learning starts.
        training_intensity: rows learned for each row sampled.
        replay_in_checkpoint: checkpoints hold the rows of the buffer.
        replay_directory: of files that the buffer is mapped from; empty: it is in memory.
    """

    replay_capacity: int = Field(1_000_000, ge=1, lt=2**31)
    replay_unit: Literal["transition", "sequence"] = "transition"
    replay_sequence_length: int = Field(0, ge=0)
    replay_burn_in: int = Field(0, ge=0)
    prioritized_replay: bool = False
    prioritized_replay_alpha: float = Field(0.6, ge=0.0)
    prioritized_replay_beta: float = Field(0.4, ge=0.0, le=1.0)
    final_prioritized_replay_beta: float = Field(1.0, ge=0.0, le=1.0)
    prioritized_replay_beta_annealing_steps: int = Field(1_000_000, ge=1)
    prioritized_replay_eps: float = Field(1e-6, gt=0.0)
    learning_starts: int = Field(1_000, ge=0)
    training_intensity: float = Field(1.0, gt=0.0)
    replay_in_checkpoint: bool = False
    replay_directory: str = ""

    def make_buffer(
        self,
        gamma: float,
        n_step: int,
        seed: int | np.random.SeedSequence,
        fragment_length: int,
        num_shards: int = 1,
    ) -> ReplayBuffer:
        """The buffer, or one of several shards of it.

        Args:
            gamma: discount of a step.
            n_step: largest number of steps of a return.
            seed: of the draws.
            fragment_length: steps of a fragment.
            num_shards: number of buffers that share `replay_capacity`.

        Raises:
            ConfigError: the options do not fit each other.
        """
        if self.learning_starts > self.replay_capacity:
            raise ConfigError(
                f"key 'learning_starts': got {self.learning_starts:,}; allowed: up to "
                f"{self.replay_capacity:,}, the 'replay_capacity'"
            )
        sequences = self.replay_unit == "sequence"
        return ReplayBuffer(
            max(1, self.replay_capacity // num_shards),
            gamma,
            n_step,
            seed=seed,
            alpha=self.prioritized_replay_alpha if self.prioritized_replay else None,
            beta=self.prioritized_replay_beta,
            final_beta=self.final_prioritized_replay_beta,
            beta_rows=max(1, self.prioritized_replay_beta_annealing_steps // num_shards),
            priority_epsilon=self.prioritized_replay_eps,
            unit=self.replay_unit,
            sequence_length=(self.replay_sequence_length or fragment_length) if sequences else None,
            burn_in=self.replay_burn_in,
            directory=self.replay_directory or None,
        )

    def make_limiter(self, clock: Clock, error_buffer: int | None = None) -> RateLimiter:
        """The rate limiter. `error_buffer`: see there."""
        return RateLimiter(self.training_intensity, self.learning_starts, error_buffer, clock)
