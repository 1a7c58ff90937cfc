"""Seeds: one number in, an independent stream for every use in every worker out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Seeds(NamedTuple):
    """Seeds of one worker.

    Attributes:
        envs: one for each environment.
        actions: of the generator that action noise is drawn from.
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
    """Streams that differ between workers, between a worker and its replacement (`restart_count`),
    between a run and its continuation from a checkpoint (`life`), and between the environments of
    a worker: whatever begins anew must not repeat the episodes that were learned from before."""
    root = np.random.SeedSequence(seed, spawn_key=(worker_index, restart_count, restore_count))
    envs, actions, shuffle, process = root.spawn(4)
    # Gymnasium's classic environments take non-negative seeds; 31 bits suit any library's.
    env_seeds = (envs.generate_state(num_envs) >> 1).tolist()
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def seeds_from(env_seeds: list[int], worker_index: int) -> Seeds:
    """Streams from given seeds of environments. Workers whose environments have the same seeds
    still draw noise of their own."""
    root = np.random.SeedSequence(env_seeds, spawn_key=(worker_index,))
    actions, shuffle, process = root.spawn(3)
    return Seeds(env_seeds, actions, _number(shuffle), _number(process))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])
