"""The scheme matrix: which process collects, computes gradients and updates, and which ones wait.

The terms are PyTorchRL's. Each combination that makes sense is one of the optimizers with a few
options. `scheme_config` returns these options.

Collection, for each process that computes gradients:

- `central sync`: the process collects samples itself.
- `central async`: one other process collects, and goes on while gradients are computed.
- `parallel sync`: several processes collect, and the process waits for all of them.
- `parallel async`: several processes collect, and the process takes the first that is ready.

Gradients:

- `central sync`: the driver computes them, between two updates.
- `central async`: one other process computes them, and does not wait for the update.
- `parallel sync`: several processes compute them. One update applies the mean of all.
- `parallel async`: several processes compute them. Each gradient is applied as it arrives.

Update:

- `central`: the driver applies gradients, and sends weights to the other processes.
- `decentralized`: gradients are all-reduced, and each process applies the sum to its own weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polopt.common.config import ConfigError
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_replay import AsyncReplay
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_replay import SyncReplay
from polopt.optimizers.sync_samples import SyncSamples

COLLECTIONS = ("central sync", "central async", "parallel sync", "parallel async")
GRADIENTS = ("central sync", "central async", "parallel sync", "parallel async")
UPDATES = ("central", "decentralized")


class Scheme(NamedTuple):
    """One cell of the matrix. All terms are "unspecified" for an optimizer outside of the matrix.

    Attributes:
        collection: one of `COLLECTIONS`.
        gradients: one of `GRADIENTS`.
        update: one of `UPDATES`.
    """

    collection: str = "unspecified"
    gradients: str = "unspecified"
    update: str = "unspecified"


def scheme_config(
    collection: str,
    gradients: str = "central sync",
    update: str = "central",
    num_collection_workers: int = 2,
    num_gradient_workers: int = 2,
) -> dict[str, Any]:
    """The trainer options for a cell of the matrix.

        polopt.PolicyOptimizerTrainer({
            "env": "CartPole-v1",
            **polopt.scheme_config("parallel async", "parallel sync", "decentralized"),
        })

    Args:
        collection: `central sync`, `central async`, `parallel sync` or `parallel async`.
        gradients: one of the same four terms.
        update: `central` or `decentralized`.
        num_collection_workers: with parallel collection, the number of collectors of each process
            that computes gradients.
        num_gradient_workers: with parallel gradients, the number of processes that compute them.

    Raises:
        ConfigError: a term is unknown, or the combination makes no sense.
    """
    _check_term("collection", collection, COLLECTIONS)
    _check_term("gradients", gradients, GRADIENTS)
    _check_term("update", update, UPDATES)
    if update == "decentralized" and gradients != "parallel sync":
        raise ConfigError(
            f"update 'decentralized' with gradients {gradients!r}: {_NO_ALLREDUCE[gradients]}. "
            "Allowed: gradients 'parallel sync', or update 'central'"
        )
    counts = {"central sync": 0, "central async": 1}
    collectors = counts.get(collection, num_collection_workers)
    how = {"collection": _HOW[collection]}
    if gradients == "central sync":
        if collection == "parallel async":
            return {"optimizer": "async_samples", "num_workers": collectors}
        return {"optimizer": "sync_samples", "num_workers": collectors, **how}
    below = {"num_workers_below": collectors, **how}
    optimizer: Any = "async_gradients"
    if update == "decentralized":
        optimizer = "decentralized_allreduce"
    elif gradients == "parallel sync":
        optimizer = "sync_gradients"
    elif gradients == "central async":
        optimizer = {"name": "async_gradients", "max_requests_in_flight_per_worker": 2}
    processes = 1 if gradients == "central async" else num_gradient_workers
    return {"optimizer": optimizer, "num_workers": processes, **below}


def collection_of(collectors: int, how: str) -> str:
    """The collection term of a process that computes gradients with this number of remote
    collectors."""
    if collectors == 0:
        return "central sync"
    kind = "central" if collectors == 1 else "parallel"
    if kind == "central":
        return "central sync" if how == "sync" else "central async"
    return "parallel async" if how == "async" else "parallel sync"


#: Why gradients of this kind cannot be all-reduced.
_NO_ALLREDUCE = {
    "central sync": "all-reduce needs several processes that compute gradients",
    "central async": "all-reduce needs several processes that compute gradients",
    "parallel async": "in an all-reduce each process waits for all others",
}
#: The key `collection` for each kind of collection.
_HOW = {
    "central sync": "sync",
    "central async": "overlapped",
    "parallel sync": "sync",
    "parallel async": "async",
}


def _check_term(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{name}: got {given!r}. Allowed: {', '.join(map(repr, allowed))}")


def scheme_of(optimizer: PolicyOptimizer) -> Scheme:
    """The cell of an optimizer with its options. Unspecified for an optimizer outside of the
    matrix."""
    rollout = optimizer.workers.config.rollout
    workers, how = rollout.num_workers, rollout.collection
    below = collection_of(rollout.num_workers_below, how)
    place = "central" if workers == 1 else "parallel"
    if isinstance(optimizer, AsyncGradients):
        waits = workers == 1 and optimizer.config.max_requests_in_flight_per_worker == 1
        return Scheme(below, f"{place} {'sync' if waits else 'async'}", "central")
    if isinstance(optimizer, SyncGradients):
        return Scheme(below, f"{place} sync", "central")
    if isinstance(optimizer, SyncSamples | SyncReplay):
        return Scheme(collection_of(workers, how), "central sync", "central")
    if isinstance(optimizer, AsyncSamples | AsyncReplay):
        return Scheme(collection_of(workers, "async"), "central sync", "central")
    if isinstance(optimizer, DecentralizedAllReduce):
        return Scheme(below, "parallel sync", "decentralized")
    return Scheme()
