"""Tests of the statistics of actions in results. Workers count each valid step once."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from gymnasium import spaces
from policy_helpers import small_policy
from toy_envs import random_batch

from polopt.metrics.actions import ActionStats, ActionSums
from polopt.metrics.record import Record
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.distributions.make_distribution import make_distribution


def reported(sizes: list[int], dimensions: int, *parts: np.ndarray) -> dict[str, Any]:
    stats = ActionStats(sizes, dimensions)
    for part in parts:
        stats.add(ActionSums.of(part, sizes))
    return stats.report()


def test_categories_are_counted_over_fragments() -> None:
    first, second = np.array([0, 2, 2, 2]), np.array([1, 0])
    assert reported([4], 1, first, second) == {"histogram": {"0": [2, 1, 3, 0]}}


def test_last_bin_holds_all_further_categories() -> None:
    actions = np.array([0, 30, 31, 32, 99, 99])
    (counts,) = reported([100], 1, actions)["histogram"].values()
    assert len(counts) == 32
    assert (counts[0], counts[30], counts[31]) == (1, 1, 4)


def test_parts_of_a_multi_discrete_action_are_apart() -> None:
    actions = np.array([[0, 2], [1, 2], [1, 0]])
    assert reported([2, 3], 2, actions) == {"histogram": {"0": [1, 2], "1": [1, 0, 2]}}
    many = reported([2] * 9, 9, np.zeros((5, 9), np.int64))["histogram"]
    assert many == {str(part): [5, 0] for part in range(8)}


def test_real_actions_have_mean_and_deviation() -> None:
    """The second deviation is a millionth of its mean. Sums of squares in float32 would lose it.
    Results contain at most 32 dimensions."""
    rng = np.random.default_rng(0)
    parts = [(1e4 + rng.normal(0.0, [1.0, 0.01], (n, 2))).astype(np.float32) for n in (7, 0, 50)]
    every = np.concatenate(parts).astype(np.float64)
    report = reported([], 2, *parts)
    np.testing.assert_allclose(report["mean"], every.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(report["std"], every.std(axis=0), rtol=1e-6)
    assert len(reported([], 40, np.zeros((3, 40), np.float32))["std"]) == 32


def test_clipped_actions_are_a_share_of_all_elements() -> None:
    """The stored actions have three dimensions. The first has two finite bounds, so values beyond
    -1 and 1 count (1.5). The second has only a lower bound, so values below 0 count (-0.5). The
    third has no bounds."""
    high = np.array([9.0, np.inf, np.inf])
    box = spaces.Box(np.array([0.0, 0.0, -np.inf]), high, dtype=np.float64)
    dist = make_distribution(box, normalize_actions=True)
    stats = ActionStats(dimensions=3)
    stats.add(ActionSums.of(np.array([[0.5, 0.5, 99.0], [1.5, -0.5, -99.0]]), [], dist.bounds))
    stats.add(ActionSums.of(np.array([[1.0, 0.0, 0.0], [-1.0, 5.0, 0.0]]), [], dist.bounds))
    assert stats.report()["clipped"] == 2 / 12
    assert math.isnan(stats.report()["clipped"])
    outside = np.full((5, 3), 50.0)
    for options in ({"squash_actions": True}, {"clip_actions": False}):
        free = make_distribution(spaces.Box(0.0, 9.0, (3,)), **options)
        assert ActionSums.of(outside, [], free.bounds).clipped == 0


def test_report_has_one_shape_and_begins_anew() -> None:
    stats = ActionStats([3])
    assert stats.report() == {"histogram": {"0": [0, 0, 0]}}
    stats.add(ActionSums.of(np.array([1]), [3]))
    stats.add(ActionSums())
    assert stats.report() == {"histogram": {"0": [0, 1, 0]}}
    assert stats.report() == {"histogram": {"0": [0, 0, 0]}}
    real = ActionStats(dimensions=2)
    for sums in (None, ActionSums.of(np.zeros((0, 2), np.float32), [])):
        if sums is not None:
            real.add(sums)
        report = real.report()
        assert [len(report[key]) for key in ("mean", "std")] == [2, 2]
        assert all(map(math.isnan, [*report["mean"], *report["std"]]))


@pytest.mark.parametrize("space", ["discrete", "box"])
def test_rows_that_are_not_valid_do_not_count(space: str) -> None:
    policy = small_policy("ppo")
    batch = random_batch(policy, 6, 2, np.random.default_rng(0), valid_share=0.5)
    valid = batch["valid"]
    assert 0 < valid.sum() < 12
    sizes: list[int] = []
    if space == "discrete":
        sizes, batch["actions"] = [2], np.where(valid, 1, 0)
    else:
        batch["actions"] = np.where(valid, 3.0, 99.0)[..., None].astype(np.float32)
    record, above = Record(), Record()
    record.sampled(batch, sizes)
    above.add_below(record)  # adds the record of a worker that samples for this worker
    above.sampled(batch, sizes)
    stats = ActionStats(sizes, 1)
    stats.add(above.actions)
    steps = 2 * batch.env_steps
    real = {"mean": [3.0], "std": [0.0], "clipped": 0.0}
    expected = {"histogram": {"0": [0, steps]}} if sizes else real
    assert stats.report() == expected


@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (spaces.Discrete(5, start=-2), [5]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [2, 3, 4, 5]),
        (spaces.Box(-1.0, 1.0, (2, 3)), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("squash", [False, True])
def test_distributions_say_their_categories(
    space: gymnasium.Space[Any], sizes: list[int], squash: bool
) -> None:
    dist = make_distribution(space, squash)
    actions = dist.random(np.random.default_rng(0), 50)
    report = reported(list(dist.sizes), math.prod(dist.action_shape), actions)
    assert list(dist.sizes) == sizes
    if sizes:
        assert [len(counts) for counts in report["histogram"].values()] == sizes
        assert all(sum(counts) == 50 for counts in report["histogram"].values())
    else:
        assert [len(report[key]) for key in ("mean", "std")] == [6, 6]


def test_each_step_of_a_run_is_counted_once() -> None:
    """`Drift` has the actions -1, 0 and 1. Its fragments are learned from in two epochs."""
    config = worker_config("ppo", rollout={"num_workers": 3}, num_sgd_iter=2)
    optimizer = make_optimizer(
        SyncSamples, FakeWorkerSet(config, FakeTransport()), train_batch_size=30
    )
    sampled = 0
    for _ in range(3):
        optimizer.step()
        block = optimizer.stats()
        (counts,) = block["actions"]["histogram"].values()
        assert len(counts) == 3
        assert sum(counts) == block["num_env_steps_sampled"] - sampled > 0
        sampled = block["num_env_steps_sampled"]
