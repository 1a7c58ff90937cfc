"""Vectors of fault-tolerant environments return the same results as Gymnasium's vectors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from fakes import worker_config
from faulty_envs import CrashingClock
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from toy_envs import AUTORESET, Clock, Drift, make_policy, make_sampler
from vector_env_checks import NUM_ENVS, InfoDrift, WithoutInfos, assert_same, history, made

from polopt.common.config import ConfigError
from polopt.rollouts.envs import vector_env
from polopt.rollouts.envs.env_errors import EnvironmentAPIError
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.trainers.experiment import Experiment

every_mode = pytest.mark.parametrize("mode", AUTORESET)


class ImageDrift(Drift):
    """An environment whose observations are small images and whose actions are vectors."""

    observation_space = spaces.Box(0, 255, (2, 3, 1), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> Any:
        assert action.shape == (2,)
        draw = self.np_random.random()
        return self.image(), draw, draw < 0.1, draw > 0.9, {}

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        return self.image(), {}

    def image(self) -> np.ndarray:
        return self.np_random.integers(0, 255, (2, 3, 1), dtype=np.uint8)


class DictDrift(Drift):
    """An environment whose observations are dicts."""

    observation_space = spaces.Dict({"a": Drift.observation_space})

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return {"a": obs}, *rest

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return {"a": obs}, info


class DictActionDrift(Drift):
    """An environment whose actions are dicts."""

    action_space = spaces.Dict({"left": spaces.Discrete(2), "right": spaces.Discrete(2)})

    def step(self, action: Any) -> Any:
        draw = self.np_random.random()
        obs = np.full(3, action["left"] - action["right"], np.float32)
        return obs, draw, draw < 0.1, draw > 0.9, {}


def clock() -> Clock:
    return Clock(3, ends="both")


CREATORS: list[Callable[[], Any]] = [
    Drift,
    InfoDrift,
    ImageDrift,
    DictDrift,
    DictActionDrift,
    clock,
]


@every_mode
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("creator", CREATORS)
def test_guarded_vector_equals_gymnasiums(
    creator: Callable[[], Any], fast: bool, mode: str
) -> None:
    makers = [lambda: WithoutInfos(creator())] * NUM_ENVS
    plain = SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])
    expected = history(plain)
    # Some episodes end.
    assert any(np.logical_or(*step[2:4]).any() for step in expected if len(step) == 5)
    assert_same(history(made(creator, mode, fast)), expected)


@every_mode
def test_fast_vector_reports_faults_as_gymnasiums(mode: str) -> None:
    def crashing() -> CrashingClock:
        return CrashingClock(3, longest=7)

    fast, plain = (history(made(crashing, mode, fast)) for fast in (True, False))
    assert any(FAULT_KEY in step[-1] for step in plain)
    assert_same(fast, plain)


@pytest.mark.parametrize("fast", [True, False])
def test_fast_cpu_chooses_the_class_of_the_vector(fast: bool) -> None:
    worker = RolloutWorker(worker_config(fast_cpu=fast), 1)
    assert worker.sampler is not None
    assert type(worker.sampler.env) is (FastSyncVectorEnv if fast else SyncVectorEnv)


def test_former_name_of_fast_cpu_is_refused() -> None:
    options = {"env": "CartPole-v1", "fast_sync": False}
    with pytest.raises(ConfigError, match="key 'fast_sync' is now 'fast_cpu'"):
        RolloutConfig.parse(options)
    with pytest.raises(ConfigError, match="key 'fast_sync' is now 'fast_cpu'"):
        Experiment.parse(options, preset={})


def test_fast_vector_copies_if_asked() -> None:
    env = FastSyncVectorEnv([Drift] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    first, _ = env.reset(seed=0)
    kept = first.copy()
    second = env.step(np.zeros(NUM_ENVS, dtype=np.int64))[0]
    env.step(np.zeros(NUM_ENVS, dtype=np.int64))
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(second, kept)


def test_max_frames_per_traj_truncates_every_environment() -> None:
    env = made(lambda: Clock(100), "next_step", max_frames_per_traj=3)
    env.reset(seed=0)
    ends = [env.step(np.zeros(NUM_ENVS, dtype=np.int64))[3] for _ in range(3)]
    np.testing.assert_array_equal(np.array(ends), np.repeat([[False], [False], [True]], 4, axis=1))


@pytest.mark.parametrize("num_actions", [NUM_ENVS - 1, NUM_ENVS + 1])
def test_wrong_number_of_actions_is_an_error(num_actions: int) -> None:
    env = made(Drift, "same_step")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="argument 2 is"):
        env.step(np.zeros(num_actions, dtype=np.int64))


def test_without_copies_only_observations_are_reused() -> None:
    env = made(lambda: Clock(2), "same_step")
    first, _ = env.reset(seed=0)
    results, kept = [], []
    for _ in range(3):
        results.append(env.step(np.zeros(NUM_ENVS, dtype=np.int64)))
        kept.append(deepcopy(results[-1]))
    assert np.all(kept[1][3])
    assert "final_obs" in kept[1][4]
    assert all(result[0] is first for result in results)
    np.testing.assert_array_equal(first, 1)
    for result, copied in zip(results, kept, strict=True):
        assert_same(result[1:], copied[1:])


class OwnVector(VectorEnv[Any, Any, Any]):
    """A user's vector in the mode same-step. Its episodes have 5 steps, and it uses the array of
    last observations again in each step.

    Args:
        infos: a function that returns the infos for the last observations.
        space: the space of one observation, whose leaves are Boxes of one number.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2

    def __init__(self, infos: Callable[[Any], dict[str, Any]], space: Any = None) -> None:
        self.single_observation_space = space or spaces.Box(-999, 999, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = batch_space(self.single_action_space, 2)
        self._infos, self._last = infos, np.zeros((2, 1), np.float32)

    def _batch(self, numbers: np.ndarray) -> Any:
        if isinstance(self.single_observation_space, spaces.Dict):
            return {"one": numbers, "two": (numbers,)}
        return numbers

    def reset(self, **options: Any) -> Any:
        self._time = np.array([0, 2])
        return self._batch(self._time[:, None].astype(np.float32)), {}

    def step(self, actions: Any) -> Any:
        self._time += 1
        self._last[:] = self._time[:, None]
        over = self._time >= 5
        self._time[over] = 0
        infos = self._infos(self._batch(self._last)) if over.any() else {}
        obs = self._batch(self._time[:, None].astype(np.float32))
        return obs, np.ones(2), np.zeros(2, bool), over, infos


TWO_STEPS = {"num_envs_per_worker": 2, "rollout_fragment_length": 2}
BOX = spaces.Box(-999, 999, (1,), np.float32)
NESTED = spaces.Dict({"one": BOX, "two": spaces.Tuple((BOX,))})


@pytest.mark.parametrize(("space", "of"), [(BOX, np.asarray), (BOX, tuple), (NESTED, dict)])
def test_last_observations_of_a_users_vector_are_copied(space: Any, of: Any) -> None:
    env = OwnVector(lambda last: {"final_obs": of(last)}, space)
    policy = make_policy("a2c", env)
    batch = policy.encode_batch(make_sampler(env, policy, 20, seed=1).sample())
    assert len(batch.successor_obs) == 8
    np.testing.assert_array_equal(batch.successor_obs, 5.0)
    np.testing.assert_array_equal(np.unique(batch.all_obs), np.arange(5.0))


@pytest.mark.parametrize(
    "infos",
    [
        lambda last: {},
        lambda last: {"final_observation": last},
        lambda last: {"final_obs": [None, None]},
        lambda last: {"final_obs": last[:, :0]},
    ],
)
def test_missing_last_observations_end_the_run(infos: Any) -> None:
    config = worker_config("a2c", lambda: OwnVector(infos), rollout=TWO_STEPS)
    worker = RolloutWorker(config, 1)
    worker.next_batch()  # 2 steps, in which no episode ends
    with pytest.raises(EnvironmentAPIError, match=r"same_step.*'final_obs'"):
        worker.next_batch()
    worker.stop()


class HalfPrecision(gymnasium.Env[Any, Any]):
    """Has observations of dtype float16, which do not fit into the shared memory of Gymnasium
    before 1.4."""

    observation_space = spaces.Box(-9, 9, (2,), np.float16)
    action_space = spaces.Discrete(2)

    def reset(self, **options: Any) -> Any:
        return np.full(2, 0.5, np.float16), {}

    def step(self, action: Any) -> Any:
        return np.full(2, 0.25, np.float16), 1.0, False, False, {}


def test_processes_of_environments_may_observe_float16() -> None:
    env = made(HalfPrecision, "same_step", vectorization_mode="async")
    try:
        obs, _ = env.reset(seed=0)
        np.testing.assert_array_equal(obs, np.full((NUM_ENVS, 2), 0.5, np.float16))
        obs = env.step(np.zeros(NUM_ENVS, dtype=np.int64))[0]
        np.testing.assert_array_equal(obs, np.full((NUM_ENVS, 2), 0.25, np.float16))
    finally:
        env.close()


@pytest.mark.parametrize("fits", [True, False])
def test_shared_memory_is_left_out_only_if_observations_do_not_fit(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observation space decides this, and not the text of Python's error."""

    def vector(guards: Any, *, shared_memory: bool = True, **_: Any) -> str:
        if shared_memory:
            raise TypeError("this type has no size" if fits else "another text")
        return "without shared memory"

    def no_memory(space: Any) -> None:  # Gymnasium 1.4 has memory for all types
        raise TypeError

    monkeypatch.setattr(vector_env, "AsyncVectorEnv", vector)
    if not fits:
        monkeypatch.setattr(vector_env, "create_shared_memory", no_memory)
    if fits:
        with pytest.raises(TypeError, match="no size"):
            made(Drift, "same_step", vectorization_mode="async")
    else:
        made_here: Any = made(HalfPrecision, "same_step", vectorization_mode="async")
        assert made_here == "without shared memory"
