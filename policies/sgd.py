"""Minibatch SGD by one learner, or by several that sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.metrics.learner import LEARNER_KEYS

if TYPE_CHECKING:
    from polopt.policies.policy import Policy


class Reducer(Protocol):
    """Sums over all that learn together."""

    world_size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all learners, in place."""


class LocalReducer:
    """One learner alone: each sum is its own term."""

    world_size = 1

    def sum_(self, tensor: Tensor) -> None:
        """Leaves `tensor` as it is."""


def sgd(policy: Policy, batch: SampleBatch, reducer: Reducer) -> dict[str, float]:
    """`num_sgd_iter` epochs over the rows of all learners; see `Policy.learn_on_batch`.

    All learners make the same number of updates, from the same summed gradients, whatever their
    own numbers of rows are: the gradient of an update is that of the mean loss over all rows of
    that minibatch, wherever they lie.
    """
    config = policy.config
    rows = policy.training_rows(batch)
    total = torch.tensor([float(len(rows["obs"]))])
    reducer.sum_(total)
    if total[0] == 0:  # nobody has a row: no gradient, so no update either
        return {}
    minibatches = num_minibatches(int(total[0]), reducer.world_size, config.sgd_minibatch_size)
    if config.standardize_advantages:
        rows["advantages"] = standardized(rows["advantages"], reducer)
    epochs: list[dict[str, float]] = []
    for _ in range(config.num_sgd_iter):
        updates = [
            update(policy, part, reducer) for part in shuffled(rows, minibatches, policy.shuffle)
        ]
        epochs.append(_mean(updates))
        if policy.on_epoch(epochs[-1]):
            break
    # Each minibatch's KL is measured before its own update: of one update alone it says nothing.
    if minibatches * len(epochs) > 1:
        policy.on_learned(epochs[-1])
    stats = _mean(epochs)
    # How far the policy has moved in the end, not on the way there.
    stats["mean_kl_loss"] = epochs[-1].get("mean_kl_loss", 0.0)
    return stats


def update(policy: Policy, rows: Mapping[str, Tensor], reducer: Reducer) -> dict[str, float]:
    """One update from the rows `[B, ...]` of one minibatch of each learner. B may be 0."""
    count = len(rows["obs"])
    stats = policy.backward(rows) if count else dict.fromkeys(LEARNER_KEYS, 0.0)
    if reducer.world_size > 1:
        stats = reduce_gradient(policy, count, stats, reducer)
    return stats | policy.apply_flat()


def standardized(advantages: Tensor, reducer: Reducer) -> Tensor:
    """`[B]` with mean 0 and standard deviation 1 over the rows of all learners.

    Two passes in float64, so that workers with different means do not cancel each other's digits.
    """
    values = advantages.double()
    moments = torch.stack(
        [torch.tensor(float(len(values)), dtype=torch.float64), values.sum().cpu()]
    )
    reducer.sum_(moments)
    count, mean = float(moments[0]), float(moments[1] / moments[0].clamp(min=1.0))
    squares = (values - mean).square().sum().cpu().reshape(1)
    reducer.sum_(squares)
    std = (float(squares[0]) / max(count, 1.0)) ** 0.5
    return ((values - mean) / max(std, 1e-8)).float()


def explained_variance(batch: SampleBatch) -> float:
    """`1 - Var(targets - values) / Var(targets)` over valid rows; 0 if the targets are constant."""
    valid = batch["valid"]
    targets, values = batch["value_targets"][valid], batch["values"][valid]
    variance = float(targets.var()) if len(targets) else 0.0
    return 1.0 - float((targets - values).var()) / variance if variance > 0.0 else 0.0


def num_minibatches(rows: int, world_size: int, minibatch_size: int) -> int:
    """How many minibatches all learners cut their rows into: enough that none is larger, on
    average over the learners, than `minibatch_size` (0: one minibatch)."""
    if minibatch_size == 0 or rows == 0:
        return 1
    return max(1, -(-rows // (world_size * minibatch_size)))


def shuffled(
    rows: Mapping[str, Tensor], parts: int, rng: np.random.Generator
) -> Iterator[dict[str, Tensor]]:
    """The rows in random order, cut into `parts` of nearly equal size.

    Gathered once; each part is a view.
    """
    if parts == 1:
        yield dict(rows)
        return
    size = len(rows["obs"])
    order = torch.from_numpy(rng.permutation(size)).to(rows["obs"].device)
    cuts = [size * i // parts for i in range(1, parts)]
    pieces = [column[order].tensor_split(cuts) for column in rows.values()]
    for part in zip(*pieces, strict=True):
        yield dict(zip(rows, part, strict=True))


@np.errstate(over="ignore", invalid="ignore")  # whoever applies it looks at the gradient
def reduce_gradient(
    policy: Policy, count: int, stats: Mapping[str, float], reducer: Reducer
) -> dict[str, float]:
    """Turns the means over `count` own rows in `policy.flat` and `stats` into means over all
    learners' rows.

    Row count and statistics ride behind the gradient, in one all-reduce.
    """
    flat = policy.flat
    if count == 0:
        flat.zero_grads()
    elif not math.isfinite(flat.norm()):
        # The sum will not be finite either, so that nobody applies it; only here is it known
        # whose fault that is.
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
