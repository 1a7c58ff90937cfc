"""`FaultTolerantEnv`: an environment that may raise, and is then made anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from polopt.rollouts.envs.checking import (
    BrokenAPI,
    EnvironmentAPIError,
    EnvironmentFailedError,
    check_reset,
    check_step,
    traceback_of,
)
from polopt.rollouts.envs.random_state import ProcessSeed, seed_global_generators, seed_spaces
from polopt.rollouts.envs.saving import copy_statistics

#: Where a fault is found in `infos`: an `EnvFault` for each environment that had one.
FAULT_KEY = "polopt_fault"
#: Rewards of other types are looked at more closely.
_PLAIN_NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int64})


@dataclass(frozen=True)
class EnvFault:
    """One environment raised, and was made anew.

    Attributes:
        lost_step: `step` raised: the row it was to make holds no transition, and its episode is
            over without an end. False: `reset` did, between two episodes.
        count: exceptions until it worked again.
        traceback: of the last, under a line that says where it was.
    """

    lost_step: bool
    count: int
    traceback: str


class EnvPlace(NamedTuple):
    """Which environment this is, for errors.

    Attributes:
        name: as the user named it.
        worker_index: whose it is.
        env_index: which of the worker's.
    """

    name: str
    worker_index: int
    env_index: int

    def __str__(self) -> str:
        return f"environment {self.name!r} (number {self.env_index} of worker {self.worker_index})"


class FaultTolerantEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Catches what `step` and `reset` raise, closes the environment, makes another and resets it.

    A `step` that raised returns the first observation of the next episode, reward 0 and no end;
    `info[FAULT_KEY]` says that there was no step. A result that breaks Gymnasium's API counts as
    an exception. What wrappers have learned (see `env_state`) passes on to the new one.

    Args:
        make: makes the environment.
        place: see `EnvPlace`.
        max_failures: so many exceptions without one successful step in between are too many, and
            so many breaches of the API in all: those are no accidents.
        env: the first one, if it is there already.
        process: of the environments of an `AsyncVectorEnv`.

    Raises:
        EnvironmentFailedError: too many; from every method that makes environments.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        place: EnvPlace,
        max_failures: int,
        env: Any = None,
        process: ProcessSeed | None = None,
    ) -> None:
        self._owns_process = process is not None and process.applies_here
        if process is not None and self._owns_process:
            seed_global_generators(process.seed)
        self._make = make
        self._place = place
        self._max_failures = max_failures
        self._in_a_row = 0
        self._breaches = 0
        self._total = 0
        self._steps = 0  # since the last reset
        self._seed: int | None = None
        self._untold: EnvFault | None = None
        super().__init__(self._first() if env is None else env)
        space = self.env.observation_space
        array = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        self._shape = space.shape if array else ()  # of the rest's, only the first is looked at
        self._kind: Any = None  # type of the last observation that was looked at and found good
        self._dtype: Any = None

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment's; see above for when that raises."""
        try:
            result = self.env.step(action)
            # The cheap look that every step gets; the rest is looked at once in each episode.
            if (
                not self._steps
                or type(result) is not tuple
                or len(result) != 5
                or type(result[1]) not in _PLAIN_NUMBERS
                or type(result[4]) is not dict
                or type(result[0]) is not self._kind
                or getattr(result[0], "shape", ()) != self._shape
                or getattr(result[0], "dtype", self._dtype) != self._dtype
            ):
                check_step(result, self.env.observation_space)
                self._kind = type(result[0])
                self._dtype = getattr(result[0], "dtype", None)
        except Exception as error:
            raised = error  # dealt with below, where what else is raised has not this for a context
        else:
            self._steps += 1
            return result
        fault, observation, info = self._renew(raised, lost_step=True)
        return observation, 0.0, False, False, {**info, FAULT_KEY: fault}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """As the environment's; see above for when that raises."""
        if seed is not None:
            self._seed = seed
            self._seed_all(self.env, seed)
        if self._steps:
            self._in_a_row = 0
            self._steps = 0
        raised = fault = None
        try:
            result = self.env.reset(seed=seed, options=options)
            check_reset(result, self.env.observation_space)
            observation, info = result
        except Exception as error:
            raised = error
        if raised is not None:
            fault, observation, info = self._renew(raised, lost_step=False)
        if self._untold is not None:
            earlier, self._untold = self._untold, None
            count = earlier.count + (fault.count if fault else 0)
            fault = EnvFault(False, count, fault.traceback if fault else earlier.traceback)
        return observation, info if fault is None else {**info, FAULT_KEY: fault}

    def close(self) -> None:
        """Closes the environment; one that can not even be closed is left to itself."""
        with suppress(Exception):
            self.env.close()  # type: ignore[no-untyped-call]

    def _seed_all(self, env: Any, seed: int) -> None:
        """Seeds what `reset(seed=...)` does not: the spaces, and the generators of a process that
        belongs to this environment."""
        seed_spaces(env, seed)
        if self._owns_process:
            seed_global_generators(seed)

    def _first(self) -> Any:
        count = 0
        while True:
            try:
                return self._make()
            except Exception as error:
                raised = error
            count += 1
            self._untold = EnvFault(False, count, self._count(raised, None, "__init__"))

    def _renew(self, error: Exception, lost_step: bool) -> tuple[EnvFault, Any, dict[str, Any]]:
        """Makes environments until one can be reset; its first observation and info."""
        method = "step" if lost_step else "reset"
        count = 0
        while True:
            count += 1
            last = self._count(error, self.env, method)
            self.close()
            try:
                fresh = self._make()
                copy_statistics(self.env, fresh)
                self.env = fresh
                seed = self._fresh_seed()
                if seed is not None:
                    seed_spaces(fresh, seed)
                result = self.env.reset(seed=seed)
                check_reset(result, self.env.observation_space)
            except Exception as another:
                error, method = another, "reset"
                continue
            return EnvFault(lost_step, count, last), *result

    def _count(self, error: Exception, env: Any, method: str) -> str:
        """Takes note of an exception; gives its traceback."""
        self._in_a_row = 1 if self._steps else self._in_a_row + 1
        self._breaches += isinstance(error, BrokenAPI)
        self._total += 1
        step, self._steps = self._steps + (method == "step"), 0
        where = f"{self._place} in {method}() at step {step} of its episode"
        told = traceback_of(error, env, method)
        if max(self._in_a_row, self._breaches) >= self._max_failures:
            kind = EnvironmentAPIError if isinstance(error, BrokenAPI) else EnvironmentFailedError
            raise kind(
                f"{self._place} failed {self._total} times, too often without one step in between "
                f"or by breaking Gymnasium's API (max_consecutive_env_faults={self._max_failures})"
                f"; the last time in {method}() at step {step} of its episode: "
                f"{type(error).__name__}: {error}\n{told}"
            ) from None
        return f"{where}:\n{told}"

    def _fresh_seed(self) -> int | None:
        """Not the one it was first reset with, or it would repeat its first episodes; and not
        a random one, or a run could not be repeated."""
        if self._seed is None:
            return None
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._total,))
        return int(sequence.generate_state(1)[0] >> 1)
