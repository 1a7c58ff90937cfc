"""The scheme matrix: which process collects, computes gradients and updates, and which ones wait.

The terms are PyTorchRL's. Each combination that has a meaning is one of the optimizers with a few
options; `scheme_config` returns those.

- collection `central`: each process that computes gradients has one collector: in the same process
  (`sync`), or in a process of its own, which continues meanwhile (`async`). `parallel`: it has
  several, and waits for all (`sync`) or takes the first that is ready (`async`).
- gradients `central`: one process computes them: the driver, between two updates (`sync`), or
  another process, which does not wait for the update (`async`). `parallel`: several processes do,
  and an update is the mean of all (`sync`) or each gradient as it arrives (`async`).
- update `central`: the driver applies gradients, and sends weights. `decentralized`: gradients are
  all-reduced, and each process applies the sum to its own weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polopt.common.config import ConfigError
from polopt.rollouts.config import RolloutConfig

COLLECTIONS = ("central sync", "central async", "parallel sync", "parallel async")
GRADIENTS = ("central sync", "central async", "parallel sync", "parallel async")
UPDATES = ("central", "decentralized")


class Scheme(NamedTuple):
    """One cell of the matrix; "unspecified" for optimizers outside of it.

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
        gradients: likewise.
        update: `central` or `decentralized`.
        num_collection_workers: collectors of each process that computes gradients, where collection
            is parallel.
        num_gradient_workers: processes that compute gradients, where gradients are parallel.

    Raises:
        ConfigError: for an unknown term, or a combination without a meaning.
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
    """The term for this number of remote collectors of one process that computes gradients."""
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


def check_remote_workers(optimizer: str, rollout: RolloutConfig) -> None:
    """For strategies in which the local worker does not sample.

    Raises:
        ConfigError: there are no remote workers.
    """
    if rollout.num_workers == 0:
        raise ConfigError(
            f"optimizer {optimizer!r} with num_workers=0: it needs remote workers. Allowed: "
            "num_workers of 1 or more, or optimizer 'sync_samples'"
        )


def check_collection(owner: str, key: str, rollout: RolloutConfig) -> None:
    """Refuses options of collection that have no effect, or no meaning without collectors.

    Args:
        owner: the process that computes gradients, for errors.
        key: option with the number of its collectors.
        rollout: options of sampling, with that key.

    Raises:
        ConfigError: names the option and the reason.
    """
    collectors, how = getattr(rollout, key), rollout.collection
    if collectors == 0:
        if how != "sync":
            raise ConfigError(
                f"key 'collection': got {how!r} with {key}=0: {owner} samples in its own process, "
                f"and cannot do so while it learns. Allowed: 'sync', or {key} of 1 or more"
            )
        why = f"with {key}=0 no batch is sent"
        check_unused(why, compress_data=(rollout.compress_data, "none"))
    below = rollout.fraction_workers_below
    if how == "async" or rollout.num_workers_below == 0:
        why = "no process waits for workers below another"
        check_unused(why, fraction_workers_below=(below, 1.0))


def check_central_gradients(rollout: RolloutConfig) -> None:
    """For strategies in which the driver computes all gradients from samples of the workers.

    Raises:
        ConfigError: names the option and the reason.
    """
    check_collection("the driver", "num_workers", rollout)
    check_unused(
        "the driver computes all gradients: no worker has workers below it and no gradient is sent",
        num_workers_below=(rollout.num_workers_below, 0),
        compress_gradients=(rollout.compress_gradients, "none"),
    )


def check_unused(why: str, **options: tuple[Any, Any]) -> None:
    """Refuses options that have no effect.

    Args:
        why: the reason.
        options: by key `(given, value without effect)`.

    Raises:
        ConfigError: for the first that differs.
    """
    for key, (given, idle) in options.items():
        if given != idle:
            raise ConfigError(f"key {key!r}: got {given!r}, but {why}. Allowed: {idle!r}")
