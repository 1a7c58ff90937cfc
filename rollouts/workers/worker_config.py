"""`WorkerConfig`: everything that a rollout worker is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gymnasium import Space

from polopt.common.config import Config
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.resolving import EnvSource


@dataclass(frozen=True)
class WorkerConfig:
    """All a worker is made from. Small: weights are sent after construction.

    Attributes:
        rollout: options of sampling.
        env: what `polopt.rollouts.envs.resolving.resolve_env` gave.
        policy_class: the policy, or an adapter of `polopt.policies.actors`, which only acts.
        policy: its options.
        observation_space: of one environment.
        action_space: of one environment.
        seed: the run's; workers derive their own from it.
        restart_count: how many workers have stood at this index before; replacements must not
            repeat the episodes of those they replace.
        restore_count: how often the run has been restored from a checkpoint; likewise.
        device: where the policy learns.
        postproc: what a `Collector`'s workers do to each batch, last of all.
    """

    rollout: RolloutConfig
    env: EnvSource
    policy_class: type[Any]
    policy: Config
    observation_space: Space[Any]
    action_space: Space[Any]
    seed: int
    restart_count: int = 0
    restore_count: int = 0
    device: str = "cpu"
    postproc: Callable[[SampleBatch], SampleBatch] | None = None
