"""Epochs and minibatches of one learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import (
    every_policy,
    make_batch,
    small_policy,
)
from toy_envs import POLICIES

from polopt.common.sample_batch import SampleBatch
from polopt.policies.a2c import A2CPolicy
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.learning.minibatches import num_minibatches, shuffled
from polopt.policies.ppo import PPOPolicy


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (5, 5), (7, 4), (24, 1), (100, 1)])
def test_epoch_uses_each_row_once_in_new_order(
    size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    class RecordingPPO(PPOPolicy):
        def backward(self, rows: Any) -> dict[str, float]:
            seen.append(rows["obs"])
            assert {len(column) for column in rows.values()} == {len(rows["obs"])}
            return super().backward(rows)

    monkeypatch.setitem(POLICIES, "ppo", RecordingPPO)
    policy = small_policy("ppo", num_sgd_iter=3, sgd_minibatch_size=size)
    batch = make_batch(policy, steps=6, envs=4)
    policy.learn_on_batch(batch)
    assert policy.version == len(seen) == 3 * parts
    assert max(len(rows) for rows in seen) <= (size or 24)
    epochs = [np.concatenate(seen[i : i + parts]) for i in range(0, len(seen), parts)]
    expected = np.sort(batch.flat("obs"), axis=0)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch, axis=0), expected)
    if parts > 1:
        assert not np.array_equal(epochs[0], epochs[1])


def test_rows_of_a_minibatch_belong_together() -> None:
    rows = {"obs": torch.arange(10.0), "actions": torch.arange(10) * 3}
    for part in shuffled(rows, 3, np.random.default_rng(0)):
        assert torch.equal(part["obs"] * 3, part["actions"].float())


class ColumnsA2C(A2CPolicy):
    """Learns from whole columns, which contain all rows of an environment. Records the columns, and
    the version of the weights that prepared them."""

    whole_columns = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: list[tuple[int, SampleBatch]] = []

    def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
        self.prepared.append((self.version, batch))
        return batch


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (12, 2), (9, 3), (1, 4)])
@pytest.mark.parametrize("apart", [False, True], ids=["learn_on_batch", "minibatch_gradients"])
def test_whole_columns_are_prepared_before_each_gradient(
    size: int, parts: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "a2c", ColumnsA2C)
    policy: Any = small_policy("a2c", num_sgd_iter=2, sgd_minibatch_size=size)
    batch = make_batch(policy, steps=6, envs=4)
    if apart:
        minibatches = MinibatchGradients(policy, batch)
        while not minibatches.done:
            policy.apply_gradients(minibatches.next_gradients())
    else:
        policy.learn_on_batch(batch)
    versions = [version for version, _ in policy.prepared]
    assert versions == list(range(2 * parts))
    for first in (0, parts):
        columns = [part for _, part in policy.prepared[first : first + parts]]
        assert all(part.shape[0] == 6 for part in columns)
        together = np.concatenate([part.all_obs for part in columns], axis=1)
        order = np.argsort(together[0, :, 0])
        expected = batch.all_obs[:, np.argsort(batch.all_obs[0, :, 0])]
        np.testing.assert_array_equal(together[:, order], expected)


@pytest.mark.parametrize("name", ["a2c", "impala"])
def test_rows_are_new_in_the_first_epoch_and_the_last_gradient_ends_the_rollout(name: str) -> None:
    policy = small_policy(name, num_sgd_iter=3, sgd_minibatch_size=12)
    batch = make_batch(policy, steps=6, envs=4)
    minibatches, found = MinibatchGradients(policy, batch), []
    while not minibatches.done:
        found.append(minibatches.next_gradients())
    assert [gradients.rows for gradients in found] == [12] * 6
    assert [gradients.new_rows for gradients in found] == [12, 12, 0, 0, 0, 0]
    assert [gradients.ends_rollout for gradients in found] == [False] * 5 + [True]
    with pytest.raises(ValueError, match="all minibatches"):
        minibatches.next_gradients()


def test_columns_without_valid_rows_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "a2c", ColumnsA2C)
    policy: Any = small_policy("a2c", sgd_minibatch_size=6)
    batch = make_batch(policy, steps=6, envs=4)
    batch["valid"][:, 1:] = False
    policy.learn_on_batch(batch)
    assert (policy.version, policy.progress.skipped_updates) == (1, 0)
    batch["valid"][:] = False
    assert policy.learn_on_batch(batch) == {}


@pytest.mark.parametrize(
    ("rows", "world_size", "size", "expected"),
    [(100, 1, 0, 1), (0, 1, 8, 1), (100, 1, 8, 13), (96, 1, 8, 12), (100, 2, 8, 7), (3, 2, 8, 1)],
)
def test_number_of_minibatches(rows: int, world_size: int, size: int, expected: int) -> None:
    assert num_minibatches(rows, world_size, size) == expected


def test_kl_stop_ends_epochs() -> None:
    options = {"num_sgd_iter": 10, "sgd_minibatch_size": 0, "lr": 0.01}
    unlimited = small_policy("ppo", **options)
    unlimited.learn_on_batch(make_batch(unlimited))
    assert unlimited.version == 10
    stopped = small_policy("ppo", kl_stop=1e-9, **options)
    stats = stopped.learn_on_batch(make_batch(stopped))
    # In the first epoch the KL is 0.
    assert stopped.version == 2
    assert stats["mean_kl_loss"] > 1e-9


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 0.5), (0.049, 0.5), (0.06, 1.0), (0.19, 1.0), (0.21, 1.5)]
)
def test_kl_coefficient_is_adapted(kl: float, factor: float) -> None:
    policy = small_policy("ppo", kl_coeff=0.4, kl_target=0.1)
    policy.on_learned({"mean_kl_loss": kl})
    assert policy.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)


@pytest.mark.parametrize(("lr", "factor"), [(1e-7, 0.5), (0.05, 1.5)])
def test_kl_coefficient_is_sent_with_weights(lr: float, factor: float) -> None:
    options = {"kl_coeff": 0.4, "lr": lr, "grad_clip": None}
    policy, other = small_policy("ppo", **options), small_policy("ppo", **options)
    batch = make_batch(policy)
    policy.learn_on_batch(batch)
    assert policy.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)
    other.set_weights(policy.get_weights())
    assert other.coefficients == policy.coefficients
    np.testing.assert_array_equal(
        other.compute_gradients(batch).flat, policy.compute_gradients(batch).flat
    )
    policy.coefficients["kl_coeff"] = 9.0  # weights hold a copy
    assert other.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)


@every_policy
def test_learning_reduces_the_losses(name: str) -> None:
    policy = small_policy(name, num_sgd_iter=60, lr=0.01, entropy_coeff=0.0)
    batch = make_batch(policy, steps=20)
    before = policy.compute_gradients(batch).stats
    policy.learn_on_batch(batch)
    after = policy.compute_gradients(batch).stats
    assert after["vf_loss"] < 0.95 * before["vf_loss"]
    assert after["policy_loss"] < before["policy_loss"]
