"""Independent random streams of each worker from the seed of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: First number of the key of evaluation's streams. No worker has it as its index.
_EVALUATION = 2**31


class Seeds(NamedTuple):
    """Seeds of one worker.

    Attributes:
        envs: `[N]`, of the environments.
        actions: of the generator of action noise.
        shuffle: of the generator that shuffles minibatches.
        process: of the global generators of the worker's process.
    """

    envs: list[int]
    actions: np.random.SeedSequence
    shuffle: int
    process: int


def worker_seeds(
    seed: int, worker_index: int, restart_count: int, num_envs: int, restore_count: int = 0
) -> Seeds:
    """Returns seeds that differ between workers, between a worker and its replacement, between a
    run and its continuation from a checkpoint, and between the environments of a worker. With equal
    seeds, new episodes would repeat earlier ones.

    Args:
        seed: of the run.
        worker_index: of the worker. 0 is the driver's.
        restart_count: number of workers at this index before.
        num_envs: N.
        restore_count: number of restores of the run from a checkpoint.
    """
    return _seeds_of(seed, (worker_index, restart_count, restore_count), num_envs)


def evaluation_seeds(seed: int, number: int, worker_index: int, num_envs: int) -> Seeds:
    """Seeds of one evaluation: others than in training, in each evaluation, worker and environment.
    A worker that plays its part again plays the same episodes.

    Args:
        seed: of the run.
        number: of the evaluation.
        worker_index: of the evaluation worker. 0 is the driver's.
        num_envs: N.
    """
    return _seeds_of(seed, (_EVALUATION, number, worker_index), num_envs)


def _seeds_of(seed: int, key: tuple[int, ...], num_envs: int) -> Seeds:
    envs, actions, shuffle, process = np.random.SeedSequence(seed, spawn_key=key).spawn(4)
    # Gymnasium's classic environments take non-negative seeds. 31 bits suit any library's.
    env_seeds = (envs.generate_state(num_envs) >> 1).tolist()
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def seeds_from(env_seeds: list[int], worker_index: int) -> Seeds:
    """Seeds that follow from given seeds of environments. Workers whose environments have the same
    seeds still have different action noise.

    Args:
        env_seeds: `[N]`.
        worker_index: of the worker.
    """
    root = np.random.SeedSequence(env_seeds, spawn_key=(worker_index,))
    actions, shuffle, process = root.spawn(3)
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])
