"""Sampling: episodes that continue across fragments, early stops, and workers."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformReward
from sampling_helpers import assert_same, every_mode, worker
from toy_envs import (
    Clock,
    Drift,
    make_policy,
    make_sampler,
    sync_clocks,
)

from polopt.optimizers.async_gradients import compute_gradient
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.worker_sampler import clip_rewards


@every_mode
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_episodes_continue_across_fragments(mode: str, length: int) -> None:
    env = sync_clocks([3, 5], "terminated", mode)
    sampler = make_sampler(env, make_policy("a2c", env), length)
    reset_row = 1 if mode == "next_step" else 0
    rows = 0
    for _ in range(12):
        batch = sampler.sample()
        ended = []
        for t in range(rows, rows + length):
            ended += [n for n in (3, 5) if t % (n + reset_row) == n - 1]
        assert batch.episodes.lengths == ended
        assert batch.episodes.returns == ended
        rows += length


@pytest.mark.parametrize("reward", [100.0, np.nan])
def test_reward_of_a_reset_row_is_discarded(reward: float) -> None:
    env = sync_clocks([3, 5], "terminated", "next_step")
    step = env.step

    def generous(actions: Any) -> Any:
        resets = env._autoreset_envs.copy()
        obs, rewards, *rest = step(actions)
        rewards[resets] = reward
        return obs, rewards, *rest

    env.step = generous  # type: ignore[method-assign]
    batch = make_sampler(env, make_policy("a2c", env), 20).sample()
    np.testing.assert_array_equal(batch.episodes.returns, batch.episodes.lengths)
    np.testing.assert_array_equal(batch["rewards"], batch["valid"].astype(np.float32))


@pytest.mark.parametrize(("clip", "expected"), [("sign", 1.0), (2.5, 2.5), (7, 3.0), (None, 3.0)])
def test_rewards_are_clipped_for_learning_only(clip: Any, expected: float) -> None:
    def make(config: Any) -> Any:
        return TransformReward(Clock(2, "terminated"), lambda reward: 3.0 * reward)

    one = worker(env=make, rollout_fragment_length=4, clip_raw_rewards=clip)
    batch = one.next_batch()
    assert (batch["rewards"] == expected).all()
    assert set(batch.episodes.returns) == {6.0}
    # The second value target of an episode of two steps.
    last = batch["value_targets"][batch["truncated"] | batch["terminated"]]
    np.testing.assert_allclose(last, expected, rtol=1e-5)


@pytest.mark.parametrize("clip", ["sign", 1.0])
def test_clipping_does_not_hide_an_infinite_reward(clip: Any) -> None:
    def make(config: Any) -> Any:
        return TransformReward(Clock(2, "terminated"), lambda reward: reward)

    batch = worker(env=make, rollout_fragment_length=4).next_batch()
    batch["rewards"][:3, 0] = np.inf, -np.inf, 5.0
    clip_rewards(batch, clip)
    assert batch["rewards"][:3, 0].tolist() == [np.inf, -np.inf, 1.0]


def test_observations_continue_across_fragments() -> None:
    env = sync_clocks([5, 7], "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 4)
    batches = [sampler.sample() for _ in range(4)]
    for before, after in itertools.pairwise(batches):
        np.testing.assert_array_equal(after.all_obs[0], before.bootstrap_obs)
    times = np.concatenate([batch.obs for batch in batches])
    np.testing.assert_array_equal(times, np.arange(16)[:, None] % [5, 7])


def test_batch_records_policy_and_environment() -> None:
    env = SyncVectorEnv([Drift] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy("a2c", env)
    policy.version = 13
    steps: list[tuple[Any, ...]] = []
    step = env.step

    def spy(actions: Any) -> Any:
        result = step(actions)
        steps.append((actions.copy(), *result[:4]))
        return result

    env.step = spy  # type: ignore[method-assign]
    batch = make_sampler(env, policy, 9).sample()
    assert batch.version == 13
    assert (batch.shape, batch.env_steps) == ((9, 2), 18)
    assert (batch["rewards"].dtype, batch["terminated"].dtype) == (np.float32, bool)
    params = policy.action_params(batch.flat("obs"))
    np.testing.assert_allclose(batch.flat("action_dist_inputs"), params, rtol=1e-4, atol=1e-6)
    for t, (actions, obs, rewards, terminated, truncated) in enumerate(steps):
        np.testing.assert_array_equal(batch["actions"][t] - 1, actions)  # the first action is -1
        np.testing.assert_array_equal(batch.all_obs[t + 1], obs)
        np.testing.assert_array_equal(batch["rewards"][t], rewards.astype(np.float32))
        np.testing.assert_array_equal(batch["terminated"][t], terminated)
        np.testing.assert_array_equal(batch["truncated"][t], truncated)


def test_without_exploration_actions_are_the_mode() -> None:
    sampler = worker().sampler
    assert sampler is not None
    batch = sampler.sample(explore=False)
    np.testing.assert_array_equal(batch["actions"], batch["action_dist_inputs"].argmax(-1))


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_last_observation_of_structured_spaces(mode: str) -> None:
    space = spaces.Dict(time=spaces.Discrete(6), pair=spaces.Tuple([spaces.Discrete(2)] * 2))

    class Structured(Clock):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.observation_space = space

        def reset(self, **options: Any) -> Any:
            return self.look(super().reset(**options)[0]), {}

        def step(self, action: int) -> Any:
            time, *rest = super().step(action)
            return self.look(time), *rest

        def look(self, time: int) -> Any:
            return {"time": time, "pair": (time % 2, 1)}

    env = SyncVectorEnv([lambda: Structured(5)] * 2, autoreset_mode=AutoresetMode[mode.upper()])
    batch = make_sampler(env, make_policy("a2c", env), 12).sample()
    finals = batch.all_obs[1:][batch["truncated"]] if mode == "next_step" else batch.successor_obs
    assert finals.tolist() == [(5, (1, 1))] * 4


def test_early_stop_shortens_fragments_until_it_ends() -> None:
    whole = worker(rollout_fragment_length=9).sampler
    stopped = worker(rollout_fragment_length=9).sampler
    assert whole is not None
    assert stopped is not None
    stopped.stop_after = lambda: 4
    expected, batch = whole.sample(), stopped.sample()
    assert batch.shape == (4, 3)
    for name in ("obs", *batch.columns):
        np.testing.assert_array_equal(batch[name], expected[name][:4])
    stopped.stop_after = lambda: None
    after = stopped.sample()
    assert after.shape == (9, 3)
    np.testing.assert_array_equal(after.all_obs[0], expected.all_obs[4])


def test_early_stop_keeps_steps_already_sampled() -> None:
    env = sync_clocks([100, 100], "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 10)
    step = env.step

    def step_and_stop(actions: Any) -> Any:
        result = step(actions)
        if env.envs[0].time == 5:
            sampler.stop_after = lambda: 2  # fewer steps than have already been sampled
        return result

    env.step = step_and_stop  # type: ignore[method-assign]
    batch = sampler.sample()
    assert batch.shape == (5, 2)
    assert batch.obs.tolist() == [[t, t] for t in range(5)]
    sampler.stop_after = lambda: None
    assert sampler.sample().obs[0].tolist() == [5, 5]


@pytest.mark.parametrize(("keep_steps", "length"), [(0, 1), (3, 3), (99, 7)])
def test_early_stop_keeps_at_least_one_step(keep_steps: int, length: int) -> None:
    sampler = worker().sampler
    assert sampler is not None
    sampler.stop_after = lambda: keep_steps
    assert sampler.sample().shape[0] == length


def test_episodes_are_whole_across_early_stops() -> None:
    env = sync_clocks([5, 5], "truncated", "next_step")
    sampler = make_sampler(env, make_policy("a2c", env), 8)
    lengths: list[int] = []
    steps = rows = 0
    for keep in (1, 3, 8, 2, 2, 8, 1, 8, 8):
        sampler.stop_after = lambda keep=keep: keep
        batch = sampler.sample()
        lengths += batch.episodes.lengths
        steps += batch.env_steps
        rows += 2 * batch.shape[0]
    assert set(lengths) == {5}
    # Every sixth row of each of the two environments is a reset row.
    assert steps == rows - 2 * (rows // 2 // 6)


def test_driver_samples_without_remote_workers() -> None:
    batch = worker(index=0, num_workers=0).sample()
    assert batch.worker_index == 0
    assert {"values", "advantages", "value_targets"} <= batch.columns.keys()


def test_driver_has_no_envs_with_remote_workers() -> None:
    driver = worker(index=0, num_workers=2)
    assert driver.sampler is None
    with pytest.raises(RuntimeError, match="worker 0 has no environments"):
        driver.sample()
    assert driver.get_state()["sampler"] is None
    driver.stop()


def test_worker_acts_with_given_weights() -> None:
    each, other = worker(index=1), worker(index=2, seed=9)
    other.policy.version = 5
    gradients = compute_gradient(each, other.get_weights())
    assert gradients is not None
    assert gradients.version == each.policy.version == 5
    assert gradients.rows == 21
    np.testing.assert_array_equal(each.get_weights().flat, other.get_weights().flat)
    assert each.sample().version == 5


def test_restored_worker_continues_bit_for_bit() -> None:
    one, other = worker(index=1), worker(index=1, restart_count=1)
    one.learn(one.sample())
    other.set_state(one.get_state())
    np.testing.assert_array_equal(one.get_weights().flat, other.get_weights().flat)
    assert_same(one.sample(), other.sample())
    assert one.policy.shuffle.random() == other.policy.shuffle.random()


class Pictures(gymnasium.Env[np.ndarray, int]):
    """An environment whose observations are images. The value of every pixel is the time."""

    observation_space = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    action_space = spaces.Discrete(2)
    time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.picture(), 1.0, False, self.time == 4, {}

    def picture(self) -> np.ndarray:
        return np.full((4, 5, 3), self.time, np.uint8)


@every_mode
def test_uint8_observations_stay_uint8(mode: str) -> None:
    each = worker(env=Pictures, autoreset_mode=mode)
    batch = each.sample()
    assert batch.all_obs.dtype == batch.successor_obs.dtype == np.uint8
    assert batch.all_obs.shape == (8, 3, 4, 5, 3)
    if mode != "next_step":
        assert (batch.successor_obs == 4).all()
    assert np.isfinite(each.policy.compute_gradients(batch).flat).all()


def test_sampler_closes_its_environments() -> None:
    each = worker()
    assert isinstance(each.sampler, VectorSampler)
    each.stop()
    assert each.sampler.env.closed


def test_restored_run_has_new_episodes() -> None:
    first, again, restored = (worker(seed=3) for _ in range(3))
    restored.begin_restored_run(1)
    batches = [made.sample() for made in (first, again, restored)]
    assert np.array_equal(batches[0].all_obs, batches[1].all_obs)
    assert not np.array_equal(batches[0].all_obs[0], batches[2].all_obs[0])
    assert not np.array_equal(batches[0]["actions"], batches[2]["actions"])
    restored.begin_restored_run(0)
    assert np.array_equal(batches[0].all_obs, restored.sample().all_obs)
