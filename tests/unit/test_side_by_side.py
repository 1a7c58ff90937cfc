"""`SideBySide` is a `SyncVectorEnv` in all but time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import AUTORESET, Clock, Drift

from polopt.rollouts.envs.side_by_side import SideBySide


class Talker(Drift):
    """Says something now and then, in each of the ways in which infos are batched; its rewards and
    ends are NumPy's, and its observations more precise than its space."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {}
        if self.np_random.random() < 0.3:
            info = {"number": reward, "array": obs * 2, "deep": {"word": "so", "count": 3}}
        return obs.astype(np.float64), np.float32(reward), np.bool_(terminated), truncated, info

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, {"born": True} if obs[0] > 0.0 else {}


class Pictures(Drift):
    """Observations are small images, actions are vectors."""

    observation_space = spaces.Box(0, 255, (2, 3, 1), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> Any:
        assert action.shape == (2,)
        fate = self.np_random.random()
        return self.picture(), fate, fate < 0.1, fate > 0.9, {}

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        return self.picture(), {}

    def picture(self) -> np.ndarray:
        return self.np_random.integers(0, 255, (2, 3, 1), dtype=np.uint8)


class Parts(Drift):
    """Observations are no arrays, but dicts of them."""

    observation_space = spaces.Dict({"a": Drift.observation_space})

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return {"a": obs}, *rest

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return {"a": obs}, info


class Levers(Drift):
    """Actions are no arrays, but dicts of them."""

    action_space = spaces.Dict({"left": spaces.Discrete(2), "right": spaces.Discrete(2)})

    def step(self, action: Any) -> Any:
        fate = self.np_random.random()
        obs = np.full(3, action["left"] - action["right"], np.float32)
        return obs, fate, fate < 0.1, fate > 0.9, {}


def clock() -> Clock:
    return Clock(3, ends="both")


MAKERS: list[Callable[[], Any]] = [Drift, Talker, Pictures, Parts, Levers, clock]


def history(env: SyncVectorEnv, steps: int = 60) -> list[Any]:
    """All that it returns, copied as it comes; in the middle two environments begin anew."""
    env.action_space.seed(5)
    told = [deepcopy(env.reset(seed=[10, 11, 12, 13]))]
    for t in range(steps):
        if t == steps // 2:
            again = np.array([True, False, True, False])
            told.append(deepcopy(env.reset(options={"reset_mask": again})))
        result = env.step(env.action_space.sample())
        told.append(deepcopy(result))
        if env.autoreset_mode == AutoresetMode.DISABLED and (ended := result[2] | result[3]).any():
            told.append(deepcopy(env.reset(options={"reset_mask": ended})))
    return told


def assert_same(one: Any, other: Any) -> None:
    """Values, types, dtypes, keys and their order."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == object:
            assert_same(one.tolist(), other.tolist())
        else:
            np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("mode", AUTORESET)
@pytest.mark.parametrize("make", MAKERS)
def test_returns_what_a_sync_vector_env_does(
    make: Callable[[], Any], mode: str, copy: bool
) -> None:
    options = {"copy": copy, "autoreset_mode": AutoresetMode[mode.upper()]}
    mine = history(SideBySide([make] * 4, **options))
    theirs = history(SyncVectorEnv([make] * 4, **options))
    assert any(np.logical_or(*told[2:4]).any() for told in theirs if len(told) == 5)  # some end
    assert_same(mine, theirs)


def test_observations_are_written_anew_unless_they_are_copied() -> None:
    for copy in (False, True):
        env = SideBySide([Drift] * 2, copy=copy, autoreset_mode=AutoresetMode.SAME_STEP)
        env.reset(seed=0)
        first, *rest = env.step(np.zeros(2, dtype=np.int64))
        before, rest_before = first.copy(), deepcopy(rest)
        for _ in range(9):
            env.step(np.zeros(2, dtype=np.int64))
        assert np.array_equal(first, before) == copy
        assert_same(rest, rest_before)


def test_an_action_for_each_environment() -> None:
    env = SideBySide([Drift] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="shorter"):
        env.step(np.zeros(1, dtype=np.int64))
