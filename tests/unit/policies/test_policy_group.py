"""A group of policies as one policy: weights, gradients and their means, updates and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import TwoNumbers, make_policy, random_batch

from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.weights import Gradients
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_group import GroupConfig, Member, PolicyGroup, by_policy, learner_keys
from polopt.rollouts.workers import snapshots
from polopt.rollouts.workers.snapshots import WeightSnapshots

NAMES = ("first", "second")


def group_of(learns: dict[str, bool] | None = None, **options: Any) -> PolicyGroup:
    config = A2CPolicy.config_class.parse({"model": {"fcnet_hiddens": [4]}, **options})
    env = TwoNumbers()
    return PolicyGroup(
        spaces.Dict(dict.fromkeys(NAMES, env.observation_space)),
        spaces.Dict(dict.fromkeys(NAMES, env.action_space)),
        GroupConfig(
            members={
                name: Member(
                    policy_class=A2CPolicy, config=config, learns=(learns or {}).get(name, True)
                )
                for name in NAMES
            }
        ),
        seed=3,
    )


def batch_of(group: PolicyGroup, seed: int, sizes: tuple[int, int]) -> MultiAgentBatch:
    rng = np.random.default_rng(seed)
    parts = {}
    for (name, policy), size in zip(group.policies.items(), sizes, strict=True):
        part = random_batch(policy, 5, max(size, 1), rng)
        if size == 0:
            part["valid"][:] = False
        parts[name] = part
    return MultiAgentBatch(parts, num_env_steps=5)


def mean_of(gradients: list[Gradients]) -> Gradients:
    """The mean over rows, as strategies compute it."""
    rows = sum(one.rows for one in gradients)
    flat = sum(one.flat * (one.rows / rows) for one in gradients)
    return gradients[0]._replace(flat=np.asarray(flat, np.float32), rows=rows)


@pytest.mark.parametrize("sizes", [((2, 6), (5, 1)), ((3, 0), (1, 4)), ((2, 2), (2, 2))])
def test_mean_gradient_weights_each_policy_by_its_own_rows(sizes: Any) -> None:
    group, alone = group_of(), group_of()
    batches = [batch_of(group, seed, size) for seed, size in enumerate(sizes)]
    group.apply_gradients(mean_of([group.compute_gradients(batch) for batch in batches]))
    for name, policy in alone.policies.items():
        own = [policy.compute_gradients(batch.parts[name]) for batch in batches]
        policy.apply_gradients(mean_of([one for one in own if one.rows]))
        np.testing.assert_allclose(
            group.policies[name].get_weights().flat, policy.get_weights().flat, atol=1e-6
        )
    assert group.version == alone.version == 2


def test_single_gradient_equals_the_policies_alone() -> None:
    group, alone = group_of(), group_of()
    batch = batch_of(group, 0, (4, 3))
    group.apply_gradients(group.compute_gradients(batch))
    for name, policy in alone.policies.items():
        policy.apply_gradients(policy.compute_gradients(batch.parts[name]))
        np.testing.assert_allclose(
            group.policies[name].get_weights().flat, policy.get_weights().flat, atol=1e-6
        )


def test_learning_from_a_batch_equals_the_policies_alone() -> None:
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 6}
    group, alone = group_of(**options), group_of(**options)
    batch = batch_of(group, 0, (4, 3))
    stats = group.learn_on_batch(batch)
    expected = {name: one.learn_on_batch(batch.parts[name]) for name, one in alone.policies.items()}
    assert by_policy(group, stats) == expected
    np.testing.assert_array_equal(group.get_weights().flat, alone.get_weights().flat)
    assert group.progress.rows_applied == sum(
        one.progress.rows_applied for one in alone.policies.values()
    )


@pytest.mark.parametrize("way", ["batch", "gradients"])
def test_policy_without_rows_makes_no_update(way: str) -> None:
    group = group_of()
    before = group.policies["second"].get_state()
    batch = batch_of(group, 0, (4, 0))
    if way == "batch":
        group.learn_on_batch(batch)
    else:
        group.apply_gradients(group.compute_gradients(batch))
    after = group.policies["second"].get_state()
    assert group.policies["first"].version == 1
    assert after["version"] == 0
    np.testing.assert_array_equal(after["params"], before["params"])
    assert after["adam"]["network"] == before["adam"]["network"] == {}


def test_weights_travel_with_versions_and_coefficients() -> None:
    group, other = group_of(), group_of()
    group.learn_on_batch(batch_of(group, 0, (4, 3)))
    group.env_steps = 70
    other.set_weights(group.get_weights())
    np.testing.assert_array_equal(other.get_weights().flat, group.get_weights().flat)
    assert other.version == group.version == 2
    assert [one.version for one in other.policies.values()] == [1, 1]
    assert other.env_steps == 70
    with pytest.raises(ValueError, match="the weights must have"):
        other.set_weights(make_policy("a2c", TwoNumbers()).get_weights())


def test_policies_begin_with_different_weights() -> None:
    first, second = (one.get_weights().flat for one in group_of().policies.values())
    assert not np.array_equal(first, second)


def test_statistics_have_the_name_of_their_policy() -> None:
    group = group_of({"second": False})
    assert {key.partition("/")[0] for key in learner_keys(group)} == {"first"}
    stats = group.learn_on_batch(batch_of(group, 0, (4, 3)))
    assert set(by_policy(group, stats)) == {"first"}
    assert group.policies["second"].version == 0


def moved(policy: A2CPolicy, by: float) -> None:
    """Changes the parameters of a policy, as an update does."""
    policy.flat.params.data += by
    policy.version += 1


@pytest.mark.parametrize("inline_bytes", [0, 10**6])
def test_policy_that_does_not_learn_is_sent_once(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "INLINE_BYTES", inline_bytes)
    learns = {"first": True, "second": False}
    group, stored = group_of(learns), list[Any]()
    sent = WeightSnapshots(lambda: group, lambda weights: stored.append(weights) or weights)
    workers: list[Any] = [
        SimpleNamespace(shares_weights=False, sent_snapshot=None, policy=group_of(learns))
        for _ in range(3)
    ]
    size = len(group.policies["first"].flat.params)

    def send(*indices: int) -> list[int]:
        """Sends weights, and returns the numbers of parameters that were sent."""
        sizes = []
        for index in indices:
            weights = sent.for_call(workers[index])
            workers[index].policy.set_weights(weights)
            sizes.append(len(weights.flat))
            got, now = workers[index].policy.get_weights(), group.get_weights()
            np.testing.assert_array_equal(got.flat, now.flat)
            assert got._replace(flat=None) == now._replace(flat=None)
        return sizes

    moved(group.policies["second"], 0.5)
    assert send(0, 1) == [2 * size, 2 * size]
    assert sent.for_call(workers[0]) is None
    for _ in range(3):
        moved(group.policies["first"], 1.0)
        group.env_steps += 10
        assert send(0) == [size]
    assert send(1) == [size], "it has missed two versions of the policy that learns"
    assert send(2) == [2 * size], "a new worker needs all"
    assert sent.num_bytes_sent == 4 * (2 * size + 2 * size + 3 * size + size + 2 * size)
    assert len(stored) == (0 if inline_bytes else 5)
    moved(group.policies["second"], 0.25)  # another checkpoint of the frozen policy
    assert send(0, 1, 2) == [2 * size] * 3
    moved(group.policies["first"], 1.0)
    workers[1].sent_snapshot = None  # its last call was lost
    assert send(0, 1, 2) == [size, 2 * size, size]
    sent.take(force=True)  # as a restore does
    assert send(0) == [2 * size]
    with pytest.raises(ValueError, match="the weights must have"):
        group.set_weights(group.get_weights()._replace(flat=np.zeros(size - 1, np.float32)))


def test_all_weights_are_sent_if_all_policies_learn() -> None:
    group = group_of()
    sent, worker = WeightSnapshots(lambda: group, list), SimpleNamespace(shares_weights=False)
    worker.sent_snapshot = None
    for _ in range(2):
        moved(group.policies["first"], 1.0)
        weights = sent.for_call(worker)  # type: ignore[arg-type]
        np.testing.assert_array_equal(weights.flat, group.get_weights().flat)
