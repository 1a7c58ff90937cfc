"""Results of environments: variants that are accepted, and errors that name what is wrong."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faulty_envs import num_faults, sample_often, worker
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from toy_envs import AUTORESET, Clock, Drift

from polopt.rollouts.envs.env_errors import EnvironmentAPIError, EnvironmentFailedError
from polopt.rollouts.envs.vector_env import make_vector_env, probe_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.rollout_worker import RolloutWorker

every_mode = pytest.mark.parametrize("mode", AUTORESET)


class CountedClock(Clock):
    """A `Clock` whose observations come from a function. The class counts its instances."""

    made = 0

    def __init__(self, space: Any, observe: Callable[[int], Any]) -> None:
        super().__init__(6)
        self.observation_space = space
        self.observe = observe
        type(self).made += 1

    def reset(self, **options: Any) -> Any:
        time, info = super().reset(**options)
        return self.observe(time), info

    def step(self, action: int) -> Any:
        time, *rest = super().step(action)
        return self.observe(time), *rest


FIVE = spaces.Discrete(5)
OUT_OF_RANGE = {
    "above": (FIVE, lambda t: t, r"Discrete\(5\); got 5 \(int\)"),
    "below": (FIVE, lambda t: t if t < 4 else -1, r"Discrete\(5\); got -1 \(int\)"),
    "offset": (spaces.Discrete(5, start=2), lambda t: t + 2, r"Discrete\(5, start=2\); got 7"),
    "numpy": (FIVE, lambda t: np.int64(t), r"Discrete\(5\); got .*5"),
    "array": (spaces.MultiDiscrete([9, 5]), lambda t: np.array([0, t]), r"got array\(\[0, 5\]\)"),
    "dict": (
        spaces.Dict(a=spaces.Box(-1.0, 1.0, (1,)), b=FIVE),
        lambda t: {"a": np.zeros(1, np.float32), "b": t},
        r"at 'b', must return an observation of Discrete\(5\); got 5",
    ),
    "reset": (FIVE, lambda t: 5, r"reset\(\) must return an observation of Discrete\(5\); got 5"),
}


def counted(space: Any, observe: Callable[[int], Any], **options: Any) -> RolloutWorker:
    CountedClock.made = 0

    def counted_clock() -> CountedClock:
        return CountedClock(space, observe)

    return worker(counted_clock, **options)


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_integer_outside_its_space_is_one_error(case: str) -> None:
    space, observe, said = OUT_OF_RANGE[case]
    made = counted(space, observe)
    with pytest.raises(EnvironmentAPIError, match=said) as caught:
        sample_often(made)
    assert "'counted_clock' (number 0 of worker 3)" in str(caught.value)
    assert CountedClock.made == 1 + 2  # one to read the spaces, and two in the vector


@pytest.mark.parametrize("value", [5, -1])
def test_integer_outside_of_an_own_vectors_space(value: int) -> None:
    class Vector(CartPoleVectorEnv):
        single_observation_space = FIVE
        observation_space = spaces.MultiDiscrete([5, 5])

        def reset(self, **options: Any) -> Any:
            return np.zeros(2, np.int64), super().reset(**options)[1]

        def step(self, actions: Any) -> Any:
            return np.array([0, value]), *super().step(actions)[1:]

    def vector() -> Vector:
        made = Vector(2)
        made.single_observation_space = FIVE
        made.observation_space = spaces.MultiDiscrete([5, 5])
        return made

    with pytest.raises(EnvironmentAPIError, match=r"'vector' .*MultiDiscrete\(\[5 5\]\); got arr"):
        worker(vector).sample()


@pytest.mark.parametrize("vector_class", [SyncVectorEnv, AsyncVectorEnv])
def test_integer_outside_the_space_in_gymnasiums_vector_of_a_callable(vector_class: Any) -> None:
    """polopt did not make this vector, so no `FaultTolerantEnv` checks its environments."""

    def vector() -> Any:
        return vector_class([lambda: CountedClock(FIVE, lambda t: t)] * 2)

    with pytest.raises(EnvironmentAPIError, match=r"'vector' .*MultiDiscrete\(\[5 5\]\); got arr"):
        sample_often(worker(vector))


@every_mode
def test_reward_may_be_an_array_of_one_number(mode: str) -> None:
    class ArrayReward(Drift):
        def step(self, action: int) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, np.array([reward]), *rest

    plain, arrays = (worker(env, autoreset_mode=mode).sample() for env in (Drift, ArrayReward))
    np.testing.assert_array_equal(plain["rewards"], arrays["rewards"])
    assert num_faults(arrays.faults, "raised") == 0


def test_tuple_observation_may_be_a_list() -> None:
    space = spaces.Tuple([spaces.Discrete(7), spaces.Box(0.0, 9.0, (1,))])
    batches = [
        counted(space, lambda t, kind=kind: kind([t, np.full(1, t, np.float32)])).sample()
        for kind in (tuple, list)
    ]
    np.testing.assert_array_equal(batches[0].all_obs, batches[1].all_obs)
    np.testing.assert_array_equal(batches[0].successor_obs, batches[1].successor_obs)
    assert num_faults(batches[1].faults, "raised") == 0


@pytest.mark.parametrize("key", ["polopt_fault", "final_obs", "final_info", "_final_obs"])
def test_infos_may_use_any_key(key: str) -> None:
    class TalkingDrift(Drift):
        def step(self, action: int) -> Any:
            *rest, _ = super().step(action)
            return *rest, {key: 1.0}

        def reset(self, **options: Any) -> Any:
            return super().reset(**options)[0], {key: 1.0}

    plain, talking = worker(Drift).sample(), worker(TalkingDrift).sample()
    assert num_faults(talking.faults, "raised") == 0
    assert talking["truncated"].any()
    for name in ("all_obs", "successor_obs"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(talking, name))


@pytest.mark.parametrize("value", [{"a": 1}, np.ones(2), np.array(["x", None], dtype=object)])
def test_infos_of_an_own_vector_may_use_any_key(value: Any) -> None:
    class TalkingVector(CartPoleVectorEnv):
        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], {"polopt_fault": value}

    batch = worker(lambda: TalkingVector(2)).sample()
    assert num_faults(batch.faults, "raised") == 0
    assert batch["valid"][:5].all()


@every_mode
def test_last_observation_survives_an_array_that_is_reused(mode: str) -> None:
    class ReusingClock(Clock):
        def __init__(self) -> None:
            super().__init__(4)
            self.observation_space = spaces.Box(0.0, 4.0, (1,), np.float32)
            self.array = np.zeros(1, np.float32)

        def reset(self, **options: Any) -> Any:
            self.array[0] = super().reset(**options)[0]
            return self.array, {}

        def step(self, action: int) -> Any:
            self.array[0], *rest = super().step(action)
            return self.array, *rest

    batch = worker(lambda: ReusingClock(), autoreset_mode=mode).sample()
    finals = batch.all_obs[1:][batch["truncated"]] if mode == "next_step" else batch.successor_obs
    assert len(finals) > 0
    np.testing.assert_array_equal(finals, 4.0)


# ---- close ------------------------------------------------------------------------------------


class FailingClose(Drift):
    """An environment whose `close` raises."""

    def close(self) -> None:
        raise OSError("device is gone")


class FailingVectorClose(CartPoleVectorEnv):
    """A vector environment whose `close` raises."""

    def close(self, **options: Any) -> None:
        raise OSError("device is gone")


def failing_vector() -> FailingVectorClose:
    return FailingVectorClose(2)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("env", [FailingClose, failing_vector])
def test_close_that_raises_is_logged(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="polopt"):
        made = worker(env)
        probe_env(env, RolloutConfig.parse({"env": env, "num_envs_per_worker": 2}))[:2]
        made.sample()
        made.stop()
        del made
        gc.collect()  # the finalizer of a vector closes the vector again
    assert any("close() raised OSError: device is gone" in line for line in caplog.messages)


# ---- spaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["observation", "action"])
def test_spaces_of_a_worker_must_be_the_policys(what: str) -> None:
    class OtherSpaces(Drift):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            if config.worker_index == 3 and what == "observation":
                self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
            elif config.worker_index == 3:
                self.action_space = spaces.Discrete(4)

    with pytest.raises(EnvironmentAPIError, match=rf"'OtherSpaces' .*worker 3.* {what} space"):
        worker(OtherSpaces).sample()


def test_bounds_of_a_box_may_differ_between_workers() -> None:
    class OtherBounds(Drift):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            bound = float(config.worker_index + 1)
            self.observation_space = spaces.Box(-bound, bound, (3,), np.float32)

    assert worker(OtherBounds).sample().env_steps == 50


def test_env_that_cannot_be_made_counts_its_attempts() -> None:
    attempts = []

    def make(config: Any) -> Drift:
        attempts.append(config.vector_index)
        if len(attempts) > 1:
            raise OSError("no licence")
        return Drift()

    config = RolloutConfig.parse(
        {"env": make, "num_envs_per_worker": 2, "max_consecutive_env_faults": 4}
    )
    with pytest.raises(EnvironmentFailedError, match=r"failed 4 times .*max_consecutive_env_fau"):
        make_vector_env(make, config)
    assert attempts == [0, 1, 1, 1, 1]


CHANGES = {
    "shape": (np.zeros(1, np.float32), np.zeros(2, np.float32), r"shape \(1,\); got shape \(2,\)"),
    "dtype": (np.zeros(1, np.float32), np.zeros(1, complex), "dtype float32; got dtype complex"),
    "list": ([0.0], [0.0, 0.0], r"shape \(1,\); got shape \(2,\)"),
    "type": (np.zeros(1, np.float32), [0.0, 0.0], r"shape \(1,\); got shape \(2,\)"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_observation_that_changes_within_an_episode_is_one_error(case: str) -> None:
    right, wrong, said = CHANGES[case]
    made = counted(spaces.Box(-1.0, 1.0, (1,)), lambda t: right if t < 4 else wrong)
    with pytest.raises(EnvironmentAPIError, match=said):
        sample_often(made)
