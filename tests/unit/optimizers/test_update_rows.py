"""`rows_per_update` in results: the number of rows of the gradient of each update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from policy_helpers import small_policy
from toy_envs import random_batch

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_samples import SyncSamples

ROWS = 10  # rows of a fragment of 5 steps of 2 environments


def rows_per_update(cls: Any, steps: int = 3, **options: Any) -> float:
    """Returns `rows_per_update` of an optimizer with three workers. Each worker samples fragments
    of `ROWS` rows."""
    policy = {"num_sgd_iter": 4, "sgd_minibatch_size": 6}
    config = worker_config("ppo", rollout={"num_workers": 3}, **policy)
    optimizer = make_optimizer(cls, FakeWorkerSet(config, FakeTransport()), **options)
    for _ in range(steps):
        optimizer.step()
    return float(optimizer.stats()["rows_per_update"])


def test_minibatches_of_a_batch_are_averaged() -> None:
    """A batch has 30 rows in 5 minibatches. The number of epochs does not matter."""
    assert rows_per_update(SyncSamples, train_batch_size=3 * ROWS) == 6.0


def test_gradients_of_workers_have_the_rows_of_a_minibatch() -> None:
    """A fragment of 10 rows has 2 minibatches."""
    assert rows_per_update(AsyncGradients, grads_per_step=8) == 5.0


def test_mean_gradient_has_the_rows_of_all_workers() -> None:
    """Each of the three workers computes the gradient of a minibatch of 5 rows."""
    assert rows_per_update(SyncGradients, grads_per_step=3) == 15.0


def test_interval_without_updates_has_no_rows() -> None:
    assert rows_per_update(SyncSamples, steps=0, train_batch_size=ROWS) == 0.0


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_only_valid_rows_of_updates_that_were_made_count(share: float) -> None:
    policy = small_policy("ppo", num_sgd_iter=3, sgd_minibatch_size=4)
    batch = random_batch(policy, 8, 3, np.random.default_rng(0), valid_share=share)
    policy.learn_on_batch(batch)
    assert policy.progress.rows_applied == 3 * batch.env_steps
    assert policy.version == 3 * math.ceil(batch.env_steps / 4)
    policy.flat.grads[:] = math.nan
    policy.progress.gradient_rows = 7
    policy.apply_flat()
    assert (policy.progress.rows_applied, policy.progress.gradient_rows) == (3 * batch.env_steps, 0)
