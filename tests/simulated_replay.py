"""`AsyncReplay` with simulated samplers and shards."""

from __future__ import annotations

from fractions import Fraction as Exact
from typing import Any

from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from simulated_channel import oldest_first

from polopt.optimizers.async_replay import AsyncReplay
from polopt.policies.dqn import DQNPolicy

GAMMA, BATCH = 0.9, 8
OPTIONS: dict[str, Any] = {
    "num_replay_shards": 2,
    "buffer_size": 4000,
    "learning_starts": 60,
    "train_batch_size": BATCH,
    "training_intensity": 2.0,
    "prioritized_replay": True,
}


def make(script: Any = oldest_first, n_step: int = 3, rollout: Any = None, **options: Any) -> Any:
    """Returns an optimizer with three samplers, each with two environments and fragments of five
    steps."""
    rollout = {"num_workers": 3, "max_consecutive_failures": 1000, **(rollout or {})}
    config = worker_config(DQNPolicy, rollout=rollout, n_step=n_step, gamma=GAMMA)
    transport = FakeTransport()
    transport.script = script
    workers = FakeWorkerSet(config, transport)
    return make_optimizer(AsyncReplay, workers, **{**OPTIONS, **options})


def credit(optimizer: Any) -> Exact:
    """Returns the number of rows by which learning is behind: the intensity times the rows that the
    limiter counts, minus the rows learned."""
    counted = optimizer.limiter.num_counted
    return Exact(optimizer.config.training_intensity).limit_denominator(10**6) * counted - (
        optimizer.metrics.num_env_steps_trained
    )
