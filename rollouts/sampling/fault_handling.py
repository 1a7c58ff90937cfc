"""What a sampler does about environments that raise: vector environments are made anew, and every
fault is written down until the fragment takes it along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.rollouts.envs.checking import (
    BrokenAPI,
    EnvironmentAPIError,
    EnvironmentFailedError,
    check_observation,
    traceback_of,
)
from polopt.rollouts.envs.guarding import FAULT_KEY, EnvFault
from polopt.rollouts.sampling.seeding import Seeds

_Vector = VectorEnv[Any, Any, Any]


class SamplerFaults:
    """Faults of one sampler's environments since the last fragment.

    Args:
        remake: makes the vector environment anew; None: what it raises is raised.
        max_failures: so many exceptions of the vector environment as a whole, without one step in
            between, are too many.
        place: what to call it in errors.

    Attributes:
        step: steps before those of the fragment under way.
    """

    def __init__(
        self,
        remake: Callable[[], _Vector] | None = None,
        max_failures: int = 10,
        place: str = "vector environment",
    ) -> None:
        self.step = 0
        self._remake = remake
        self._max_failures = max_failures
        self._place = place
        self._failed_at = -1
        self._in_a_row = 0
        self._rebuilt = 0
        self._faults = NO_FAULTS

    def note(self, infos: Mapping[str, Any]) -> np.ndarray:
        """Writes down the faults that `infos` tell of; `[N]` bool: whose step was lost."""
        told = infos.get(FAULT_KEY)
        if told is None:
            return np.zeros(1, dtype=bool)
        for index, fault in enumerate(told):
            if fault is not None:
                count = self._faults.env_faults + fault.count
                self._faults = DataFaults(count, index, fault.traceback)
        return np.array([fault is not None and fault.lost_step for fault in told])

    def take(self) -> DataFaults:
        """The faults since it was last called."""
        taken, self._faults = self._faults, NO_FAULTS
        return taken

    def rebuild(
        self, env: _Vector, error: Exception, seeds: Seeds, step: int = 0
    ) -> tuple[_Vector, Any, dict[str, Any]]:
        """Makes a vector environment anew after it has raised.

        Args:
            env: the one that raised; it is closed.
            error: what it raised.
            seeds: that it was given; the new one takes others that derive from them.
            step: of the fragment under way.

        Returns:
            the new one, its first observations, and infos that tell of a lost step of each.

        Raises:
            EnvironmentFailedError: too many; or one of its environments has had too many.
        """
        if self._remake is None or isinstance(error, EnvironmentFailedError):
            raise error
        failures = 0
        while True:
            failures += 1
            told = self._count(error, env, self.step + step)
            _close(env)
            try:
                env = self._remake()
                obs, infos = env.reset(seed=self._fresh_seeds(env, seeds))
            except EnvironmentFailedError:
                raise
            except Exception as another:
                error = another
                continue
            # One exception, which cost every environment its step.
            array = np.full(env.num_envs, None, dtype=object)
            for index in range(env.num_envs):
                array[index] = EnvFault(True, failures if index == 0 else 0, told)
            return env, obs, {**infos, FAULT_KEY: array}

    def check(self, env: _Vector, obs: Any) -> None:
        """Looks at a batch of observations of an own vector implementation; those of environments
        made one by one are looked at one by one.

        Raises:
            EnvironmentAPIError: it is not of the environment's space.
        """
        if has_parts(env):
            return
        try:
            check_observation(obs, env.observation_space, "a vector environment")
        except BrokenAPI as error:
            raise EnvironmentAPIError(
                f"{self._place}, about step {self.step}: {error}\n{traceback_of(error, env)}"
            ) from None

    def _count(self, error: Exception, env: _Vector, step: int) -> str:
        told = traceback_of(error, env)
        self._in_a_row = self._in_a_row + 1 if step <= self._failed_at + 1 else 1
        self._failed_at = step
        self._rebuilt += 1
        if self._in_a_row >= self._max_failures:
            raise EnvironmentFailedError(
                f"{self._place} failed {self._in_a_row} times without one step in "
                f"between (max_consecutive_env_faults={self._max_failures}), the last time at "
                f"step {step}: {type(error).__name__}: {error}\n{told}"
            ) from None
        return told

    def _fresh_seeds(self, env: _Vector, seeds: Seeds) -> Any:
        root = np.random.SeedSequence(seeds.envs[0], spawn_key=(self._rebuilt,))
        fresh = (root.generate_state(env.num_envs) >> 1).tolist()
        return env_seeds(env, fresh)


def has_parts(env: _Vector) -> bool:
    """Whether it takes a seed for each of its environments, and can reset some of them alone."""
    return isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)


def env_seeds(env: _Vector, seeds: list[int]) -> Any:
    """What its `reset` takes: a seed for each of its environments, or one in all."""
    return seeds if has_parts(env) else seeds[0]


def _close(env: _Vector) -> None:
    """Whatever state it is in. Its processes, where it has some, do not stay behind."""
    with suppress(Exception):
        if isinstance(env, AsyncVectorEnv):
            env.close(terminate=True)
        else:
            env.close()
    for process in getattr(env, "processes", ()):
        with suppress(Exception):
            process.terminate()
