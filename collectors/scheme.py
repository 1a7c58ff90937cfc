"""The scheme matrix: PyTorchRL's terms for who collects, computes gradients and applies updates.

Each useful combination of terms is one of the optimizers with a few options. `scheme_config`
returns these options.

Collection, for each process that computes gradients:

- `central sync`: this process collects samples itself, or waits for the samples of one collector.
- `central async`: one other process collects samples, and continues while gradients are computed.
- `parallel sync`: several processes collect samples. The process that computes gradients waits for
  all of them.
- `parallel async`: several processes collect samples. The process that computes gradients takes
  the first samples that arrive.

Gradients:

- `central sync`: one process computes gradients, and waits for each update. With `scheme_config`,
  this process is the driver.
- `central async`: one process other than the driver computes gradients, and does not wait for
  updates.
- `parallel sync`: several processes compute gradients. One update applies the mean of their
  gradients.
- `parallel async`: several processes compute gradients. The driver applies each gradient when it
  arrives.

Update:

- `central`: the driver applies gradients, and sends weights to the other processes.
- `decentralized`: the processes all-reduce their gradients, and each process applies the result to
  its own weights.
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
    """One cell of the matrix. For an optimizer outside of the matrix, all terms are "unspecified".

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
    """Returns the trainer options for a cell of the matrix.

        polopt.PolicyOptimizerTrainer({
            "env": "CartPole-v1",
            **polopt.scheme_config("parallel async", "parallel sync", "decentralized"),
        })

    Args:
        collection: `central sync`, `central async`, `parallel sync` or `parallel async`.
        gradients: `central sync`, `central async`, `parallel sync` or `parallel async`.
        update: `central` or `decentralized`.
        num_collection_workers: with parallel collection, the number of collectors of each process
            that computes gradients.
        num_gradient_workers: with parallel gradients, the number of processes that compute
            gradients.

    Raises:
        ConfigError: a term is unknown, or no optimizer supports this combination.
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
    """Returns the collection term for a process that computes gradients.

    Args:
        collectors: number of remote collectors of this process.
        how: the option `collection` of the config.
    """
    if collectors == 0:
        return "central sync"
    kind = "central" if collectors == 1 else "parallel"
    if kind == "central":
        return "central sync" if how == "sync" else "central async"
    return "parallel async" if how == "async" else "parallel sync"


#: The reason why all-reduce is not possible, by the term for gradients.
_NO_ALLREDUCE = {
    "central sync": "all-reduce needs several processes that compute gradients",
    "central async": "all-reduce needs several processes that compute gradients",
    "parallel async": "in an all-reduce, each process waits for all other processes",
}
#: The option `collection` of the config, by the term for collection.
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
    """Returns the cell of the matrix that describes an optimizer with its current options. For an
    optimizer outside of the matrix, all terms are "unspecified"."""
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
