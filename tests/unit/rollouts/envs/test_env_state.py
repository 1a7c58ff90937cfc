"""Environments whose state is saved and restored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from gymnasium.wrappers import vector as vector_wrappers
from sampling_helpers import assert_same, every_mode
from toy_envs import (
    AUTORESET,
    Drift,
    make_policy,
    make_sampler,
    sync_clocks,
)

from polopt.rollouts.envs.env_state import get_env_statistics, set_evaluation_statistics


def plain_data(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state)
        for value in state.values():
            yield from plain_data(value)
    elif isinstance(state, list):
        for value in state:
            yield from plain_data(value)
    else:
        yield state


def drifts(mode: str, limit: int | None = None) -> SyncVectorEnv:
    def make() -> gymnasium.Env[Any, Any]:
        return Drift() if limit is None else TimeLimit(Drift(), limit)

    return SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode[mode.upper()])


@every_mode
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("rounds_before", range(4))
def test_restored_environments_continue_bit_for_bit(
    mode: str, limit: int | None, rounds_before: int
) -> None:
    env = drifts(mode, limit)
    policy = make_policy("a2c", env)
    sampler = make_sampler(env, policy, 5, seed=1)
    for _ in range(rounds_before):
        sampler.sample()
    state = sampler.get_state()
    assert state is not None
    restored = make_sampler(drifts(mode, limit), policy, 5, seed=2)
    restored.sample()
    restored.set_state(state)
    for _ in range(3):
        assert_same(sampler.sample(), restored.sample())


def test_saved_state_is_arrays_and_plain_data() -> None:
    env = drifts("same_step", 4)
    sampler = make_sampler(env, make_policy("a2c", env), 5)
    sampler.sample()
    state = sampler.get_state()
    for leaf in plain_data(state):
        assert isinstance(leaf, np.ndarray | int | float | str | None)
        assert not isinstance(leaf, np.ndarray) or leaf.dtype != object
    kept = json.dumps(state, default=np.ndarray.tolist)
    sampler.sample()
    assert json.dumps(state, default=np.ndarray.tolist) == kept  # the saved state is a copy


def test_environments_without_get_state_are_not_saved() -> None:
    env = sync_clocks([3, 4], "truncated", "same_step")
    assert make_sampler(env, make_policy("a2c", env), 5).get_state() is None
    cartpole = gymnasium.make_vec("CartPole-v1", num_envs=2)
    assert make_sampler(cartpole, make_policy("a2c", cartpole), 5).get_state() is None


def normalized(config: Any = None) -> gymnasium.Env[Any, Any]:
    return NormalizeReward(NormalizeObservation(Drift()))


def statistics_after(rounds: int, seed: int) -> dict[str, Any]:
    env = SyncVectorEnv([normalized] * 2)
    sampler = make_sampler(env, make_policy("a2c", env), 5, seed=seed)
    for _ in range(rounds):
        sampler.sample()
    return sampler.get_statistics()


def test_evaluation_uses_the_statistics_of_all_workers() -> None:
    parts = [statistics_after(4, seed=1), statistics_after(9, seed=2)]
    env = normalized()
    set_evaluation_statistics(env, parts)
    chains = [chain for part in parts for chain in part["envs"]]
    counts = [chain[1]["count"] for chain in chains]
    means = [chain[1]["mean"] for chain in chains]
    learned = env.get_wrapper_attr("obs_rms")
    assert learned.count == pytest.approx(sum(counts))
    np.testing.assert_allclose(learned.mean, np.average(means, axis=0, weights=counts), 1e-5)
    before = learned.mean.copy(), env.return_rms.mean.copy()
    env.reset(seed=1)
    for _ in range(5):
        env.step(0)
    np.testing.assert_array_equal(learned.mean, before[0])
    np.testing.assert_array_equal(env.return_rms.mean, before[1])


def test_statistics_of_a_vector_serve_a_single_environment() -> None:
    vector = vector_wrappers.NormalizeObservation(SyncVectorEnv([Drift] * 2))
    vector.reset(seed=3)
    for _ in range(9):
        vector.step(np.zeros(2, dtype=int))
    env = NormalizeObservation(Drift())
    set_evaluation_statistics(env, [get_env_statistics(vector)])
    np.testing.assert_array_equal(env.obs_rms.mean, vector.obs_rms.mean)
    assert env.obs_rms.count == vector.obs_rms.count


def test_evaluation_may_leave_rewards_as_they_are() -> None:
    env = NormalizeObservation(Drift())
    set_evaluation_statistics(env, [statistics_after(4, seed=1)])
    assert env.obs_rms.count > 10.0


@pytest.mark.parametrize("other", [Drift, lambda: NormalizeReward(Drift())])
def test_evaluation_without_normalised_observations_raises(other: Any) -> None:
    with pytest.raises(ValueError, match=r"keep 0 running statistics \(none\); got 1 \(obs_rms"):
        set_evaluation_statistics(other(), [statistics_after(4, seed=1)])


class Strict(gymnasium.Env[Any, Any]):
    """Has episodes of 5 steps, observes the number of steps, and raises if it is stepped after the
    end of an episode."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    time = 9

    def reset(self, **options: Any) -> Any:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.time < 5, "a step after the end of the episode"
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, self.time == 5, False, {}

    def get_checkpoint_state(self) -> dict[str, Any]:
        return {"time": self.time}

    def set_checkpoint_state(self, state: dict[str, Any]) -> None:
        self.time = state["time"]


def stricts(mode: str, number: int = 2, limit: int | None = None) -> SyncVectorEnv:
    def make() -> gymnasium.Env[Any, Any]:
        return Strict() if limit is None else TimeLimit(Strict(), limit)

    return SyncVectorEnv([make] * number, autoreset_mode=AutoresetMode[mode.upper()])


@pytest.mark.parametrize("before", AUTORESET)
@pytest.mark.parametrize("after", AUTORESET)
@pytest.mark.parametrize("steps", [5, 7])
def test_no_environment_steps_after_its_end_in_another_autoreset_mode(
    before: str, after: str, steps: int
) -> None:
    """After 5 steps, a reset is pending in the mode next-step only."""
    env = stricts(before)
    policy = make_policy("a2c", env)
    sampler = make_sampler(env, policy, steps, seed=1)
    sampler.sample()
    restored = make_sampler(stricts(after), policy, 12, seed=2)
    restored.set_state(sampler.get_state())
    batch = restored.sample()
    assert batch["terminated"].sum() >= 2
    resets = before == after == "next_step" and steps == 5
    np.testing.assert_array_equal(batch.all_obs[1], 0.0 if resets else batch.all_obs[0] + 1.0)
    if after != "next_step":
        assert batch.all_obs.max() < 5.0


@pytest.mark.parametrize(
    "other",
    [
        lambda: stricts("same_step", 3),
        lambda: stricts("same_step", 1),
        lambda: stricts("same_step", limit=4),
        lambda: AsyncVectorEnv([Strict] * 2, autoreset_mode=AutoresetMode.SAME_STEP),
    ],
    ids=["more", "fewer", "time limit", "processes"],
)
def test_state_of_other_environments_begins_new_episodes(other: Any) -> None:
    env = stricts("same_step")
    policy = make_policy("a2c", env)
    sampler = make_sampler(env, policy, 7, seed=1)
    sampler.sample()
    vector = other()
    restored = make_sampler(vector, policy, 3, seed=2)
    restored.sample()
    restored.set_state(sampler.get_state())
    np.testing.assert_array_equal(restored.sample().all_obs[0], 0.0)
    vector.close()
