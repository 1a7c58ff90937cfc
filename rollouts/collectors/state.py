"""Weights, seeds and state of a collector's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from polopt.common.weights import Weights
from polopt.rollouts.workers.set_up import call_each
from polopt.rollouts.workers.worker_set import WorkerSet

_LARGEST_SEED = 2**32 - 1


def next_seed(seed: int) -> int:
    """The seed after `seed` in TorchRL's sequence (`torchrl._utils.seed_generator`)."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED


def seed_workers(workers: WorkerSet, seed: int, static: bool) -> int:
    """Seeds every environment of every worker; returns the next seed of the sequence."""
    seeds: dict[int, list[int]] = {}
    for index in [worker.index for worker in workers.remote] or [0]:
        seeds[index] = []
        for _ in range(workers.num_envs_of(index)):
            seeds[index].append(seed)
            seed = seed if static else next_seed(seed)
    if 0 in seeds:
        workers.local.set_seed(seeds[0])
    call_each(workers, "set_seed", {index: (mine,) for index, mine in seeds.items()})
    return seed


def take_weights(policy: Any, weights: Weights | np.ndarray | Mapping[str, Any]) -> None:
    """Sets weights of a policy: Weights with their version; a flat vector `[P]` or a `state_dict`
    of the network as the next version.

    Raises:
        ValueError: they are of another network.
    """
    if isinstance(weights, Weights):
        policy.set_weights(weights)
        return
    own = policy.get_weights()
    if isinstance(weights, Mapping):
        network = getattr(policy, "module", None) or policy.model
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"weights are of another network: {error}") from None
    else:
        if torch.is_tensor(weights):
            weights = weights.detach().cpu().numpy()
        policy.set_weights(own._replace(flat=np.asarray(weights, dtype=np.float32)))
    policy.version = own.version + 1


def load_collector_state(workers: WorkerSet, state: Mapping[str, Any]) -> None:
    """Restores policy and workers from what `Collector.state_dict` returned. Workers that are not
    in `state` keep theirs."""
    saved = {int(index): parts for index, parts in state["collectors"].items()}
    workers.local.policy.set_state(state["policy"])
    workers.local.set_state(saved[0])
    workers.snapshots.take(force=True)
    call_each(workers, "set_state", {index: (parts,) for index, parts in saved.items()})
