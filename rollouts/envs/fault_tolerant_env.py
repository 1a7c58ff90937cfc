"""`FaultTolerantEnv`: a wrapper that replaces its environment if the environment raises."""

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
from polopt.common.faults import Fault, one_per_kind
from polopt.common.progress import PROGRESS
from polopt.rollouts.envs.env_api import (
    PLAIN_NUMBERS,
    check_reset,
    check_step,
    range_check,
    reward_of,
)
from polopt.rollouts.envs.env_errors import (
    APIViolation,
    EnvironmentAPIError,
    EnvironmentFailedError,
    close_env,
    innermost,
    missing_package,
    other_thread,
    traceback_of,
    warn_without,
)
from polopt.rollouts.envs.env_sources import own_copy
from polopt.rollouts.envs.env_state import copy_statistics
from polopt.rollouts.seeds import ProcessSeed, seed_global_generators, seed_spaces

#: The key in `infos` for the `Fault` of an environment that failed. A fault travels in the infos,
#: because only infos come from environments that run in other processes.
FAULT_KEY = "polopt_fault"
#: Which infos an environment keeps for callbacks: none, the infos of the last steps of episodes, or
#: the infos of all steps.
KeptInfos = Literal["none", "last", "all"]
#: The key in `infos` for the `EpisodeInfo` of an environment, if infos are kept.
INFO_KEY = "polopt_info"


@dataclass(frozen=True)
class EpisodeInfo:
    """Holds the info of one step. Gymnasium's vectors merge the infos of their environments key by
    key, but do not merge the contents of this object.

    Attributes:
        info: the info that the environment returned.
    """

    info: dict[str, Any]


class EnvPlace(NamedTuple):
    """Identifies an environment in error messages.

    Attributes:
        name: the name that the user gave to the environment.
        worker_index: the index of the worker.
        env_index: the index of the environment within the worker.
    """

    name: str
    worker_index: int
    env_index: int

    def __str__(self) -> str:
        return f"environment {self.name!r} (number {self.env_index} of worker {self.worker_index})"


class FaultTolerantEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces an environment that raises in `step` or `reset`. This wrapper catches the exception,
    closes the environment, and then makes and resets a new environment.

    If `step` of the environment raises, `step` of this wrapper returns the first observation of the
    next episode, with reward 0 and with `terminated` and `truncated` False. The `Fault` in
    `info[FAULT_KEY]` says that this step gives no transition. If the environment has wrappers with
    running statistics, the new environment continues with these statistics (see
    `copy_statistics`). If a result breaks Gymnasium's API, the wrapper raises an error, because a
    new environment would run the same code.

    The wrapper also does the following:

    - It seeds the generators that `reset(seed=...)` does not seed. These are the generators of the
      spaces, and the global generators of a process that runs only this environment.
    - It converts rewards to plain numbers, and float observations to the dtype of their space.
    - It copies the last observation of each episode, because an environment may reuse its arrays.
    - It drops all infos that `keep_infos` does not select, because merging infos is slow. For
      HalfCheetah-v5, a vector spends a tenth of the time of its step on merging infos.

    Args:
        make: a function that makes the environment.
        place: the name and the indices of the environment, for error messages.
        max_failures: the number of consecutive exceptions, without a successful step between them,
            at which the wrapper raises an error.
        env: the first environment, if it is already made.
        process: the seed of the process, for the environments of an `AsyncVectorEnv`.
        keep_infos: which infos the wrapper returns as `EpisodeInfo`: none, the infos of the last
            steps of episodes, or the infos of all steps.

    Raises:
        EnvironmentFailedError: from `__init__`, `step` and `reset`, after `max_failures`
            consecutive exceptions. From `step` and `reset`, also at the first exception that
            `missing_package` recognises.
        ImportError, DependencyNotInstalled: from `__init__`, if `make` raises them.
        ConfigError: from `__init__`, if the space of an action mask is wrong.
        EnvironmentAPIError: from `step` and `reset`, at the first violation of Gymnasium's API.
    """

    _api = "Gymnasium's API"  # for error messages

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
        self._unreported: Fault | None = None  # a failure in `__init__` that `reset` reports
        super().__init__(self._first() if env is None else env)
        space = self.env.observation_space
        self._of_arrays = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        self._shape = space.shape if self._of_arrays else ()
        self._in_range = range_check(space)
        self._mask = find_action_mask(space, self.env.action_space)
        self._space = space
        self._has_parts = isinstance(space, spaces.Dict | spaces.Tuple)
        self._space_dtype = space.dtype if self._of_arrays else None
        # These describe the last observation that passed all checks. `_type` is None if every
        # observation must pass all checks.
        self._type: Any = None
        self._is_array = False
        self._dtype: Any = None
        # Whether `_dtype` differs from the dtype of the space, or is not known.
        self._other_dtype = False

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environment. The docstring of the class lists the exceptions."""
        try:
            result = self.env.step(action)
            # Every step runs cheap tests. All checks run at the first step of an episode, and when
            # a cheap test fails.
            if not self._steps or type(result) is not tuple or len(result) != 5:
                result = self._checked(result)
            observation, reward, terminated, truncated, info = result
            if (
                type(observation) is not self._type
                or type(reward) not in PLAIN_NUMBERS
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
            # Handled below, outside of this block, so that the exception does not become the
            # context of later exceptions.
            raised = error
        else:
            self._steps += 1
            PROGRESS.at_s[0] = monotonic()  # a call of `PROGRESS.note` takes twice as long
            if terminated or truncated:
                # The environment may overwrite the observation in `reset`.
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
        """Resets the environment. The docstring of the class lists the exceptions."""
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
            [fault] = one_per_kind([earlier, fault] if fault else [earlier]).values()
        return observation, {} if fault is None else {FAULT_KEY: fault}

    def close(self) -> None:
        """Closes the environment. If this raises, the exception is logged."""
        close_env(self.env, str(self._place))

    def _kept(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of an info. If the environment runs in its own process, the copy omits the
        values that cannot be pickled and sent to the parent process."""
        try:
            values = dict(info)
        except Exception as error:  # a subclass of dict may compute its values on access
            values = dict(dict.items(info))
            without = "callbacks get the values that the underlying dict holds"
            warn_without(innermost(self.env), "step() info", error, without)
        if not self._owns_process:
            return dict(own_copy(values))
        kept = {}
        for key, value in values.items():
            try:
                kept[key] = pickle.loads(pickle.dumps(value))
            except Exception as error:  # pickling a user's object may raise anything
                without = "with vectorization_mode 'async', callbacks do not receive this value"
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
        """Checks a result of `reset` and returns its observation."""
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
        """Raises `ValueError` if the action mask is wrong. The caller handles this error like an
        exception of the environment."""
        if self._mask is not None:
            self._mask.check(np.asarray(observation[MASK_KEY])[None], needed)

    def _first(self) -> Any:
        count = 0
        while True:
            try:
                return self._make()
            except (ImportError, DependencyNotInstalled):
                raise  # another attempt would raise the same error
            except Exception as error:
                raised = error
            count += 1
            trace = self._count(raised, None, "__init__")
            self._unreported = self._fault(trace, count, at_start=True)

    def _replace(self, error: Exception, method: str = "step") -> tuple[Fault, Any]:
        """Makes environments until one of them can be reset. Returns the fault and the first
        observation of the new environment."""
        at_start = method == "reset"
        count = 0
        is_open = True
        while True:
            count += 1
            last = self._count(error, self.env, method)
            if is_open:
                self.close()
            try:
                is_open, method = False, "__init__"
                made = self._make()
                copy_statistics(self.env, made)
                self.env = made
                is_open, method = True, "reset"
                seed = self._new_seed()
                if seed is not None:
                    seed_spaces(made, seed)
                result = self.env.reset(seed=seed)
                observation = self._first_observation(result)
            except Exception as another:
                error = another
                continue
            return self._fault(last, count, at_start), observation

    def _fault(self, trace: str, count: int, at_start: bool) -> Fault:
        return Fault("raised", trace, self._place.env_index, count, at_start=at_start)

    def _count(self, error: Exception, env: Any, method: str) -> str:
        """Counts an exception and returns its traceback.

        Raises:
            EnvironmentFailedError: if there were too many exceptions, or if a package is missing.
            EnvironmentAPIError: if the exception is an `APIViolation`.
        """
        self._in_a_row = 1 if self._steps else self._in_a_row + 1
        self._total += 1
        step, self._steps = self._steps + (method == "step"), 0
        where = f"in {method}() at step {step} of its episode{other_thread()}"
        trace = traceback_of(error, env, method)
        if isinstance(error, APIViolation):
            raise EnvironmentAPIError(
                f"{self._place} breaks {self._api} {where}: {error}\n{trace}"
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
        """Derives a seed for the next environment from the last seed that `reset` received and from
        the number of faults. The derived seed differs from the received seed, so that episodes are
        not repeated. Returns None if `reset` has not received a seed."""
        if self._seed is None:
            return None
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._total,))
        return int(sequence.generate_state(1)[0] >> 1)


def cast_floats(observation: Any, space: spaces.Space[Any]) -> Any:
    """Returns an observation whose floats have the dtype of its space. Other values stay unchanged.
    Gymnasium's vectors would also cast the floats. However, they would raise for numbers that
    overflow if the user's `np.seterr` settings ask for exceptions."""
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
