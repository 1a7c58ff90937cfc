"""Normalisation of observations and rewards. The moments of rows are their number, mean and sum of
squared deviations."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from learner_threads import on_threads
from policy_helpers import BOTH, assert_equal_moments, every_policy, moved, small_policy
from toy_envs import AUTORESET, Drift, make_policy, make_sampler, random_batch

from polopt.common.config import ConfigError
from polopt.common.moments import Moments, merged
from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.normalization import Normalizer, sum_moments
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPOConfig
from polopt.policies.spaces import ObservationEncoder
from polopt.rollouts.sampling.running_episodes import DiscountedReturns
from polopt.rollouts.sampling.worker_sampler import SampleRequest, mark_non_finite, sample_frames

GAMMA = 0.9


def with_moments(policy: Policy, seed: int = 0, size: int = 3) -> Policy:
    """Gives the policy moments of random rows."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(rng.uniform(-3.0, 3.0, size), rng.uniform(0.5, 4.0, size), (50, size))
    policy.add_moments(Moments.of(rows))
    return policy


def batch_of(policy: Any, steps: int = 6, envs: int = 4, seed: int = 0) -> SampleBatch:
    """Returns a batch in which the policy has acted with its current moments."""
    return random_batch(policy, steps, envs, np.random.default_rng(seed))


# ---- moments ----------------------------------------------------------------------------------


def test_merged_moments_equal_moments_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal([0.0, 1e3, -3.0], [1.0, 1.0, 1e3], (500, 3)).astype(np.float32)
    parts = np.split(rows, [0, 1, 7, 7, 300, 499])
    together = Moments.zero(3)
    for part in parts:
        together = together.merge(Moments.of(part))
    exact = rows.astype(np.float64)
    assert together.rows == 500
    np.testing.assert_allclose(together.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(together.variance, exact.var(0), rtol=1e-12)
    assert merged(None, together) is merged(together, None) is together
    assert merged(None, None) is None


def test_sums_over_learners_equal_merged_moments() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal([500.0, 0.0], [1.0, 3.0], (40, 2))
    parts = [Moments.of(part) for part in np.split(rows, [3, 3, 20])]
    sums = on_threads([functools.partial(sum_moments, part) for part in parts])
    for one in sums:
        assert_equal_moments(one, Moments.of(rows))
        assert pickle.dumps(one) == pickle.dumps(sums[0]), "bit for bit"


# ---- rows of the moments ----------------------------------------------------------------------


class Ramp(gymnasium.Env[np.ndarray, int]):
    """The observation is `[time, number of the environment]`, and the reward is `1 + time`."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, number: int, length: int, ends: str) -> None:
        self.number, self.length, self.ends = number, length, ends
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        over = self.time == self.length
        ends = over and self.ends == "terminated", over and self.ends == "truncated"
        return self.observation(), float(self.time), *ends, {}

    def observation(self) -> np.ndarray:
        return np.array([self.time, self.number], np.float32)


def rows_of_ramp(number: int, length: int, steps: int, pause: int) -> Iterator[list[float]]:
    """Yields the observation and the discounted return of each transition, computed by the
    definition."""
    for step in range(steps):
        time = step % (length + pause)
        if time < length:
            rewards = range(1, time + 2)
            yield [time, number, sum(GAMMA ** (time + 1 - r) * r for r in rewards)]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("mode", AUTORESET)
@pytest.mark.parametrize("fragments", [[30], [1, 2, 7, 20]])
def test_each_transition_enters_once_in_every_mode(
    mode: str, ends: str, fragments: list[int]
) -> None:
    lengths = [1, 3, 4, 100]
    makers = [lambda i=i, n=n: Ramp(i, n, ends) for i, n in enumerate(lengths)]
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])
    policy = make_policy("a2c", env, gamma=GAMMA, **BOTH)
    sampler = make_sampler(env, policy, 1)
    found: Moments | None = None
    for steps in fragments:
        found = merged(found, sampler.sample(steps=steps).moments)
    pause = int(mode == "next_step")
    rows = [r for i, n in enumerate(lengths) for r in rows_of_ramp(i, n, 30, pause)]
    assert_equal_moments(found, Moments.of(np.array(rows)))


def test_joined_fragment_has_the_moments_of_all_its_rows() -> None:
    makers = [lambda i=i: Ramp(i, 2 + i, "truncated") for i in range(2)]
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
    policy = make_policy("a2c", env, gamma=GAMMA, **BOTH)
    batch = sample_frames(make_sampler(env, policy, 5), SampleRequest(frames=20))
    assert batch.shape[0] > 10
    rows = [r for i in range(2) for r in rows_of_ramp(i, 2 + i, batch.shape[0], 1)]
    assert_equal_moments(batch.moments, Moments.of(np.array(rows)))


def test_reset_environments_begin_their_returns_again() -> None:
    env = SyncVectorEnv([lambda i=i: Ramp(i, 9, "terminated") for i in range(2)])
    sampler = make_sampler(env, make_policy("a2c", env, gamma=GAMMA, **BOTH), 3)
    sampler.sample()
    sampler.reset_some(np.array([True, False]))
    sampler.leave_gap()
    rows = [*rows_of_ramp(0, 9, 3, 0), *list(rows_of_ramp(1, 9, 6, 0))[3:]]
    assert_equal_moments(sampler.sample().moments, Moments.of(np.array(rows)))


class Peak(Ramp):
    """A ramp whose observation at time 2 is finite, but too large to square."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation(self) -> np.ndarray:
        return np.array([1e200 if self.time == 2 else self.time, self.number])


def test_episodes_continue_after_observations_too_large_to_square() -> None:
    env = SyncVectorEnv([lambda i=i: Peak(i, 9, "terminated") for i in range(2)])
    sampler = make_sampler(env, make_policy("a2c", env, **BOTH), 4)
    batch = mark_non_finite(sampler.sample(), sampler)
    assert "squares of its observations are not finite" in batch.faults["non_finite"].message
    batch = mark_non_finite(sampler.sample(), sampler)
    assert batch.faults == {}
    np.testing.assert_array_equal(batch.all_obs[:, :, 0].T, [range(4, 9)] * 2)


def test_discarded_episodes_do_not_discount_into_the_next() -> None:
    returns = DiscountedReturns(2)
    columns = {"rewards": np.ones((2, 2), np.float32)}
    columns |= {"terminated": np.zeros((2, 2), bool), "truncated": np.zeros((2, 2), bool)}
    columns["valid"] = np.ones((2, 2), bool)
    np.testing.assert_array_equal(returns.add(columns, 0.5), [[1.0, 1.0], [1.5, 1.5]])
    returns.discard(np.array([True, False]))
    saved = returns.get_state()
    expected = [[1.0, 1.75], [1.5, 1.875]]
    np.testing.assert_array_equal(returns.add(columns, 0.5), expected)
    returns.set_state(saved)
    np.testing.assert_array_equal(returns.add(columns, 0.5), expected)


# ---- normalised values ------------------------------------------------------------------------


def normalizer_of(space: Any, clip: float | None = 10.0, **options: Any) -> Normalizer:
    return Normalizer(
        ObservationEncoder(space), clip, **{"clip_rewards": None, "gamma": 0.9, **options}
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_observations_are_standardised_and_clipped(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(1000, 2)) * [3.0, 50.0] + [7.0, -1e4]).astype(dtype)
    normalizer = normalizer_of(spaces.Box(-1e6, 1e6, (2,), dtype))
    as_given = np.clip(rows[:1].astype(np.float32), -10.0, 10.0)
    np.testing.assert_array_equal(normalizer.observations(rows[:1]), as_given)
    normalizer.moments = Moments.of(rows)
    got = normalizer.observations(rows)
    exact = rows.astype(np.float64)
    assert got.dtype == np.float32
    expected = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-8)
    np.testing.assert_allclose(got, expected, atol=2e-4 if dtype == np.float32 else 1e-6)
    far = (exact.mean(0) + np.array([1e5, -1e5])).astype(dtype)[None]
    np.testing.assert_array_equal(normalizer.observations(far), [[10.0, -10.0]])


def test_categories_masks_flags_and_images_keep_their_values() -> None:
    space = spaces.Dict(
        {
            "action_mask": spaces.Box(0, 1, (2,), np.int8),
            "category": spaces.Discrete(3),
            "flag": spaces.Box(0, 1, (1,), np.bool_),
            "image": spaces.Box(0, 255, (2, 1), np.uint8),
            "speed": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
    normalizer = normalizer_of(space, clip=0.5)
    assert len(normalizer.moments.mean) == 2
    normalizer.moments = Moments(4, np.array([1.0, 2.0]), np.array([16.0, 64.0]))
    row = np.array([[1, 0, 0, 1, 0, 1, 200, 30, 1.5, -10]], np.float32)
    # The standard deviations are 2 and 4. The last value is -3, and is clipped to -0.5.
    expected = [[1, 0, 0, 1, 0, 1, 200, 30, 0.25, -0.5]]
    np.testing.assert_allclose(normalizer.observations(row), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (40, 40, 3), np.uint8),
        spaces.Box(0, 1, (10, 10, 4), np.bool_),
        spaces.Discrete(5),
        spaces.Dict({"action_mask": spaces.Box(0, 1, (3,)), "cell": spaces.Discrete(4)}),
    ],
)
def test_observations_without_numbers_are_a_config_error(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"key 'normalize_observations': got True for .* Allowed"):
        normalizer_of(space)
    assert len(normalizer_of(space, None, clip_rewards=1.0).moments.mean) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_observations": 5.0}, "'clip_observations': got 5.0 with normalize_observations=F"),
        ({"clip_rewards": 1.0, "normalize_observations": True}, "or normalize_rewards=True"),
        ({"normalize_rewards": True, "clip_rewards": 0.0}, "'clip_rewards': got 0.0"),
        ({"normalize_rewards": "yes please"}, "'normalize_rewards': got 'yes please'"),
    ],
)
def test_error_names_key_value_and_allowed_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig.parse(options)


@pytest.mark.parametrize("name", ["normalize_observations", "clip_rewards"])
def test_normalisation_is_fixed_once_the_policy_exists(name: str) -> None:
    policy = small_policy("a2c", **BOTH)
    with pytest.raises(ConfigError, match=f"{name!r} cannot be changed"):
        policy.set_option(name, 3.0)


def test_changed_discount_factor_is_used_for_returns() -> None:
    policy = small_policy("a2c", **BOTH)
    policy.set_option("gamma", 0.5)
    assert policy.normalizer is not None
    assert policy.normalizer.gamma == 0.5


# ---- learning ---------------------------------------------------------------------------------


@every_policy
def test_learner_sees_what_the_worker_saw(name: str) -> None:
    """The moments change between acting and learning. In between, the batch is also compressed and
    concatenated."""
    policy: Any = with_moments(moved(small_policy(name, **BOTH)))
    policy.flat.refresh_copies()
    first = batch_of(policy, seed=1)
    with_moments(policy, seed=2)
    second = batch_of(policy, steps=4, seed=2)
    with_moments(policy, seed=3)
    for batch in (first, second):
        batch.compress = "lz4"
    batch = SampleBatch.concat(pickle.loads(pickle.dumps([first, second])))
    for part in (batch, batch.select(np.array([6, 0, 3])), batch.steps(1, 4)):
        used = part["valid"]
        np.testing.assert_allclose(
            policy.dist_inputs(part)[used], part["action_dist_inputs"][used], atol=1e-6
        )
    stats = policy.compute_gradients(batch).stats
    assert abs(stats.get("mean_kl_loss", 0.0)) < 1e-6, "the ratio of the first minibatch is 1"
    assert stats.get("clip_fraction", 0.0) == 0.0


def test_current_moments_instead_of_those_that_acted_are_wrong() -> None:
    policy: Any = with_moments(moved(small_policy("ppo", **BOTH)))
    batch = batch_of(policy)
    with_moments(policy, seed=2)
    batch.per_env = policy.normalizer.per_env(4)
    assert policy.compute_gradients(batch).stats["mean_kl_loss"] > 1e-4


@every_policy
def test_batch_that_is_normalised_is_not_normalised_again(name: str) -> None:
    policy: Any = with_moments(small_policy(name, **BOTH))
    batch = batch_of(policy)
    once = policy.normalized(batch)
    assert policy.normalized(once) is once
    assert not np.array_equal(once.obs, batch.obs)
    assert not np.array_equal(once["rewards"], batch["rewards"])
    prepared = policy.training_rows(policy.prepare_batch(batch))["obs"]
    np.testing.assert_array_equal(prepared.reshape(once.obs.shape), once.obs)


def test_advantages_and_targets_use_normalised_rewards() -> None:
    policy: Any = with_moments(small_policy("a2c", gamma=0.9, clip_rewards=0.2, **BOTH))
    batch = batch_of(policy)
    raw = batch["rewards"].copy()
    scale = policy.normalizer.per_env(1)["reward_scale"][0]
    scaled = np.clip(raw * scale, -0.2, 0.2)
    assert 0 < np.count_nonzero(np.abs(scaled) == np.float32(0.2)) < scaled.size
    values, following = policy.state_values(batch)
    hidden = SampleBatch(
        batch.all_obs,
        {**batch.columns, "rewards": scaled},
        batch.successor_index,
        batch.successor_obs,
    )
    expected = gae.advantages(hidden, values, following, 0.9, 1.0)
    np.testing.assert_array_equal(batch["advantages"], expected)
    np.testing.assert_array_equal(batch["rewards"], raw)
    observed = policy.value(batch.flat("obs")).reshape(batch.shape)
    np.testing.assert_allclose(values, observed, atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_vtrace_of_columns_of_different_versions(name: str) -> None:
    """Shorter fragments are padded, so their last observation becomes a separate successor."""
    policy: Any = with_moments(small_policy(name, **BOTH))
    batches = []
    for seed, steps in ((1, 6), (2, 4), (3, 5)):
        batches.append(batch_of(policy, steps, seed=seed))
        with_moments(policy, seed=10 + seed)
    moved(policy)
    together = policy.prepare_batch(SampleBatch.concat(batches))
    parts = [policy.prepare_batch(batch) for batch in batches]
    for column in ("values", "value_targets", "advantages"):
        for i, part in enumerate(parts):
            joined = together[column][: part.shape[0], 4 * i : 4 * i + 4]
            np.testing.assert_allclose(joined, part[column], atol=1e-5)


@every_policy
def test_later_minibatches_keep_the_moments_that_acted(name: str) -> None:
    """In A3C, a worker gets new weights between the minibatches of one rollout."""
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 12, **BOTH}
    one, other = (with_moments(small_policy(name, **options)) for _ in range(2))
    both = [MinibatchGradients(policy, batch_of(policy)) for policy in (one, other)]
    while not both[0].done:
        gradients = [rollout.next_gradients().flat for rollout in both]
        np.testing.assert_array_equal(*gradients)
        with_moments(other, seed=9)


def test_memory_and_normalisation_together() -> None:
    model = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4}
    policy: Any = with_moments(small_policy("ppo", model=model, **BOTH))
    env = SyncVectorEnv([lambda i=i: Ramp(i, 3 + i, "truncated") for i in range(2)])
    sampler = make_sampler(env, policy, 12)
    sampler.sample()
    batch = policy.postprocess(sampler.sample())
    with_moments(policy, seed=2)
    np.testing.assert_allclose(policy.dist_inputs(batch), batch["action_dist_inputs"], atol=1e-6)


# ---- weights and state ------------------------------------------------------------------------


def test_weights_carry_moments_and_acting_follows_them() -> None:
    policy, worker = (small_policy("ppo", **BOTH) for _ in range(2))
    obs = np.random.default_rng(0).normal(2.0, 3.0, (5, 2)).astype(np.float32)
    before = worker.action_params(obs)
    with_moments(policy)
    worker.set_weights(pickle.loads(pickle.dumps(policy.get_weights())))
    np.testing.assert_array_equal(worker.action_params(obs), policy.action_params(obs))
    np.testing.assert_array_equal(worker.predict(obs)[0], policy.predict(obs)[0])
    assert not np.array_equal(worker.action_params(obs), before)
    kept = worker.get_weights().moments
    worker.set_weights(policy.get_weights()._replace(moments=None))
    assert worker.get_weights().moments is kept


def test_refused_weights_of_another_network_change_no_moments() -> None:
    policy, other = small_policy("ppo", **BOTH), small_policy("ppo", **BOTH)
    with_moments(other)
    before = policy.get_weights().moments
    short = other.get_weights()
    with pytest.raises(ValueError, match="weights"):
        policy.set_weights(short._replace(flat=short.flat[:-1]))
    assert policy.get_weights().moments is before


def test_plain_policy_sends_no_moments_and_refuses_them() -> None:
    plain = small_policy("ppo")
    assert plain.get_weights().moments is None
    plain.add_moments(Moments.zero(2))
    with pytest.raises(ValueError, match="does not normalise"):
        plain.set_weights(small_policy("ppo", **BOTH).get_weights())
    with pytest.raises(ValueError, match=r"must have shape \[3\]; got \[2\]"):
        small_policy("ppo", **BOTH).set_weights(
            plain.get_weights()._replace(moments=Moments.zero(2))
        )


def test_state_restores_moments_bit_for_bit() -> None:
    policy, other = with_moments(small_policy("ppo", **BOTH)), small_policy("ppo", **BOTH)
    state = policy.get_state()
    with_moments(policy, seed=4)
    other.set_state(state)
    moments = other.get_weights().moments
    assert moments is not None
    assert torch.equal(torch.from_numpy(moments.mean), state["moments"]["mean"])
    assert torch.equal(torch.from_numpy(moments.m2), state["moments"]["m2"])
    assert moments.rows == 50


def test_state_of_another_normalisation_is_refused() -> None:
    plain, both = small_policy("ppo"), small_policy("ppo", **BOTH)
    some = small_policy("ppo", normalize_rewards=True)
    with pytest.raises(ValueError, match=r"normalises observations and rewards; got .* nothing"):
        both.set_state(plain.get_state())
    with pytest.raises(ValueError, match=r"normalises nothing; got .* rewards"):
        plain.set_state(some.get_state())
    with pytest.raises(ValueError, match="got the state of a policy that normalises rewards"):
        both.set_state(some.get_state())
    changed = both.get_state()
    changed["moments"]["m2"] -= 1.0
    with pytest.raises(ValueError, match="must not be negative"):
        both.set_state(changed)


# ---- large rewards ----------------------------------------------------------------------------


class Chain(gymnasium.Env[int, int]):
    """A chain of five states, with a reward of 1000 for each step."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.Discrete(2)
    state = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.state += 1
        return self.state % 5, 1000.0, self.state == 5, False, {}


def error_of_chain(**options: Any) -> float:
    """Trains a policy on `Chain`. Returns the largest difference between a learned value and the
    closed form, in units of the rewards."""
    env = SyncVectorEnv([Chain] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    policy: Any = make_policy("ppo", env, gamma=GAMMA, lr=3e-3, **options)
    sampler = make_sampler(env, policy, 40)
    for _ in range(40):
        batch = sampler.sample()
        policy.learn_on_batch(policy.postprocess(batch))
        policy.add_moments(batch.moments)
    scale = 1.0
    if policy.normalizer is not None:
        scale = policy.normalizer.per_env(1)["reward_scale"][0]
    expected = [1000.0 * sum(GAMMA**k for k in range(5 - state)) for state in range(5)]
    return float(np.abs(policy.value(np.eye(5, dtype=np.float32)) / scale - expected).max())


def test_large_rewards_need_normalisation() -> None:
    """Values are between 1000 and 4095."""
    assert error_of_chain(normalize_rewards=True) < 1.0
    assert error_of_chain() > 500.0


def test_fragment_of_reset_rows_has_no_moments() -> None:
    env = SyncVectorEnv([Drift])
    sampler = make_sampler(env, make_policy("a2c", env, **BOTH), 1)
    batches = [sampler.sample() for _ in range(40)]
    sampler.close()
    rows = [0 if batch.moments is None else batch.moments.rows for batch in batches]
    assert rows == [batch.env_steps for batch in batches]
    assert 0 in rows
