"""Saved and restored environments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from sampling_helpers import assert_same, every_mode
from toy_envs import (
    Drift,
    make_policy,
    make_sampler,
    sync_clocks,
)


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
