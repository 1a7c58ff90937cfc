"""Environments that raise, return non-finite numbers, or violate Gymnasium's API."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from toy_envs import Clock, Drift, make_policy, make_sampler, set_value_function

from polopt.common.faults import FaultKind, Faults
from polopt.common.sample_batch import SampleBatch
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, FaultTolerantEnv
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig


class CrashingClock(Clock):
    """A clock that raises in the step after `crash_at` steps of each episode."""

    def __init__(self, crash_at: int, longest: int, length: int = 10**6) -> None:
        super().__init__(length, longest=longest)
        self.crash_at = crash_at

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.time == self.crash_at:
            raise RuntimeError("simulated crash of the clock")
        return super().step(action)


class CartPoleCrashing(CartPoleEnv):
    """A CartPole that raises at random, like RLlib's environment with the same name.

    Args:
        config: `p_crash` is the probability of an exception in each step, and `p_crash_reset` is
            the probability in each reset. Both are 0 by default.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        config = config or {}
        self.p_crash = config.get("p_crash", 0.0)
        self.p_crash_reset = config.get("p_crash_reset", 0.0)

    def reset(self, **options: Any) -> Any:
        result = super().reset(**options)
        if self.p_crash_reset and self.np_random.random() < self.p_crash_reset:
            raise RuntimeError("simulated crash in reset")
        return result

    def step(self, action: Any) -> Any:
        if self.p_crash and self.np_random.random() < self.p_crash:
            raise RuntimeError("simulated crash in step")
        return super().step(action)


def crashing_cartpole(config: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Makes a `CartPoleCrashing` with the limit of 500 steps that CartPole-v1 has."""
    return TimeLimit(CartPoleCrashing(config), 500)


class Spoiled(Drift):
    """A `Drift` that returns a non-finite number, or violates the API, after a number of steps.

    Args:
        config: `worker` is the index of the worker in which this happens, and 0 means all workers.
            `after` is the number of steps of the instance before it happens. `times` is the maximum
            number of times, and by default there is no maximum. `what` is a key of `SPOILS`.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.config = dict(config or {})
        self.steps = 0
        self.count = 0

    def step(self, action: int) -> Any:
        self.steps += 1
        result = super().step(action)
        wanted = self.config.get("worker", 0)
        here = not wanted or self.context.worker_index == wanted
        if not here or self.steps <= self.config.get("after", 0):
            return result
        if self.count >= self.config.get("times", 10**9):
            return result
        self.count += 1
        return SPOILS[self.config["what"]](result)


SPOILS: dict[str, Callable[[Any], Any]] = {
    "nan reward": lambda r: (r[0], float("nan"), *r[2:]),
    "infinite reward": lambda r: (r[0], -np.inf, *r[2:]),
    "huge reward": lambda r: (r[0], 3e38, *r[2:]),
    "nan observation": lambda r: (np.full(3, np.nan, np.float32), *r[1:]),
    "infinite observation": lambda r: (np.array([0, np.inf, 0], np.float32), *r[1:]),
    "wrong shape": lambda r: (r[0][:2], *r[1:]),
    "list of wrong length": lambda r: (r[0].tolist()[:2], *r[1:]),
    "wrong dtype": lambda r: (r[0].astype(complex), *r[1:]),
    "no array": lambda r: (None, *r[1:]),
    "four-tuple": lambda r: (r[0], r[1], r[2], r[4]),
    "nothing": lambda r: None,
    "word for a reward": lambda r: (r[0], "much", *r[2:]),
    "none for a reward": lambda r: (r[0], None, *r[2:]),
    "vector for a reward": lambda r: (r[0], np.zeros(2), *r[2:]),
    "word for an end": lambda r: (r[0], r[1], "no", *r[3:]),
    "list for info": lambda r: (*r[:4], []),
}


class BadReset(Drift):
    """An environment whose `reset` returns only the observation, as in Gym."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0]


class NeverResets(Drift):
    """An environment whose `reset` always raises."""

    def reset(self, **options: Any) -> Any:
        raise OSError("no display")


class NeverSteps(Drift):
    """An environment whose `step` always raises."""

    def step(self, action: int) -> Any:
        raise OSError("no simulator")


def guarded(
    makers: list[Callable[[], Any]], mode: str, kind: Any = FastSyncVectorEnv, limit: int = 10
) -> SyncVectorEnv | AsyncVectorEnv:
    """Makes a vector environment of `FaultTolerantEnv`s."""
    guards = [
        lambda make=make, i=i: FaultTolerantEnv(make, EnvPlace("toy", 1, i), limit)
        for i, make in enumerate(makers)
    ]
    return kind(guards, autoreset_mode=AutoresetMode[mode.upper()])


class NeverMade(Drift):
    """An environment whose constructor always raises."""

    def __init__(self, config: Any = None) -> None:
        raise OSError("no licence")


class CrashingVector(CartPoleVectorEnv):
    """An environment's own vector implementation whose `step` or `reset` raises.

    Args:
        num_envs: the number N of environments.
        crash_at: the number of steps of the instance after which `step` raises. A `reset` that
            raises does so in every call.
        when: the method that raises, `step` or `reset`.
        crashes: if False, neither method raises.
    """

    def __init__(self, num_envs: int, crash_at: int, when: str, crashes: bool) -> None:
        super().__init__(num_envs)
        self.steps_made = 0
        self.crash_at = crash_at
        self.when = when
        self.crashes = crashes
        self.seed: Any = None
        self.was_closed = False

    def close(self, **options: Any) -> None:
        self.was_closed = True

    def step(self, actions: Any) -> Any:
        self.steps_made += 1
        if self.crashes and self.when == "step" and self.steps_made > self.crash_at:
            raise RuntimeError("simulated crash of the vector")
        return super().step(actions)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seed = seed
        if self.crashes and self.when == "reset":
            raise RuntimeError("simulated crash of the vector")
        return super().reset(seed=seed, options=options)


class WrongShape:
    """A policy that returns one action too few."""

    def __call__(self, obs: Any) -> Any:
        return np.zeros(len(obs) - 1, dtype=np.int64)


class NotInWorkers:
    """A policy that cannot be unpickled in another process."""

    def __reduce__(self) -> Any:
        return _only_in_process, (os.getpid(),)

    def __call__(self, obs: Any) -> Any:
        return np.zeros(len(obs), dtype=np.int64)


def _only_in_process(pid: int) -> Any:
    if pid != os.getpid():
        raise ModuleNotFoundError("No module named 'users_module'")
    return NotInWorkers()


GAMMA, CRASH_AT, LONGEST = 0.9, 3, 8


def table_before_a_crash(last: float) -> np.ndarray:
    """Returns the value at each time. The reward is 1 for `CRASH_AT` steps, and the value after
    these steps is `last`. The values at later times, which are never reached, are far off."""
    values = np.full(LONGEST + 1, 99.0)
    discount = GAMMA ** np.arange(CRASH_AT, -1, -1)
    values[: CRASH_AT + 1] = (1.0 - discount) / (1.0 - GAMMA) + discount * last
    return values


def crash_batches(mode: str, fragment: int, kind: Any = FastSyncVectorEnv) -> list[SampleBatch]:
    """Samples 30 steps of two `Clock` environments. The first clock raises in each episode, and the
    second never raises. The policy's value function is exact for the first clock up to the
    exception, and wrong for the second clock."""
    makers = [lambda: CrashingClock(CRASH_AT, LONGEST), lambda: CrashingClock(10**6, LONGEST, 7)]
    env = guarded(makers, mode, kind)
    policy = make_policy("a2c", env, gamma=GAMMA, model={"fcnet_hiddens": []}, **{"lambda": 0.95})
    set_value_function(policy, table_before_a_crash(last=5.0))
    sampler = make_sampler(env, policy, fragment)
    try:
        return [policy.postprocess(sampler.sample()) for _ in range(-(-30 // fragment))]
    finally:
        sampler.close()


def crashed(batch: SampleBatch, name: str) -> np.ndarray:
    return batch[name][:, 0]


def check_row_before_a_crash_is_bootstrapped(batches: list[SampleBatch]) -> None:
    for batch in batches:
        valid = crashed(batch, "valid")
        np.testing.assert_allclose(crashed(batch, "advantages")[valid], 0.0, atol=2e-5)


def worker(env: Any, index: int = 3, **options: Any) -> RolloutWorker:
    options = {"num_envs_per_worker": 2, "rollout_fragment_length": 25, **options}
    config = RolloutConfig.parse({"env": env, **options})
    source = resolve_env(env)
    policy = A2CPolicy.config_class.parse({"model": {"fcnet_hiddens": [4]}})
    probe = (Drift.observation_space, Drift.action_space)
    if env is crashing_cartpole or not isinstance(env, type):
        probe = probe_env(source, config)[:2]
    return RolloutWorker(WorkerConfig(config, source, A2CPolicy, policy, *probe, seed=0), index)


def sample_often(made: RolloutWorker) -> None:
    for _ in range(20):
        made.sample()


def num_faults(faults: Faults, *kinds: FaultKind) -> int:
    """Returns how many faults of these kinds a batch or a record has."""
    return sum(faults[kind].count for kind in kinds if kind in faults)
