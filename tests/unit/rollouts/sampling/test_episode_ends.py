"""Tests of episode ends, as `docs/architecture.md` describes them.

`terminated` cuts the return. `truncated` bootstraps from the true last observation. Reset rows, the
steps that only reset an environment in next-step mode, are masked out of losses and counts. Each
check fails if episode ends are handled wrongly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from episode_end_checks import (
    FOR_EVER,
    GAMMA,
    LENGTHS,
    batches_of,
    check_counts,
    check_nothing_to_learn,
    check_sums_to_the_end,
    check_worth,
    clock_policy,
    prepared,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import (
    AUTORESET,
    POLICIES,
    make_policy,
    make_sampler,
    set_value_function,
    sync_clocks,
)

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.policy import Policy
from polopt.rollouts.sampling.sampler import VectorSampler

FRAGMENTS = [1, 5, 6, 16]  # fragments end before, at and after episodes
LAMBDAS = [0.0, 0.95, 1.0]

every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
VTRACE = ("appo", "impala")
every_mode = pytest.mark.parametrize("mode", AUTORESET)
every_fragment = pytest.mark.parametrize("fragment", FRAGMENTS)


def sampler_of(
    mode: str, ends: str, values: Any, fragment: int, lengths: list[int] = LENGTHS
) -> VectorSampler:
    env = sync_clocks(lengths, ends, mode)
    policy = clock_policy(env)
    set_value_function(policy, values)
    return make_sampler(env, policy, fragment)


def under_every_lambda(
    sampler: VectorSampler, name: str = "a2c"
) -> Iterator[tuple[float, list[SampleBatch]]]:
    """Yields each lambda, with the same consecutive fragments postprocessed with this lambda."""
    batches = batches_of(sampler)
    for lambda_ in LAMBDAS:
        policy = clock_policy(sampler.env, name, **{"lambda": lambda_})
        policy.flat.params.data[: len(policy.flat.grads)] = sampler.policy.flat.params
        policy.flat.refresh_copies()
        yield lambda_, [prepared(policy, batch) for batch in batches]


def leading_up_to(last: float, length: int) -> np.ndarray:
    """Returns the value at each time, `[length + 1]`, of an episode with `length` steps of reward
    1. The value of the last observation is `last`."""
    discount = GAMMA ** np.arange(length, -1, -1)
    return FOR_EVER * (1.0 - discount) + discount * last


# ---- checkers ---------------------------------------------------------------------------------


# ---- closed forms -----------------------------------------------------------------------------


@every_policy
@every_mode
@every_fragment
def test_truncated_episode_bootstraps(name: str, mode: str, fragment: int) -> None:
    for _, batches in under_every_lambda(sampler_of(mode, "truncated", FOR_EVER, fragment), name):
        check_worth(batches, FOR_EVER)


@every_policy
@every_mode
@every_fragment
@pytest.mark.parametrize("ends", ["terminated", "both"])
def test_terminated_episode_does_not_bootstrap(
    name: str, mode: str, fragment: int, ends: str
) -> None:
    for lambda_, batches in under_every_lambda(sampler_of(mode, ends, 0.0, fragment), name):
        check_sums_to_the_end(batches, lambda_, name in VTRACE)


@every_mode
@every_fragment
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_bootstrap_uses_true_last_observation(mode: str, fragment: int, ends: str) -> None:
    for _, batches in under_every_lambda(known_by_time(mode, fragment, ends)):
        check_nothing_to_learn(batches)


def known_by_time(mode: str, fragment: int, ends: str) -> VectorSampler:
    """Returns a sampler of episodes with 5 steps, whose true value function depends on time. The
    value of the last observation is -3. This value is used if the episode is truncated, but not if
    the episode terminates."""
    table = leading_up_to(-3.0 if ends == "truncated" else 0.0, 5)
    table[5] = -3.0
    return sampler_of(mode, ends, table, fragment, lengths=[5, 5])


@every_mode
@every_fragment
def test_episodes_and_steps_are_counted(mode: str, fragment: int) -> None:
    sampler = sampler_of(mode, "truncated", 0.0, fragment)
    check_counts(batches_of(sampler), resets_cost_a_row=mode == "next_step")


@pytest.mark.parametrize("fragment", [4, 7, 30])
def test_truncation_of_own_vector_bootstraps(fragment: int) -> None:
    # No pole falls within 7 steps, so the limit truncates all episodes.
    env = gymnasium.make_vec("CartPole-v1", num_envs=3, max_episode_steps=7)
    policy = make_policy("ppo", env, gamma=GAMMA)
    set_value_function(policy, FOR_EVER)
    batches = batches_of(make_sampler(env, policy, fragment), rows=60)
    check_worth(batches, FOR_EVER)
    assert {n for b in batches for n in b.episodes.lengths} == {7}
    rows = sum(b.shape[0] for b in batches)
    # Every eighth row of an environment only resets the environment.
    assert sum(b.env_steps for b in batches) == 3 * (rows - rows // 8)


def test_termination_of_own_vector_does_not_bootstrap() -> None:
    env = gymnasium.make_vec("CartPole-v1", num_envs=3)
    policy = make_policy("a2c", env, gamma=GAMMA)
    set_value_function(policy, 0.0)
    with torch.no_grad():
        policy.model.policy_head.bias[1] = 50.0  # always moves right, so the pole falls
    (batch,) = batches_of(make_sampler(env, policy, 40), rows=40)
    assert batch["terminated"].any(axis=0).all()
    assert not batch["truncated"].any()
    num_episodes = 0
    for n in range(3):
        ends = np.flatnonzero(batch["terminated"][:, n]).tolist()
        for before, end in itertools.pairwise([-2, *ends]):
            # The row `before + 1` is a reset row. The next episode starts after this row.
            advantages = batch["advantages"][before + 2 : end + 1, n]
            steps_left = np.arange(len(advantages), 0, -1)
            exact = (1.0 - GAMMA**steps_left) / (1.0 - GAMMA)
            np.testing.assert_allclose(advantages, exact, rtol=1e-5)
            assert len(advantages) in batch.episodes.lengths
        resets = np.array([end + 1 for end in ends if end < 39])
        np.testing.assert_array_equal(np.flatnonzero(~batch["valid"][:, n]), resets)
        num_episodes += len(ends)
    assert len(batch.episodes.lengths) == num_episodes
    np.testing.assert_array_equal(batch.episodes.lengths, batch.episodes.returns)


# ---- rows that only reset ---------------------------------------------------------------------


def corrupt_reset_rows(batch: SampleBatch, names: list[str]) -> None:
    resets = ~batch["valid"]
    assert resets.any()
    for name in names:
        column = batch.columns[name]
        if column.dtype == bool:
            column[resets] = ~column[resets]
        elif column.dtype.kind == "f":
            column[resets] = np.nan
        else:
            column[resets] = 1 - column[resets]


def gradient(batch: SampleBatch, policy: Policy) -> np.ndarray:
    gradients = policy.compute_gradients(batch)
    assert gradients.rows == batch.env_steps
    assert np.isfinite(gradients.flat).all()
    assert np.isfinite(list(gradients.stats.values())).all()
    return gradients.flat


def check_spoiled_rows_change_nothing(name: str, mask: Callable[[SampleBatch], None]) -> None:
    env = sync_clocks(LENGTHS, "truncated", "next_step")
    policy = make_policy(name, env, gamma=GAMMA)
    sampler = make_sampler(env, policy, 20)
    batch = policy.encode_batch(sampler.sample())
    invalid = ~batch["valid"]
    before = gradient(policy.postprocess(batch), policy)
    weights = policy.get_weights()
    # Before postprocessing, the contents of a reset row are arbitrary.
    corrupt_reset_rows(batch, ["rewards", "actions", "action_dist_inputs"])
    policy.postprocess(batch)
    np.testing.assert_array_equal(gradient(batch, policy), before)
    # After postprocessing, the added columns of a reset row are arbitrary, too.
    names = ["values", "advantages", "value_targets", "action_logp"]
    corrupt_reset_rows(batch, [column for column in names if column in batch])
    if "values" in batch:  # otherwise the learner bootstraps from observations of reset rows
        batch.obs[invalid] = np.nan
    mask(batch)
    np.testing.assert_array_equal(gradient(batch, policy), before)
    policy.learn_on_batch(batch)
    assert np.isfinite(policy.get_weights().flat).all()
    assert policy.version > weights.version


@every_policy
def test_reset_rows_do_not_change_the_gradient(name: str) -> None:
    check_spoiled_rows_change_nothing(name, mask=lambda batch: None)


@every_policy
def test_unmasked_reset_rows_change_the_gradient(name: str) -> None:
    with pytest.raises(AssertionError):
        check_spoiled_rows_change_nothing(name, mask=lambda batch: batch["valid"].fill(True))


# ---- the wrong variants -----------------------------------------------------------------------

right_next_values = gae.next_values


def nothing_after_truncation(batch: SampleBatch, *values: np.ndarray) -> np.ndarray:
    following = right_next_values(batch, *values)
    following[batch["truncated"]] = 0.0
    return following


def on_through_termination(batch: SampleBatch, *values: np.ndarray) -> np.ndarray:
    terminated = batch["terminated"].copy()
    batch["terminated"][:] = False
    following = right_next_values(batch, *values)
    batch["terminated"][:] = terminated
    return following


def from_the_next_episode(batch: SampleBatch, *values: np.ndarray) -> np.ndarray:
    """A wrong variant, which bootstraps from the observation that the reset returned."""
    following = right_next_values(batch, *values)
    t, n = np.argwhere(batch.all_obs.argmax(-1) == 0)[0]
    following[batch["truncated"]] = values[0][t, n]
    return following


@every_policy
@every_mode
def test_no_bootstrap_after_truncation_is_wrong(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gae, "next_values", nothing_after_truncation)
    for _, batches in under_every_lambda(sampler_of(mode, "truncated", FOR_EVER, 6), name):
        with pytest.raises(AssertionError):
            check_worth(batches, FOR_EVER)


@every_mode
def test_bootstrap_after_termination_is_wrong(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gae, "next_values", on_through_termination)
    for _, batches in under_every_lambda(known_by_time(mode, 6, "terminated")):
        with pytest.raises(AssertionError):
            check_nothing_to_learn(batches)


@every_mode
def test_bootstrap_from_the_next_episode_is_wrong(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gae, "next_values", from_the_next_episode)
    for _, batches in under_every_lambda(known_by_time(mode, 16, "truncated")):
        with pytest.raises(AssertionError):
            check_nothing_to_learn(batches)


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_missing_last_observations_are_wrong(mode: str) -> None:
    sampler = known_by_time(mode, 6, "truncated")
    batches = batches_of(sampler)
    check_nothing_to_learn(batches)
    for batch in batches:
        batch.successor_index = batch.successor_index[:0]
        batch.successor_obs = batch.successor_obs[:0]
        sampler.policy.postprocess(batch)
    with pytest.raises(AssertionError):
        check_nothing_to_learn(batches)


def test_unmasked_reset_rows_are_wrong() -> None:
    sampler = sampler_of("next_step", "truncated", FOR_EVER, 6)
    batches = batches_of(sampler)
    check_counts(batches, resets_cost_a_row=True)
    for batch in batches:
        batch["valid"][:] = True
        sampler.policy.postprocess(batch)
    with pytest.raises(AssertionError):
        check_worth(batches, FOR_EVER)
    with pytest.raises(AssertionError):
        check_counts(batches, resets_cost_a_row=True)


class Images(gymnasium.Env[np.ndarray, int]):
    """An environment that returns the same uint8 image at every step, in a Box of float32. Episodes
    are truncated after three steps."""

    observation_space = spaces.Box(0, 255, (3, 12, 12), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return np.full((3, 12, 12), 200, np.uint8), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return np.full((3, 12, 12), 200, np.uint8), 0.0, False, self.time >= 3, {}


@every_mode
def test_last_image_of_an_episode_is_scaled_as_all_others(mode: str) -> None:
    env = SyncVectorEnv([Images], autoreset_mode=AutoresetMode[mode.upper()])
    model = {"conv_filters": [[8, 3, 2]], "post_fcnet_hiddens": [16]}
    policy = make_policy("a2c", env, model=model, gamma=GAMMA)
    batch = policy.postprocess(make_sampler(env, policy, 4).sample())
    value = policy.value(batch.obs[0])[0]
    assert batch["truncated"][2, 0]
    np.testing.assert_allclose(batch["value_targets"][2, 0], GAMMA * value, rtol=1e-5)
