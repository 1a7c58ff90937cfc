"""Advantages equal a slow reference, also in batches that are cut, padded and concatenated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import made_batch, split, value_of
from toy_envs import TwoNumbers, make_policy

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.learning.reducer import value_statistics, value_sums

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 4))
SEEDS = st.integers(0, 2**31)
MODES = st.sampled_from(["next_step", "same_step"])
UNIT = st.floats(0.0, 1.0)


def fast(batch: SampleBatch, gamma: float, lambda_: float) -> np.ndarray:
    values = value_of(batch.all_obs)
    following = gae.next_values(batch, values, value_of(batch.successor_obs))
    return gae.advantages(batch, values[:-1], following, gamma, lambda_)


def slow(batch: SampleBatch, gamma: float, lambda_: float) -> np.ndarray:
    """Computes the sum in the definition of GAE term by term, separately for each row."""
    steps, envs = batch.shape
    apart = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
    result = np.zeros((steps, envs))
    for n in range(envs):
        for start in range(steps):
            if not batch["valid"][start, n]:
                continue
            weight = 1.0
            for t in range(start, steps):
                true_next = apart.get(t * envs + n, batch.all_obs[t + 1, n])
                ahead = 0.0 if batch["terminated"][t, n] else gamma * value_of(true_next)
                error = batch["rewards"][t, n] + ahead - value_of(batch.all_obs[t, n])
                result[start, n] += weight * error
                weight *= gamma * lambda_
                if batch["terminated"][t, n] or batch["truncated"][t, n] or t * envs + n in apart:
                    break
    return result


@settings(max_examples=60, deadline=None)
@given(SIZES, MODES, SEEDS, UNIT, UNIT)
def test_advantages_equal_the_definition(
    size: tuple[int, int], mode: str, seed: int, gamma: float, lambda_: float
) -> None:
    batch = made_batch(*size, mode, seed)
    result = fast(batch, gamma, lambda_)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, slow(batch, gamma, lambda_), rtol=1e-4, atol=1e-4)


def test_advantages_of_float64_rewards_are_float32() -> None:
    batch = made_batch(5, 2, "same_step", seed=0)
    values, following = np.zeros((2, 5, 2), np.float32)
    expected = gae.advantages(batch, values, following, 0.9, 0.8)
    batch["rewards"] = batch["rewards"].astype(np.float64)
    got = gae.advantages(batch, values, following, 0.9, 0.8)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_statistics_of_values_use_valid_rows(share: float) -> None:
    batch = made_batch(40, 3, "same_step", seed=1)
    rng = np.random.default_rng(2)
    batch["valid"] = valid = rng.random((40, 3)) < share
    targets = rng.normal(3.0, 2.0, (40, 3)).astype(np.float32)
    batch["value_targets"] = np.where(valid, targets, 1e6).astype(np.float32)
    batch["values"] = (targets + rng.normal(1.0, 1.0, (40, 3))).astype(np.float32)
    expected = dict.fromkeys(("vf_explained_var", "vf_predicted_mean", "vf_target_mean"), 0.0)
    if valid.any():
        errors = (targets - batch["values"])[valid].astype(np.float64)
        expected["vf_explained_var"] = 1.0 - errors.var() / targets[valid].astype(np.float64).var()
        assert 0.6 < expected["vf_explained_var"] < 0.9
        expected["vf_predicted_mean"] = batch["values"][valid].astype(np.float64).mean()
        expected["vf_target_mean"] = targets[valid].astype(np.float64).mean()
        assert expected["vf_predicted_mean"] > expected["vf_target_mean"] + 0.5
    assert value_statistics(value_sums(batch)) == pytest.approx(expected, rel=1e-5)
    batch["value_targets"] = np.full((40, 3), 7.0, np.float32)
    assert value_statistics(value_sums(batch))["vf_explained_var"] == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), MODES, SEEDS, UNIT, UNIT)
def test_padding_does_not_change_advantages(
    sizes: list[tuple[int, int]], mode: str, seed: int, gamma: float, lambda_: float
) -> None:
    batches = [made_batch(*size, mode, seed + i) for i, size in enumerate(sizes)]
    whole = SampleBatch.concat(batches)
    assert whole.env_steps == sum(batch.env_steps for batch in batches)
    together = fast(whole, gamma, lambda_)
    for batch, part in zip(batches, split(together, batches), strict=True):
        np.testing.assert_allclose(part, fast(batch, gamma, lambda_), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(together, slow(whole, gamma, lambda_), rtol=1e-4, atol=1e-4)


def test_concat_keeps_rows_and_marks_padding() -> None:
    batches = [
        made_batch(t, n, "same_step", i) for i, (t, n) in enumerate([(3, 2), (5, 1), (4, 3)])
    ]
    whole = SampleBatch.concat(batches)
    assert whole.shape == (5, 6)
    assert whole.version == min(batch.version for batch in batches)
    assert len(whole.episodes.returns) == 9
    for name in ["obs", *batches[0].columns]:
        for batch, part in zip(batches, split(whole[name], batches), strict=True):
            np.testing.assert_array_equal(part, batch[name])
    assert not whole["valid"][3:, :2].any()
    assert not whole["valid"][4:, 3:].any()


def test_concat_of_one_batch_does_not_copy() -> None:
    batch = made_batch(3, 2, "same_step", 0)
    assert SampleBatch.concat([batch]) is batch


@pytest.mark.parametrize("name", ["a2c", "ppo"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_postprocessing_commutes_with_concat(name: str, mode: str) -> None:
    policy = make_policy(name, TwoNumbers(), **{"lambda": 0.9})
    batches = [made_batch(t, n, mode, i) for i, (t, n) in enumerate([(4, 2), (7, 3), (1, 1)])]
    before = SampleBatch.concat(
        [policy.postprocess(replace(b, columns=dict(b.columns))) for b in batches]
    )
    after = policy.postprocess(SampleBatch.concat(batches))
    valid = before["valid"]
    np.testing.assert_array_equal(after["valid"], valid)
    for column in before.columns:
        np.testing.assert_allclose(
            after[column][valid], before[column][valid], rtol=1e-5, atol=1e-6, err_msg=column
        )
    gradients = [policy.compute_gradients(batch).flat for batch in (before, after)]
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SIZES, MODES, SEEDS, st.data())
def test_steps_of_a_batch_form_a_batch(
    size: tuple[int, int], mode: str, seed: int, data: st.DataObject
) -> None:
    batch = made_batch(*size, mode, seed)
    start = data.draw(st.integers(0, size[0] - 1))
    stop = data.draw(st.integers(start + 1, size[0]))
    part = batch.steps(start, stop)
    assert part.shape == (stop - start, size[1])
    assert (part.version, part.worker_index) == (batch.version, batch.worker_index)
    for name in ["obs", *batch.columns]:
        np.testing.assert_array_equal(part[name], batch[name][start:stop])
    np.testing.assert_array_equal(part.bootstrap_obs, batch.all_obs[stop])
    np.testing.assert_allclose(fast(part, 0.9, 0.8), slow(part, 0.9, 0.8), rtol=1e-4, atol=1e-4)
    # One-step differences use only the next observation, so slicing does not change them.
    np.testing.assert_allclose(fast(part, 0.9, 0.0), fast(batch, 0.9, 0.0)[start:stop], rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(SIZES, MODES, SEEDS)
def test_selected_environments_form_a_batch(size: tuple[int, int], mode: str, seed: int) -> None:
    batch = made_batch(*size, mode, seed)
    envs = np.random.default_rng(seed).permutation(size[1])[: 1 + seed % size[1]]
    part = batch.select(envs)
    assert part.shape == (size[0], len(envs))
    assert (part.version, part.worker_index) == (batch.version, batch.worker_index)
    for name in ["obs", *batch.columns]:
        np.testing.assert_array_equal(part[name], batch[name][:, envs])
    np.testing.assert_allclose(fast(part, 0.9, 0.8), fast(batch, 0.9, 0.8)[:, envs], rtol=1e-6)
    assert batch.select(envs[:0]).shape == (size[0], 0)


def test_views_are_not_copies() -> None:
    batch = made_batch(6, 3, "same_step", 1)
    for name in ["obs", *batch.columns]:
        assert np.shares_memory(batch.flat(name), batch[name])
        assert np.shares_memory(batch.steps(2, 4)[name], batch[name])
    assert np.shares_memory(batch.obs, batch.all_obs)
    assert np.shares_memory(batch.bootstrap_obs, batch.all_obs)
    for name, rows in batch.iter_rows():
        assert np.shares_memory(rows, batch[name])
        assert len(rows) == len(batch) == 18


def test_training_rows_are_views_of_valid_rows() -> None:
    policy = make_policy("a2c", TwoNumbers())
    batch = policy.postprocess(made_batch(5, 2, "same_step", 2))
    rows = policy.training_rows(batch)
    for name in ("obs", *policy.loss_columns):
        assert np.shares_memory(rows[name], batch[name])
    batch["valid"][1, 0] = batch["valid"][4, 1] = False
    rows = policy.training_rows(batch)
    kept = np.delete(np.arange(10), [2, 9])
    for name in ("obs", *policy.loss_columns):
        np.testing.assert_array_equal(rows[name], batch.flat(name)[kept])


def test_column_of_wrong_shape_is_refused() -> None:
    batch = made_batch(4, 2, "same_step", 0)
    with pytest.raises(ValueError, match=r"'extra'.*\[4, 2\].*got \[2, 4\]"):
        batch["extra"] = np.zeros((2, 4))
