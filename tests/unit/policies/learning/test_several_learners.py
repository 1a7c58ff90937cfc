"""Several learners that sum their gradients equal one learner."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from learner_threads import (
    Rank,
    assert_together_equals_alone,
    learn_together,
    on_threads,
    uneven_batches,
)
from policy_helpers import (
    every_policy,
    small_policy,
)
from replay_helpers import replay_policy, transitions
from toy_envs import random_batch

from polopt.common.sample_batch import SampleBatch
from polopt.policies import fragment_policy, gae
from polopt.policies.gae import standardized
from polopt.policies.learning.minibatches import num_minibatches, shuffled
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.policy import Policy
from polopt.policies.sac import SACPolicy

SHARES = [(1.0, 1.0), (0.9, 0.2), (1.0, 0.0), (0.3, 1.0, 0.0)]


@every_policy
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("standardize", [False, True])
def test_several_learners_equal_one_on_whole_batch(
    name: str, shares: tuple[float, ...], standardize: bool
) -> None:
    assert_together_equals_alone(name, shares, standardize_advantages=standardize)


def test_several_learners_share_kl_coefficient_and_stop() -> None:
    assert_together_equals_alone("ppo", (0.9, 0.2), kl_coeff=0.3, kl_stop=1e9)


def plain_average(
    policy: Policy, count: int, stats: dict[str, float], reducer: Any
) -> dict[str, float]:
    """A wrong variant that takes the unweighted mean of the gradients of all learners."""
    reducer.sum_(policy.flat.buffer)
    policy.flat.buffer.div_(reducer.world_size)
    return stats


def own_standardisation(wrapped: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A wrong variant in which each learner standardises its own advantages."""
    return lambda advantages, reducer: wrapped(advantages, LocalReducer())


@every_policy
def test_averaging_without_counts_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_policy, "reduce_gradient", plain_average)
    with pytest.raises(AssertionError):
        assert_together_equals_alone(name, (0.9, 0.2))


def test_statistics_of_values_of_one_learner_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, statistics = fragment_policy.value_sums, fragment_policy.value_statistics
    own = threading.local()  # each learner is a thread

    def keep(batch: SampleBatch) -> list[float]:
        own.moments = moments(batch)
        return own.moments

    monkeypatch.setattr(fragment_policy, "value_sums", keep)
    monkeypatch.setattr(fragment_policy, "value_statistics", lambda _: statistics(own.moments))
    with pytest.raises(AssertionError):
        assert_together_equals_alone("ppo", (0.9, 0.2))


def test_standardising_separately_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gae, "standardized", own_standardisation(standardized))
    with pytest.raises(AssertionError):
        assert_together_equals_alone("ppo", (1.0, 1.0))


@pytest.mark.parametrize("shares", [(1.0, 0.4), (1.0, 0.0), (0.1, 1.0)], ids=str)
def test_minibatches_of_several_learners_equal_one(shares: tuple[float, ...]) -> None:
    """Minibatch `i` of all learners together equals one minibatch of a single learner."""
    options = {"num_sgd_iter": 3, "sgd_minibatch_size": 4}
    single = small_policy("ppo", **options, standardize_advantages=False)
    batches = uneven_batches(single, shares)
    learners = [small_policy("ppo", **options) for _ in shares]
    for index, learner in enumerate(learners):
        learner.shuffle = np.random.default_rng(index)

    rows = [single.training_rows(batch) for batch in batches]
    total = sum(len(r["obs"]) for r in rows)
    union = np.concatenate([r["advantages"] for r in rows])
    for r in rows:
        r["advantages"] = (r["advantages"] - union.mean()) / union.std()
    parts = num_minibatches(total, len(shares), 4)
    assert parts > 1
    generators = [np.random.default_rng(index) for index in range(len(shares))]
    for _ in range(3):
        cuts = [list(shuffled(r, parts, g)) for r, g in zip(rows, generators, strict=True)]
        for pieces in zip(*cuts, strict=True):
            part = {name: np.concatenate([piece[name] for piece in pieces]) for name in rows[0]}
            single.update(part, LocalReducer())

    initial = small_policy("ppo", **options).get_weights().flat
    weights, _ = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert learner.version == single.version == 3 * parts
    expected = single.get_weights().flat
    moved = np.abs(expected - initial).max()
    np.testing.assert_allclose(weights[0], expected, rtol=0.0, atol=0.02 * moved)


@pytest.mark.parametrize("name", ["appo", "impala"])
@pytest.mark.parametrize(("standardize", "fast_cpu"), [(False, False), (False, True), (True, True)])
def test_learners_with_different_numbers_of_columns_stay_equal(
    name: str, standardize: bool, fast_cpu: bool
) -> None:
    """A column contains the rows of one environment. These policies learn from whole columns, and
    the second learner has only one column for two minibatches."""
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 8, "standardize_advantages": standardize}
    learners = [small_policy(name, fast_cpu=fast_cpu, **options) for _ in range(2)]
    rng = np.random.default_rng(0)
    batches = [random_batch(learners[0], 8, envs, rng) for envs in (3, 1)]
    weights, stats = learn_together(learners, batches)
    np.testing.assert_array_equal(weights[0], weights[1])
    assert [learner.version for learner in learners] == [4, 4]
    assert stats[0]["policy_loss"] == stats[1]["policy_loss"]


def test_non_finite_gradient_of_one_is_skipped_by_all() -> None:
    learners = [small_policy("ppo", num_sgd_iter=2, sgd_minibatch_size=0) for _ in range(2)]
    batches = uneven_batches(learners[0], (1.0, 0.5))
    batches[1]["value_targets"][batches[1]["valid"]] = np.nan
    initial = learners[0].get_weights().flat
    weights, _ = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, initial)
        assert (learner.version, learner.progress.skipped_updates) == (0, 2)
    # The NaN in the buffer of a learner without rows does not affect the next update.
    batches[1]["valid"][:] = False
    weights, _ = learn_together(learners, batches)
    assert np.isfinite(weights[0]).all()
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert (learner.version, learner.progress.skipped_updates) == (2, 2)


def test_no_learner_has_rows() -> None:
    learners = [small_policy("ppo") for _ in range(2)]
    initial = learners[0].get_weights()
    weights, _ = learn_together(learners, uneven_batches(learners[0], (0.0, 0.0)))
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, initial.flat)
        assert (learner.version, learner.progress.skipped_updates) == (0, 0)


def test_learners_average_the_statistics_of_a_class_and_of_its_bases() -> None:
    class Noted(SACPolicy):
        further_statistics = ("own",)

        def backward(self, rows: Any) -> Any:
            stats, errors = super().backward(rows)
            return {**stats, "own": float(rows.num_rows)}, errors

    like = replay_policy("sac")
    policies = [Noted(like.encoder.space, like.action_space, like.config) for _ in range(2)]
    assert Noted.statistic_keys()[-2:] == ["own", "alpha_value"]
    counts = (4, 12)

    def learn(rank: Rank, policy: Any, count: int) -> dict[str, float]:
        stats: dict[str, float] = policy.learn_on_batch(transitions(policy, count), rank)
        return stats

    found = on_threads(
        [
            functools.partial(learn, policy=policy, count=count)
            for policy, count in zip(policies, counts, strict=True)
        ]
    )
    for stats in found:
        assert stats["own"] == (4 * 4 + 12 * 12) / 16
        assert stats["alpha_value"] == pytest.approx(1.0)
        assert not {"mean_kl_loss", "clip_fraction"} & stats.keys()
