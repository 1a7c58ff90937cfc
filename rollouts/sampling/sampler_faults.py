"""`SamplerFaults`: replaces a vector environment that raises, and collects the faults of a
fragment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from polopt.common.action_mask import MASK_KEY, ActionMask
from polopt.common.faults import Fault, FaultKind, one_per_kind
from polopt.rollouts.envs.agent_processes import AgentProcesses
from polopt.rollouts.envs.agent_vector_env import SlotGroup, num_copies
from polopt.rollouts.envs.env_api import check_observation
from polopt.rollouts.envs.env_errors import (
    APIViolation,
    EnvironmentAPIError,
    EnvironmentFailedError,
    close_env,
    other_thread,
    traceback_of,
)
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY, FaultTolerantEnv
from polopt.rollouts.seeds import Seeds

_Vector = VectorEnv[Any, Any, Any]


class SamplerFaults:
    """Collects the faults of one sampler's environments, and replaces its vector environment when
    the vector raises.

    Args:
        remake: a function that makes a new vector environment. `None` means that exceptions of the
            vector propagate.
        max_failures: the number of consecutive exceptions of the whole vector environment, without
            a successful step between them, at which an error is raised.
        place: the name of the vector environment in error messages.
        source: the beginning of messages about non-finite values of single environments.

    Attributes:
        step: the number of steps sampled before the current fragment.
        mask: checks the action masks in the observations. `None` means that the observations
            contain no action masks.
    """

    def __init__(
        self,
        remake: Callable[[], _Vector] | None = None,
        max_failures: int = 10,
        place: str = "vector environment",
        source: str = "",
    ) -> None:
        self.step = 0
        self.mask: ActionMask | None = None
        self.place, self.source = place, source
        self._remake = remake
        self._max_failures = max_failures
        self._failed_at = -1
        self._in_a_row = 0
        self._rebuilt = 0
        self._faults: dict[FaultKind, Fault] = {}

    def note(self, infos: Mapping[str, Any]) -> np.ndarray:
        """Adds the faults that are in the infos of a step or a reset.

        Returns:
            `[N]` bool, True for each environment whose step was lost (see `Fault.at_start`). If the
            infos have no entry for faults, the shape is `[1]` and the value is False.
        """
        reported = infos.get(FAULT_KEY)
        # An environment's own vector implementation may use this key for another purpose.
        if not isinstance(reported, np.ndarray) or reported.dtype != object:
            return np.zeros(1, dtype=bool)
        lost = np.zeros(len(reported), dtype=bool)
        found = {}
        for index, fault in enumerate(reported):
            if isinstance(fault, Fault):
                lost[index] = not fault.at_start
                found[id(fault)] = fault  # all environments share the fault of a whole vector
        self._add(*found.values())
        return lost

    def _add(self, *faults: Fault) -> None:
        self._faults = one_per_kind([*self._faults.values(), *faults])

    def discarded(self, problem: str, rows: int) -> None:
        """Adds rows that were discarded because of non-finite values. `problem` describes one of
        these values."""
        self._add(Fault("bad_rows", f"{self.source}{problem}", rows=rows))

    def take(self) -> dict[FaultKind, Fault]:
        """Returns the faults since the last call of `take`."""
        taken, self._faults = self._faults, {}
        return taken

    def rebuild(
        self, env: _Vector, error: Exception, seeds: Seeds, step: int = 0
    ) -> tuple[_Vector, Any, dict[str, Any]]:
        """Replaces a vector environment that has raised.

        Args:
            env: the vector environment that raised. This method closes it.
            error: the exception that the vector raised.
            seeds: the seeds of the worker. The seeds of the new vector are derived from these
                seeds, but differ from them.
            step: the index of the step in the current fragment.

        Returns:
            the new vector, its first observations, and infos that report a lost step for each
            environment. `note` counts the exceptions.

        Raises:
            EnvironmentFailedError: if the vector or one of its environments raised too many
                exceptions, breaks Gymnasium's API, or needs a missing package.
            Exception: `error` itself, if this object has no function that makes a new vector.
        """
        if self._remake is None or isinstance(error, EnvironmentFailedError):
            raise error
        failures = 0
        while True:
            failures += 1
            trace = self._count(error, env, self.step + step)
            close_env(_owner_of_processes(env), self.place, terminate=True)
            try:
                before, env = env, self._remake()
                if isinstance(env, SlotGroup) and isinstance(before, SlotGroup):
                    env.vector.continue_from(before.vector)
                obs, infos = env.reset(seed=self._new_seeds(env, seeds))
                self.check_masks(env, obs)
            except EnvironmentFailedError:
                raise
            except Exception as another:
                error = another
                continue
            fault = Fault("raised", trace, count=failures)
            array = np.full(env.num_envs, fault, dtype=object)
            return env, obs, {**infos, FAULT_KEY: array}

    def check(self, env: _Vector, obs: Any) -> None:
        """Checks a batch of observations from a vector whose environments are not
        `FaultTolerantEnv`s. For vectors of `FaultTolerantEnv`s, this method does nothing, because
        each `FaultTolerantEnv` checks its own observations.

        Raises:
            EnvironmentAPIError: if the batch does not match the observation space.
        """
        if checks_each_env(env):
            return
        try:
            check_observation(obs, env.observation_space, "a vector environment")
        except APIViolation as error:
            raise EnvironmentAPIError(
                f"{self.place}, near step {self.step}: {error}\n{traceback_of(error, env)}"
            ) from None

    def check_masks(self, env: _Vector, obs: Any, needed: np.ndarray | bool = True) -> None:
        """Checks the action masks in a batch of observations from a vector whose environments are
        not `FaultTolerantEnv`s. For vectors of `FaultTolerantEnv`s, this method does nothing.

        Args:
            env: the vector environment.
            obs: the batch of observations.
            needed: see `ActionMask.check`.

        Raises:
            ValueError: if a mask is wrong. The caller handles this error as a fault of the
                environment.
        """
        if self.mask is not None and not checks_each_env(env):
            self.mask.check(np.asarray(obs[MASK_KEY]), needed)

    def _count(self, error: Exception, env: _Vector, step: int) -> str:
        trace = traceback_of(error, env)
        self._in_a_row = self._in_a_row + 1 if step <= self._failed_at + 1 else 1
        self._failed_at = step
        self._rebuilt += 1
        if self._in_a_row >= self._max_failures:
            raise EnvironmentFailedError(
                f"{self.place} failed {self._in_a_row} times without one step in "
                f"between (max_consecutive_env_faults={self._max_failures}), the last time at "
                f"step {step}{other_thread()}: {type(error).__name__}: {error}\n{trace}"
            ) from None
        return f"{self.place} raised at step {step}{other_thread()}:\n{trace}"

    def _new_seeds(self, env: _Vector, seeds: Seeds) -> Any:
        root = np.random.SeedSequence(seeds.envs[0], spawn_key=(self._rebuilt,))
        new = (root.generate_state(num_copies(env)) >> 1).tolist()
        return seed_argument(env, new)


def checks_each_env(env: _Vector) -> bool:
    """Returns whether each environment of the vector is a `FaultTolerantEnv`. This is False for an
    environment's own vector implementation, and for a vector that a user's callable makes, even if
    it is a `SyncVectorEnv` or `AsyncVectorEnv`."""
    base = env.unwrapped
    if isinstance(base, SlotGroup):
        return True
    makers = base.env_fns if isinstance(base, SyncVectorEnv | AsyncVectorEnv) else []
    return any(getattr(make, "func", None) is FaultTolerantEnv for make in makers)


def _owner_of_processes(env: _Vector) -> _Vector:
    agents = env.vector if isinstance(env, SlotGroup) else None
    return agents.processes if isinstance(agents, AgentProcesses) else env


def has_sub_envs(env: _Vector) -> bool:
    """Returns whether the vector is a `SyncVectorEnv`, an `AsyncVectorEnv` or a `SlotGroup`. Such a
    vector consists of separate environments. It accepts one seed for each environment, and can
    reset some of its environments without the others."""
    return isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv | SlotGroup)


def seed_argument(env: _Vector, seeds: list[int]) -> Any:
    """Returns the argument `seed` for the vector's `reset`: a list with one seed for each
    environment, or only the first seed if `has_sub_envs` is False."""
    return seeds if has_sub_envs(env) else seeds[0]
