"""Several learners that learn together, each in its own thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import small_policy
from torch import Tensor
from toy_envs import random_batch

from polopt.common.sample_batch import SampleBatch
from polopt.policies.policy import Policy


class Rank:
    """The reducer of one learner, which runs in a thread."""

    def __init__(self, index: int, slots: list[Tensor], barrier: threading.Barrier) -> None:
        self.world_size = len(slots)
        self._index = index
        self._slots = slots
        self._barrier = barrier

    def sum_(self, tensor: Tensor) -> None:
        self._slots[self._index] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(self._slots).sum(0)
        self._barrier.wait()
        tensor.copy_(total)


def learn_together(
    learners: list[Policy], batches: list[SampleBatch]
) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """Runs each learner on its own batch, in a thread. Returns the weights and the statistics of
    all learners."""
    pairs = zip(learners, batches, strict=True)
    stats = on_threads([functools.partial(one.learn_on_batch, batch) for one, batch in pairs])
    return [learner.get_weights().flat for learner in learners], stats


def on_threads(functions: Sequence[Callable[[Rank], Any]]) -> list[Any]:
    """Calls each function with its own reducer, in its own thread. Returns the results."""
    barrier = threading.Barrier(len(functions), timeout=120.0)
    slots = [torch.zeros(0)] * len(functions)
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index](Rank(index, slots, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return results


def uneven_batches(policy: Policy, shares: tuple[float, ...]) -> list[SampleBatch]:
    """Returns batches of one policy with the given shares of valid rows. Their advantages differ in
    size and sign, so a wrong weighting of the learners changes the result."""
    batches = []
    for i, share in enumerate(shares):
        batch = random_batch(policy, 8, 3, np.random.default_rng(i), valid_share=share)
        if "advantages" in batch:
            batch["advantages"] = (batch["advantages"] + 2.0 * i) * (1.0 + i)
            batch["value_targets"] = batch["value_targets"] + 3.0 * i
        else:  # the learner computes advantages and value targets
            batch["rewards"] = (batch["rewards"] + 2.0 * i) * (1.0 + i)
        batches.append(batch)
    return batches


def assert_together_equals_alone(name: str, shares: tuple[float, ...], **options: Any) -> None:
    options = {"num_sgd_iter": 4, "sgd_minibatch_size": 0, "lr": 1e-3, **options}
    single = small_policy(name, **options)
    batches = uneven_batches(single, shares)
    learners = [small_policy(name, **options) for _ in shares]
    for index, learner in enumerate(learners):
        learner.shuffle = np.random.default_rng(index)
    initial = single.get_weights().flat
    expected_stats = single.learn_on_batch(SampleBatch.concat(batches))
    expected = single.get_weights().flat
    weights, stats = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert learner.version == single.version == 4
        # Each learner counts the rows of all learners, because gradients are means over all rows.
        rows = 4 * sum(batch.env_steps for batch in batches)
        assert learner.progress.rows_applied == single.progress.rows_applied == rows
    moved = np.abs(expected - initial).max()
    np.testing.assert_allclose(weights[0], expected, rtol=0.0, atol=0.01 * moved)
    keys = ("policy_loss", "vf_loss", "entropy", "total_loss", "grad_norm", "mean_kl_loss")
    for key in (*keys, "vf_explained_var", "vf_predicted_mean", "vf_target_mean"):
        for each in stats:
            assert (key in each) == (key in expected_stats)
            assert each.get(key, 0.0) == pytest.approx(
                expected_stats.get(key, 0.0), rel=1e-3, abs=1e-5
            )
