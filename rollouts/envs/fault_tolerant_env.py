"""`FaultTolerantEnv`: replaces an environment that raises."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled

from polopt.common.action_mask import MASK_KEY, find_action_mask
from polopt.common.progress import PROGRESS
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.env_api import check_reset, check_step, range_check, reward_of
from polopt.rollouts.envs.env_errors import (
    APIViolation,
    EnvironmentAPIError,
    EnvironmentFailedError,
    innermost,
    other_thread,
    traceback_of,
    warn_without,
)
from polopt.rollouts.envs.env_state import copy_statistics
from polopt.rollouts.envs.missing_packages import missing_package
from polopt.rollouts.envs.own_copy import own_copy
from polopt.rollouts.envs.random_state import ProcessSeed, seed_global_generators, seed_spaces

#: Key of `infos` with an `EnvFault` for each environment that had one.
FAULT_KEY = "polopt_fault"
#: Infos of steps that are kept for callbacks.
KeptInfos = Literal["none", "last", "all"]
#: Key of `infos` with an `EpisodeInfo` for each environment whose infos are kept.
INFO_KEY = "polopt_info"
#: Types of rewards that need no conversion.
_PLAIN_NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int64})


@dataclass(frozen=True)
class EnvFault:
    """One environment raised and was replaced.

    Attributes:
        lost_step: `step` raised: its row holds no transition, and the episode is discarded. False:
            `reset` raised, between two episodes.
        count: exceptions until an environment worked again.
        traceback: of the last exception, after a line that names environment and step.
    """

    lost_step: bool
    count: int
    traceback: str


@dataclass(frozen=True)
class EpisodeInfo:
    """Keeps Gymnasium's vectors from merging the infos of several environments.

    Attributes:
        info: of the last step of an episode.
    """

    info: dict[str, Any]


class EnvPlace(NamedTuple):
    """Identifies an environment in error messages.

    Attributes:
        name: the user's name of it.
        worker_index: of its worker.
        env_index: within the worker.
    """

    name: str
    worker_index: int
    env_index: int

    def __str__(self) -> str:
        return f"environment {self.name!r} (number {self.env_index} of worker {self.worker_index})"


class FaultTolerantEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Catches exceptions of `step` and `reset`. Closes the environment, makes and resets a new one.

    A `step` that raised returns the first observation of the next episode, reward 0 and no end.
    `info[FAULT_KEY]` says that the row holds no transition. Running statistics of wrappers (see
    `copy_statistics`) are copied to the new environment. A result that violates Gymnasium's API is
    not repaired: it is an error in the environment's code, which a new one has, too.

    Also seeds what `reset(seed=...)` does not: the spaces, and the global generators of a process
    that belongs to this environment. Converts rewards to plain numbers and arrays to the dtype of
    their space, and copies last observations (environments may reuse their arrays). Drops the
    environment's infos: to batch the infos of HalfCheetah-v5 takes a vector a tenth of its step.
    Callbacks read the infos of last steps.

    Args:
        make: makes the environment.
        place: see `EnvPlace`.
        max_failures: consecutive exceptions, without a successful step in between, that end in an
            error.
        env: the first environment, if it has been made.
        process: seed of the process, for the environments of an `AsyncVectorEnv`.
        keep_infos: return the infos of the last steps of episodes, or of all steps, as
            `EpisodeInfo`.

    Raises:
        EnvironmentFailedError: after `max_failures` exceptions, or at the first one that says that
            a package is missing. From `__init__`, `step`, `reset`.
        ImportError, DependencyNotInstalled: from `__init__`, if `make` raises them.
        EnvironmentAPIError: at the first violation of Gymnasium's API. From `step` and `reset`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        place: EnvPlace,
        max_failures: int,
        env: Any = None,
        process: ProcessSeed | None = None,
        keep_infos: KeptInfos = "none",
    ) -> None:
        self._keep_infos = keep_infos
        self._owns_process = process is not None and process.applies_here
        if process is not None and self._owns_process:
            seed_global_generators(process.seed)
        self._make = make
        self._place = place
        self._max_failures = max_failures
        self._in_a_row = 0
        self._total = 0
        self._steps = 0  # since the last reset
        self._seed: int | None = None
        self._unreported: EnvFault | None = None  # of the constructor
        super().__init__(self._first() if env is None else env)
        space = self.env.observation_space
        self._of_arrays = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        self._shape = space.shape if self._of_arrays else ()
        self._in_range = range_check(space)
        self._mask = find_action_mask(space, self.env.action_space)
        self._space = space
        self._has_parts = isinstance(space, spaces.Dict | spaces.Tuple)
        self._space_dtype = space.dtype if self._of_arrays else None
        # Of the last observation that passed all checks. No type, if each has to pass them.
        self._type: Any = None
        self._is_array = False
        self._dtype: Any = None
        self._other_dtype = False  # than the space's, or one that is not known

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of the environment. See the class for exceptions."""
        try:
            result = self.env.step(action)
            # Cheap tests in each step. All checks once per episode and where a test fails.
            if not self._steps or type(result) is not tuple or len(result) != 5:
                result = self._checked(result)
            observation, reward, terminated, truncated, info = result
            if (
                type(observation) is not self._type
                or type(reward) not in _PLAIN_NUMBERS
                or type(info) is not dict
                or (
                    self._is_array
                    and (observation.shape != self._shape or observation.dtype != self._dtype)
                )
                or (self._in_range is not None and not self._in_range(observation))
            ):
                observation, reward, terminated, truncated, info = self._checked(result)
            if self._mask is not None:
                self._check_mask(observation, needed=not (terminated or truncated))
            if self._other_dtype:
                observation = self._cast(observation)
        except Exception as error:
            raised = error  # handled below, where it is not the context of other exceptions
        else:
            self._steps += 1
            PROGRESS.at_s[0] = monotonic()  # a call of `PROGRESS.note` takes twice as long
            if terminated or truncated:
                # The environment may change it when it is reset.
                observation = observation.copy() if self._is_array else own_copy(observation)
                if self._keep_infos != "none":
                    last = {INFO_KEY: EpisodeInfo(self._kept(info))}
                    return observation, reward, terminated, truncated, last
            elif self._keep_infos == "all":
                kept = {INFO_KEY: EpisodeInfo(self._kept(info))}
                return observation, reward, terminated, truncated, kept
            return observation, reward, terminated, truncated, {}
        fault, observation = self._replace(raised)
        return observation, 0.0, False, False, {FAULT_KEY: fault}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment. See the class for exceptions."""
        if seed is not None:
            self._seed = seed
            seed_spaces(self.env, seed)
            if self._owns_process:
                seed_global_generators(seed)
        if self._steps:
            self._in_a_row = 0
            self._steps = 0
        raised = fault = None
        try:
            result = self.env.reset(seed=seed, options=options)
            observation = self._first_observation(result)
        except Exception as error:
            raised = error
        PROGRESS.note()
        if raised is not None:
            fault, observation = self._replace(raised, "reset")
        if self._unreported is not None:
            earlier, self._unreported = self._unreported, None
            count = earlier.count + (fault.count if fault else 0)
            fault = EnvFault(False, count, fault.traceback if fault else earlier.traceback)
        return observation, {} if fault is None else {FAULT_KEY: fault}

    def close(self) -> None:
        """Closes the environment. Logs what it raises."""
        close_env(self.env, str(self._place))

    def _kept(self, info: dict[str, Any]) -> dict[str, Any]:
        """A copy of the info of a last step. In a process of its own, without the values that
        cannot be sent from there."""
        try:
            values = dict(info)
        except Exception as error:  # of a subclass that computes its values when they are read
            values = dict(dict.items(info))
            without = "callbacks get the info as a plain dict holds it"
            warn_without(innermost(self.env), "step() info", error, without)
        if not self._owns_process:
            return dict(own_copy(values))
        kept = {}
        for key, value in values.items():
            try:
                kept[key] = pickle.loads(pickle.dumps(value))
            except Exception as error:  # pickling a user's object may raise anything
                without = "callbacks do not get it with vectorization_mode 'async'"
                warn_without(innermost(self.env), f"step() info {key!r}", error, without)
        return kept

    def _checked(self, result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        check_step(result, self.env.observation_space)
        observation, reward, terminated, truncated, info = result
        self._is_array = isinstance(observation, np.ndarray)
        self._type = type(observation) if self._is_array or not self._of_arrays else None
        self._dtype = getattr(observation, "dtype", None)
        if self._is_array and self._of_arrays:
            self._other_dtype = self._dtype != self._space_dtype
        else:
            self._other_dtype = self._of_arrays or self._has_parts
        return observation, reward_of(reward), terminated, truncated, info

    def _first_observation(self, result: Any) -> Any:
        """The observation of a result of `reset`, which is checked."""
        check_reset(result, self.env.observation_space)
        observation = result[0]
        self._check_mask(observation)
        return self._cast(observation)

    def _cast(self, observation: Any) -> Any:
        if not self._of_arrays:
            return cast_floats(observation, self._space)
        if isinstance(observation, np.ndarray) and observation.dtype == self._space_dtype:
            return observation
        with np.errstate(all="ignore"):  # see `cast_floats`
            return np.asarray(observation, self._space_dtype)

    def _check_mask(self, observation: Any, needed: bool = True) -> None:
        """Raises `ValueError` for a wrong action mask, a fault like an exception of `step`."""
        if self._mask is not None:
            self._mask.check(np.asarray(observation[MASK_KEY])[None], needed)

    def _first(self) -> Any:
        count = 0
        while True:
            try:
                return self._make()
            except (ImportError, DependencyNotInstalled):
                raise  # as it would be again
            except Exception as error:
                raised = error
            count += 1
            trace = self._count(raised, None, "__init__")
            self._unreported = EnvFault(False, count, trace)

    def _replace(self, error: Exception, method: str = "step") -> tuple[EnvFault, Any]:
        """Makes environments until one can be reset. Returns its first observation."""
        lost_step = method == "step"
        count = 0
        while True:
            count += 1
            last = self._count(error, self.env, method)
            self.close()
            try:
                made = self._make()
                copy_statistics(self.env, made)
                self.env = made
                seed = self._new_seed()
                if seed is not None:
                    seed_spaces(made, seed)
                result = self.env.reset(seed=seed)
                observation = self._first_observation(result)
            except Exception as another:
                error, method = another, "reset"
                continue
            return EnvFault(lost_step, count, last), observation

    def _count(self, error: Exception, env: Any, method: str) -> str:
        """Counts an exception and returns its traceback.

        Raises:
            EnvironmentFailedError: too many, or a package is missing.
            EnvironmentAPIError: the exception is an `APIViolation`.
        """
        self._in_a_row = 1 if self._steps else self._in_a_row + 1
        self._total += 1
        step, self._steps = self._steps + (method == "step"), 0
        where = f"in {method}() at step {step} of its episode{other_thread()}"
        trace = traceback_of(error, env, method)
        if isinstance(error, APIViolation):
            raise EnvironmentAPIError(
                f"{self._place} breaks Gymnasium's API {where}: {error}\n{trace}"
            ) from None
        missing = missing_package(error, self._place.name)
        if missing is not None:
            raise EnvironmentFailedError(missing) from error
        if self._in_a_row >= self._max_failures:
            raise EnvironmentFailedError(
                f"{self._place} failed {self._in_a_row} times without one successful step in "
                f"between (max_consecutive_env_faults={self._max_failures}), the last time "
                f"{where}: {type(error).__name__}: {error}\n{trace}"
            ) from None
        return f"{self._place} {where}:\n{trace}"

    def _new_seed(self) -> int | None:
        """Differs from the first seed, so that episodes are not repeated, and follows from it, so
        that runs are reproducible."""
        if self._seed is None:
            return None
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._total,))
        return int(sequence.generate_state(1)[0] >> 1)


def cast_floats(observation: Any, space: spaces.Space[Any]) -> Any:
    """An observation with floats in the dtype of its space. Vectors would cast them where a user's
    `np.seterr` applies, which is for the environment alone. Leaves other values as they are."""
    if isinstance(space, spaces.Dict):
        return {key: cast_floats(observation[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        pairs = zip(observation, space.spaces, strict=True)
        return tuple(cast_floats(one, part) for one, part in pairs)
    if not isinstance(space, spaces.Box):
        return observation
    array, dtype = np.asarray(observation), np.dtype(space.dtype)
    if array.dtype == dtype or (array.dtype.kind, dtype.kind) != ("f", "f"):
        return observation
    with np.errstate(all="ignore"):
        return array.astype(dtype)
