"""Minibatch SGD by one learner, or by several that sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.metrics.learner import LEARNER_KEYS
from polopt.policies.learning.config import PolicyConfig
from polopt.policies.learning.flat_parameters import FlatParameters
from polopt.policies.learning.minibatches import num_minibatches, shuffled
from polopt.policies.learning.reducer import Reducer


class Learner(Protocol):
    """The part of `Policy` that SGD uses; see there."""

    config: PolicyConfig
    flat: FlatParameters
    shuffle: np.random.Generator
    non_finite_gradients: int

    def training_rows(
        self, batch: SampleBatch, reducer: Reducer | None = None
    ) -> dict[str, Tensor]:
        """Valid rows of the columns of the loss."""

    def backward(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Computes the gradient of the mean loss."""

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        """Applies it."""

    def on_epoch(self, stats: Mapping[str, float]) -> bool:
        """Called after each epoch; True stops learning."""

    def on_learned(self, stats: Mapping[str, float]) -> None:
        """Called after the last epoch."""


def sgd(policy: Learner, batch: SampleBatch, reducer: Reducer) -> dict[str, float]:
    """`num_sgd_iter` epochs over the rows of all learners; see `Policy.learn_on_batch`.

    All learners make the same number of updates with the same summed gradients, whatever their
    numbers of rows: the gradient of an update is that of the mean loss over all learners' rows of
    the minibatch.
    """
    config = policy.config
    rows = policy.training_rows(batch, reducer)
    total = torch.tensor([float(len(rows["obs"]))])
    reducer.sum_(total)
    if total[0] == 0:  # no learner has a row: no gradient and no update
        return {}
    minibatches = num_minibatches(int(total[0]), reducer.world_size, config.sgd_minibatch_size)
    epochs: list[dict[str, float]] = []
    for _ in range(config.num_sgd_iter):
        updates = [
            update(policy, part, reducer) for part in shuffled(rows, minibatches, policy.shuffle)
        ]
        epochs.append(_mean(updates))
        if policy.on_epoch(epochs[-1]):
            break
    # The KL of a minibatch is measured before its update: that of a single update is always 0.
    if minibatches * len(epochs) > 1:
        policy.on_learned(epochs[-1])
    stats = _mean(epochs)
    # The KL of the last epoch, which is the distance from the policy that acted.
    stats["mean_kl_loss"] = epochs[-1].get("mean_kl_loss", 0.0)
    return stats


def update(policy: Learner, rows: Mapping[str, Tensor], reducer: Reducer) -> dict[str, float]:
    """One update from one minibatch of each learner.

    Args:
        policy: this learner.
        rows: its rows `[B, ...]`; B may be 0.
        reducer: sums over all learners.

    Returns:
        learner statistics, means over all learners' rows.
    """
    count = len(rows["obs"])
    stats = policy.backward(rows) if count else dict.fromkeys(LEARNER_KEYS, 0.0)
    if reducer.world_size > 1:
        stats = reduce_gradient(policy, count, stats, reducer)
    return stats | policy.apply_flat()


# Overflow makes the gradient non-finite; the weight updater does not apply such gradients.
@np.errstate(over="ignore", invalid="ignore")
def reduce_gradient(
    policy: Learner, count: int, stats: Mapping[str, float], reducer: Reducer
) -> dict[str, float]:
    """Averages `policy.flat.grads` and `stats` over the rows of all learners.

    Row count and statistics are in the buffer's tail: one all-reduce sums them with the gradient.

    Args:
        policy: this learner; its gradient is the mean over `count` rows.
        count: its number of rows.
        stats: its statistics, means over the same rows.
        reducer: sums over all learners.

    Returns:
        the averaged statistics.
    """
    flat = policy.flat
    if count == 0:
        flat.zero_grads()
    elif not math.isfinite(flat.norm()):
        # The sum will not be finite either, and no learner will apply it. Which learner caused it
        # is only known here.
        policy.non_finite_gradients += 1
    flat.set_tail([1.0, *(stats.get(key, 0.0) for key in LEARNER_KEYS)])
    flat.scale(float(count))
    reducer.sum_(flat.buffer)
    rows, *sums = flat.get_tail()
    flat.scale(1.0 / max(rows, 1.0))
    return {key: total / max(rows, 1.0) for key, total in zip(LEARNER_KEYS, sums, strict=True)}


def _mean(parts: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for part in parts for key in part)
    result = {}
    for key in keys:
        values = [part[key] for part in parts if key in part]
        result[key] = sum(values) / len(values)
    return result
