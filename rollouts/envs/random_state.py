"""Seeds the random generators that `reset(seed=...)` does not seed: the global generators of a
process, and the spaces of an environment."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv


class ProcessSeed(NamedTuple):
    """The seed for a process of an `AsyncVectorEnv`. Each such process runs one environment.

    Attributes:
        seed: the seed of the global generators of the process.
        parent_pid: the id of the process that makes the vector. The seed does not apply to the
            generators of that process.
    """

    seed: int
    parent_pid: int

    @property
    def applies_here(self) -> bool:
        """Whether the current process runs the environment. The current process may also be the
        parent, because `AsyncVectorEnv` makes one environment there to read its spaces."""
        return os.getpid() != self.parent_pid


def draw_process_seeds(count: int) -> list[ProcessSeed]:
    """Draws seeds for `count` processes from NumPy's global generator. The seed of this process
    therefore determines the drawn seeds, and each call draws new seeds."""
    drawn = np.random.randint(2**31, size=count)  # noqa: NPY002
    return [ProcessSeed(int(seed), os.getpid()) for seed in drawn]


def seed_global_generators(seed: int) -> None:
    """Seeds the global generators of `random`, NumPy and torch in this process.

    Args:
        seed: an integer from 0 to 2**32 - 1, which is NumPy's limit.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


class GlobalGenerators:
    """The states of the global generators of `random`, of NumPy, and of torch for the CPU, for one
    user of these generators.

        own = GlobalGenerators()
        with own.in_use():
            run()          # continues where the previous block has ended, whatever happened between

    The first block begins with the states of the process. Each block leaves these states unchanged.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None
        self._active = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context manager in which the process uses the states of this object. Inside of such a
        block, a second block of the same object has no effect."""
        if self._active:
            yield
            return
        outer, self._active = _states(), True
        if self._states is not None:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states, self._active = _states(), False
            _set_states(outer)


def kept_global_generators() -> AbstractContextManager[None]:
    """A context manager that leaves the states of the global generators unchanged."""
    return GlobalGenerators().in_use()


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _set_states(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def seed_spaces(env: Any, seed: int) -> None:
    """Seeds the spaces of an environment or a vector environment, because the environment may call
    `sample()` of its spaces."""
    names = ["action_space", "observation_space"]
    if isinstance(env, VectorEnv):
        names += ["single_action_space", "single_observation_space"]
    for name in names:
        space = getattr(env, name, None)
        if isinstance(space, Space):
            space.seed(seed)
