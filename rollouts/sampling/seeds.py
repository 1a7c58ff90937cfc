"""Derives the seeds of each worker from the seed of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
