"""Seeds what environments draw from besides the generator that `reset(seed=...)` seeds: the global
generators of a process, and the spaces of an environment."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv


class ProcessSeed(NamedTuple):
    """Seed of the process of one environment of an `AsyncVectorEnv`.

    Attributes:
        seed: of its global generators.
        parent_pid: process that makes the vector. Its own generators are not this seed's.
    """

    seed: int
    parent_pid: int

    @property
    def applies_here(self) -> bool:
        """Whether this is the process of the environment. `AsyncVectorEnv` also makes one
        environment in the parent, to read its spaces."""
        return os.getpid() != self.parent_pid


def draw_process_seeds(count: int) -> list[ProcessSeed]:
    """Seeds of `count` processes, drawn from NumPy's global generator, so that they follow from the
    seed of this process and differ each time."""
    drawn = np.random.randint(2**31, size=count)  # noqa: NPY002
    return [ProcessSeed(int(seed), os.getpid()) for seed in drawn]


def seed_global_generators(seed: int) -> None:
    """Seeds the global generators of `random`, NumPy and torch in this process.

    Args:
        seed: from 0 to 2**32 - 1, NumPy's limit.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@contextmanager
def kept_global_generators() -> Iterator[None]:
    """Gives the global generators of `random`, NumPy and torch (of the CPU) in this process the
    state back that they have at the beginning."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def seed_spaces(env: Any, seed: int) -> None:
    """Seeds the spaces of an environment or a vector environment, whose `sample()` it may call."""
    names = ["action_space", "observation_space"]
    if isinstance(env, VectorEnv):
        names += ["single_action_space", "single_observation_space"]
    for name in names:
        space = getattr(env, name, None)
        if isinstance(space, Space):
            space.seed(seed)
