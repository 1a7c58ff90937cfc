"""One update of the driver's policy, from gathered fragments or from gradients of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.optimizers.base import PolicyOptimizer
from polopt.rollouts.collectors.gatherer import Landed
from polopt.rollouts.sampling.requests import RoundInfo


def num_fragments(optimizer: PolicyOptimizer, default: int) -> int:
    """Number of fragments in a batch of `train_batch_size` rows; `default` where that is 0."""
    config: Any = optimizer.config
    rollout = optimizer.workers.config.rollout
    rows = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    return -(-config.train_batch_size // rows) if config.train_batch_size else default


def sample_message_bytes(optimizer: PolicyOptimizer) -> int:
    """Size of the larger one of a request, which holds weights, and a fragment; see
    `WorkerSet.use_transport`. A fragment's size is that of its observations, which are most of it:
    what policies add is known once there is a fragment."""
    rollout, encoder = optimizer.workers.config.rollout, optimizer.policy.encoder
    row_bytes = math.prod(encoder.shape) * encoder.dtype.itemsize
    rows = (rollout.rollout_fragment_length + 1) * rollout.num_envs_per_worker
    return max(optimizer.policy.flat.grads.nbytes, rows * row_bytes)


def learn_from_samples(
    optimizer: PolicyOptimizer, fragments: Sequence[SampleBatch], batch: SampleBatch
) -> None:
    """Counts samples and their lag, learns from the batch, and counts what was learned.

    Args:
        optimizer: has the phases `sample`, which has just ended, and `learn`.
        fragments: `[T, N]` each.
        batch: all of them, `[T, sum of N]`.

    Raises:
        NonFiniteError: too many updates in a row were skipped.
    """
    metrics, policy = optimizer.metrics, optimizer.policy
    env_steps = batch.env_steps
    metrics.timers["sample"].push_rows(env_steps)
    with metrics.timers["learn"]:
        optimizer.count_samples(env_steps, batch.episodes)
        for fragment in fragments:
            metrics.add_lag(fragment.version, policy.version)
        version = policy.version
        stats = policy.learn_on_batch(batch)
        metrics.rollouts.tick(policy.version)
        updates = policy.version - version
        if env_steps:
            log = optimizer.workers.faults.fragments
            log.update(updates > 0, why="gradient of the whole batch")
        metrics.add_training(env_steps if updates else 0, updates, stats)
    metrics.timers["learn"].push_rows(env_steps)


def take_fragment(optimizer: PolicyOptimizer, landed: Landed) -> SampleBatch:
    """Counts the seconds and the bytes of a fragment; returns its batch `[T, N]`."""
    index, fragment = landed.worker_index, landed.fragment
    parts = {"sample": fragment.sample_s}
    optimizer.metrics.worker_times.add(index, parts, fragment.frames)
    if index > 0:
        optimizer.metrics.num_bytes_received += fragment.batch.nbytes
    return fragment.batch


def apply_gradients(
    optimizer: PolicyOptimizer,
    gradients: Gradients,
    infos: Sequence[RoundInfo],
    lr_scale: float = 1.0,
) -> None:
    """Counts the rounds and their lag, applies the gradient, and counts the update.

    Args:
        optimizer: applies it to its policy.
        gradients: of one round, or the mean over several.
        infos: of those rounds.
        lr_scale: factor on the learning rate; 0 drops the gradient.

    Raises:
        NonFiniteError: too many updates in a row were skipped.
    """
    metrics, policy = optimizer.metrics, optimizer.policy
    fresh, last = 0, False
    for info in infos:
        optimizer.count_samples(info.env_steps, info.episodes)
        metrics.add_lag(info.acted, policy.version, computed=gradients.version)
        fresh += info.fresh
        last = last or info.last
    if lr_scale > 0.0 and gradients.rows > 0:
        version = policy.version
        stats = gradients.stats | policy.apply_gradients(gradients, lr_scale)
        updates = policy.version - version
        log = optimizer.workers.faults.fragments
        index = infos[0].worker_index if len(infos) == 1 else 0  # of a mean, no worker is known
        log.update(updates > 0, index, "norm of the gradient")
        if updates:
            metrics.num_gradients_accepted += len(infos)
        else:
            metrics.num_gradients_skipped += len(infos)
        metrics.add_training(fresh if updates else 0, updates, stats, gradients.rows)
    if last:
        metrics.rollouts.tick(policy.version)


def is_usable(optimizer: PolicyOptimizer, packed: Any, info: RoundInfo) -> bool:
    """Counts the faults, seconds and bytes of a round; returns whether its numbers are finite.

    Raises:
        NonFiniteError: too many in a row were not.
    """
    faults, metrics = optimizer.workers.faults, optimizer.metrics
    faults.num_restarts_below += info.restarts_below
    parts = {"sample": info.sample_s, "gradient": info.gradient_s}
    metrics.worker_times.add(info.worker_index, parts, info.env_steps, gradients=1)
    metrics.num_bytes_received += packed.nbytes
    usable = faults.fragment(info.worker_index, info.faults)
    metrics.num_gradients_skipped += not usable
    return usable
