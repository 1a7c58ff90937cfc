"""Environments with the API of Gym before 0.26."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import polopt
from polopt.rollouts.envs.env_sources import EnvContext, make_env, resolve_env
from polopt.rollouts.envs.old_gym import OldGymEnv, space_of
from polopt.rollouts.envs.vector_env import make_one_env
from polopt.rollouts.rollout_config import RolloutConfig

RENDERS_NOTHING: Any = {"render_modes": []}
BOX = spaces.Box(-1.0, 9.0, (1,), np.float32)


def of_gym(kind: str, **attributes: Any) -> Any:
    """A space of the package `gym`."""
    return type(kind, (SimpleNamespace,), {})(**attributes)


class Old:
    """Even episodes terminate after 3 steps, and odd episodes reach a time limit there. Does not
    derive from a class of Gymnasium, as environments of the package `gym`."""

    observation_space = of_gym("Box", low=BOX.low, high=BOX.high, shape=(1,), dtype=BOX.dtype)
    action_space = of_gym("Discrete", n=2)
    metadata = None

    def __init__(self, config: Any = None) -> None:
        self.number = -1
        self.seeds: list[int] = []

    def seed(self, seed: int) -> list[int]:
        self.seeds.append(seed)
        return [seed]

    def reset(self) -> np.ndarray:
        self.number, self.steps = self.number + 1, 0
        return np.zeros(1, np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        self.steps += 1
        done = self.steps == 3
        info = {"TimeLimit.truncated": self.number % 2 == 1} if done else {}
        return np.full(1, self.steps, np.float32), 1.0, done, info


class Ported(Old, gymnasium.Env):  # type: ignore[misc]
    """Derives from Gymnasium's class, but has the old API."""

    observation_space, action_space = BOX, spaces.Discrete(2)
    seed = None  # type: ignore[assignment]
    metadata = RENDERS_NOTHING

    def reset(self) -> np.ndarray:
        self.drawn = self.np_random.random()
        return super().reset()


class WithReturnInfo(Old):
    """As in Gym 0.22 to 0.25."""

    def reset(self, seed: int | None = None, return_info: bool = False, options: Any = None) -> Any:
        self.seeds.append(seed)  # type: ignore[arg-type]
        return (super().reset(), {}) if return_info else super().reset()


class ReturnsList(Old):
    """Gym unpacked any four values."""

    def step(self, action: int) -> Any:
        return list(super().step(action))


def made(cls: Any) -> Any:
    return make_env(cls, EnvContext({}, 0, 0, 0))


def of_id(cls: Any, **options: Any) -> Any:
    gymnasium.register("Old-v0", entry_point=cls, **options)
    try:
        return make_one_env(resolve_env("Old-v0"), RolloutConfig(), 0)
    finally:
        del gymnasium.registry["Old-v0"]


def checked(cls: Any) -> Any:
    gymnasium.register("Old-v0", entry_point=cls)
    try:
        return made(lambda config: gymnasium.make("Old-v0"))  # with PassiveEnvChecker
    finally:
        del gymnasium.registry["Old-v0"]


@pytest.mark.parametrize(
    ("make", "cls"),
    [
        *((made, cls) for cls in (Old, Ported, WithReturnInfo, ReturnsList)),
        *((of_id, cls) for cls in (Old, Ported, WithReturnInfo)),
        (checked, Ported),
    ],
)
def test_answers_become_those_of_gymnasium(make: Any, cls: Any) -> None:
    env = make(cls)
    assert (env.observation_space, env.action_space) == (BOX, spaces.Discrete(2))
    for number in range(2):
        observation, info = env.reset(seed=number)
        assert (observation.tolist(), info) == ([0.0], {})
        ends = [env.step(0)[2:4] for _ in range(3)]
        assert ends[:2] == [(False, False)] * 2
        assert ends[2] == ((True, False) if number == 0 else (False, True))
    assert env.unwrapped.number == 1
    assert type(env.unwrapped) is cls


def test_time_limit_of_an_id_truncates_an_old_environment() -> None:
    env = of_id(Old, max_episode_steps=2)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_seed_reaches_the_environment() -> None:
    for cls in (Old, WithReturnInfo):
        env = made(cls)
        env.reset(seed=7)
        assert env.seeds == [7]
    drawn = []
    for seed in (7, 7, 8):
        env = made(Ported)
        env.reset(seed=seed)
        drawn.append(env.drawn)
    assert drawn[0] == drawn[1] != drawn[2]


def test_run_says_once_that_it_adapts_and_bootstraps_time_limits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mine(Old):
        pass

    with caplog.at_level(logging.WARNING, "polopt"):
        trainer = polopt.A2C(
            env=Mine, num_workers=0, num_envs_per_worker=2, min_sample_timesteps_per_iteration=24
        )
        batch = trainer.workers.local.next_batch()
        result = trainer.train()
        trainer.stop()
    said = [one for one in caplog.messages if "has the API of Gym before 0.26" in one]
    assert len(said) == 1
    assert said[0].startswith("Mine ")
    assert result["env_runners"]["episode_len_mean"] == 3.0
    ends = batch["terminated"][:, 0] | batch["truncated"][:, 0]
    assert batch["terminated"][:, 0][ends].tolist()[:4] == [True, False, True, False]


def test_environment_of_gymnasium_is_not_adapted() -> None:
    assert not isinstance(made(lambda config: gymnasium.make("CartPole-v1")), OldGymEnv)


def test_spaces_of_gym() -> None:
    of_box = of_gym("Box", low=BOX.low, high=BOX.high, shape=(1,), dtype=BOX.dtype)
    given = of_gym(
        "Dict",
        spaces={
            "a": of_gym("Tuple", spaces=(of_box, of_gym("MultiBinary", n=3))),
            "b": of_gym("MultiDiscrete", nvec=np.array([2, 3])),
            "c": of_gym("Discrete", n=2, start=1),
        },
    )
    assert space_of(given) == spaces.Dict(
        a=spaces.Tuple((BOX, spaces.MultiBinary(3))),
        b=spaces.MultiDiscrete([2, 3]),
        c=spaces.Discrete(2, start=1),
    )
    with pytest.raises(TypeError, match="is not a space of Gymnasium"):
        space_of(of_gym("Repeated"))
