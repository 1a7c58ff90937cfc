"""Samples of workers that the driver learns from: what SyncSamples and AsyncSamples share."""

from __future__ import annotations

import math
from typing import Any

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.optimizers.base import PolicyOptimizer
from polopt.rollouts.workers.rollout_worker import RolloutWorker


def sample(worker: RolloutWorker, weights: Weights | None) -> SampleBatch:
    """Runs in a worker: takes over weights, and samples a fragment `[T, N]` with them."""
    worker.set_weights(weights)
    return worker.next_batch()


def check_batch(value: Any) -> None:
    """Refuses an answer that is no batch.

    Raises:
        TypeError: says what it is.
    """
    if not isinstance(value, SampleBatch):
        raise TypeError(f"a SampleBatch was expected; got {type(value).__name__}")


def num_fragments(optimizer: PolicyOptimizer, default: int) -> int:
    """Number of fragments in a batch of `train_batch_size` rows; `default` where that is None."""
    config: Any = optimizer.config
    rollout = optimizer.workers.config.rollout
    rows = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    return -(-config.train_batch_size // rows) if config.train_batch_size else default


def sample_message_bytes(optimizer: PolicyOptimizer) -> int:
    """Size of the larger one of a call, which holds weights, and a fragment; see
    `WorkerSet.use_transport`. A fragment's size is that of its observations, which are most of it:
    what policies add is known once there is a fragment."""
    rollout, encoder = optimizer.workers.config.rollout, optimizer.policy.encoder
    row_bytes = math.prod(encoder.shape) * encoder.dtype.itemsize
    rows = (rollout.rollout_fragment_length + 1) * rollout.num_envs_per_worker
    return max(int(optimizer.policy.flat.params.nbytes), rows * row_bytes)
