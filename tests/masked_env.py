"""Environments with an action mask in their observations."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

#: Discrete and MultiDiscrete actions that do not start at 0.
ACTIONS: dict[str, Space[Any]] = {
    "discrete": spaces.Discrete(4, start=-1),
    "multi": spaces.MultiDiscrete([2, 3], start=[1, -2]),
}


def sizes(actions: Space[Any]) -> list[int]:
    return [4] if isinstance(actions, spaces.Discrete) else [2, 3]


def observations(actions: Space[Any], mask: Space[Any] | None = None) -> spaces.Dict:
    """Returns an observation space with the mask in the middle of the encoded observation."""
    size = sum(sizes(actions))
    return spaces.Dict(
        [
            ("a", spaces.Box(-1.0, 1.0, (2,), np.float32)),
            ("action_mask", mask or spaces.MultiBinary(size)),
            ("z", spaces.Discrete(2)),
        ]
    )


def random_masks(actions: Space[Any], rng: np.random.Generator, rows: int) -> np.ndarray:
    """Returns random masks `[rows, sum of sizes]` that allow at least one category per action."""
    parts = []
    for size in sizes(actions):
        part = rng.random((rows, size)) < 0.4
        part[np.arange(rows), rng.integers(size, size=rows)] = True
        parts.append(part)
    return np.concatenate(parts, axis=1).astype(np.int8)


def encoded(actions: Space[Any], rng: np.random.Generator, masks: np.ndarray) -> np.ndarray:
    """Returns random encoded observations `[N, D]` with the masks `masks`."""
    rest = rng.normal(size=(len(masks), 4))
    return np.concatenate([rest[:, :2], masks, rest[:, 2:]], axis=1).astype(np.float32)


def is_allowed(actions: Space[Any], mask: np.ndarray, action: Any) -> bool:
    """Returns whether `mask` allows `action`, an action of the space `actions`."""
    values = np.atleast_1d(np.asarray(action) - np.asarray(actions.start))  # type: ignore[attr-defined]
    starts = np.cumsum([0, *sizes(actions)[:-1]])
    return bool(mask[starts + values].all())


class Masked(gymnasium.Env[Any, Any]):
    """An environment with random masks. It raises AssertionError for an action that is not allowed.
    Episodes have 5 steps, and the last observation allows no action.

    Args:
        kind: a key of `ACTIONS`.
        wrong: the mask of the observation after the second step. `None` means a correct mask.
    """

    length = 5

    def __init__(self, kind: str = "discrete", wrong: Any = None) -> None:
        self.action_space = ACTIONS[kind]
        total = sum(sizes(self.action_space))
        floats = None if wrong is None else spaces.Box(0.0, 1.0, (total,), np.float32)
        self.observation_space = observations(self.action_space, floats)
        self.wrong = wrong
        self.time = 0

    def observe(self) -> dict[str, Any]:
        self.mask = random_masks(self.action_space, self.np_random, 1)[0]
        if self.time == self.length:
            self.mask[:] = 0
        shown = self.mask
        if self.wrong is not None:
            shown = shown.astype(np.float32)
            if self.time == 2:
                shown[:] = self.wrong
        place = self.np_random.normal(size=2).astype(np.float32)
        return {"a": place, "action_mask": shown.copy(), "z": self.time % 2}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert is_allowed(self.action_space, self.mask, action), (action, self.mask)
        self.time += 1
        return self.observe(), 1.0, self.time == self.length, False, {}


class MaskedVector(VectorEnv[Any, Any, Any]):
    """A vector environment of two `Masked`, in autoreset mode `next_step`."""

    num_envs = 2

    def __init__(self, wrong: Any = None) -> None:
        self.envs = [Masked("discrete", wrong) for _ in range(self.num_envs)]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, self.num_envs)
        self.action_space = batched(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.over = [False] * self.num_envs

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.over = [False] * self.num_envs
        return self._stacked([env.reset(seed=seed)[0] for env in self.envs]), {}

    def step(self, actions: Any) -> Any:
        results: list[Any] = []
        for i, env in enumerate(self.envs):
            if self.over[i]:
                results.append((env.reset()[0], 0.0, False))
            else:
                obs, reward, terminated, _, _ = env.step(actions[i])
                results.append((obs, reward, terminated))
        obs, rewards, self.over = (list(part) for part in zip(*results, strict=True))
        ends = np.array(self.over)
        return self._stacked(obs), np.array(rewards), ends, np.zeros_like(ends), {}

    @staticmethod
    def _stacked(parts: list[Any]) -> dict[str, Any]:
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}


every_kind = pytest.mark.parametrize("kind", ACTIONS)


def masked_rows(kind: str, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Returns encoded observations `[N, D]` and their masks."""
    rng = np.random.default_rng(0)
    masks = random_masks(ACTIONS[kind], rng, rows)
    return encoded(ACTIONS[kind], rng, masks), masks
