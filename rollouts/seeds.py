"""Seeds of a worker, and the random generators that `reset(seed=...)` of an environment does not
seed: the global generators of a process, and the spaces of an environment."""

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

#: The first number in the spawn key of evaluation seeds. No worker has this number as its index.
_EVALUATION = 2**31


class Seeds(NamedTuple):
    """The seeds of one worker.

    Attributes:
        envs: the seeds `[N]` of the environments.
        actions: the seed of the generator of action noise.
        shuffle: the seed of the generator that shuffles minibatches.
        process: the seed of the global generators (`random`, NumPy and torch) in the worker's
            process.
    """

    envs: list[int]
    actions: np.random.SeedSequence
    shuffle: int
    process: int


def worker_seeds(
    seed: int, worker_index: int, restart_count: int, num_envs: int, restore_count: int = 0
) -> Seeds:
    """Derives the seeds of a worker from the seed of the run.

    The seeds differ between workers and between the environments of a worker. They also differ
    between a worker and its replacement, and between a run and its continuation from a checkpoint.
    With equal seeds, new episodes would repeat earlier episodes.

    Args:
        seed: the seed of the run.
        worker_index: the index of the worker. The local worker in the driver has index 0.
        restart_count: the number of earlier workers with this index.
        num_envs: the number N of environments.
        restore_count: the number of times that the run was restored from a checkpoint.
    """
    return _seeds_of(seed, (worker_index, restart_count, restore_count), num_envs)


def evaluation_seeds(seed: int, number: int, worker_index: int, num_envs: int) -> Seeds:
    """Derives the seeds of a worker for one evaluation.

    The seeds differ from the seeds in training. They also differ between evaluations, between
    workers, and between the environments of a worker. They do not depend on the number of restarts.
    A replacement of a failed worker therefore plays the same episodes again.

    Args:
        seed: the seed of the run.
        number: the number of evaluations that this run began before this evaluation.
        worker_index: the index of the evaluation worker. The local worker in the driver has index
            0.
        num_envs: the number N of environments.
    """
    return _seeds_of(seed, (_EVALUATION, number, worker_index), num_envs)


def _seeds_of(seed: int, key: tuple[int, ...], num_envs: int) -> Seeds:
    envs, actions, shuffle, process = np.random.SeedSequence(seed, spawn_key=key).spawn(4)
    # Gymnasium's environments require non-negative seeds, and some libraries require seeds that fit
    # into a signed 32-bit integer. So each seed has 31 bits.
    env_seeds = (envs.generate_state(num_envs) >> 1).tolist()
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def seeds_from(env_seeds: list[int], worker_index: int) -> Seeds:
    """Derives all other seeds of a worker from the seeds of its environments. Workers with the same
    environment seeds have different action noise.

    Args:
        env_seeds: the seeds `[N]` of the environments.
        worker_index: the index of the worker.
    """
    root = np.random.SeedSequence(env_seeds, spawn_key=(worker_index,))
    actions, shuffle, process = root.spawn(3)
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])


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
