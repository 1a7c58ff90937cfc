"""The scheme matrix: who collects, who computes gradients, who updates, and who waits for whom.

The words are PyTorchRL's. Each combination that has a meaning is one of the three optimizers with
a few options; `scheme_config` says which, and why the others have none.

- collection `central`: whoever computes gradients has one collector: in its own process (`sync`),
  or in a process beside it, which goes on meanwhile (`async`). `parallel`: it has several, and
  waits for all (`sync`) or takes who is first (`async`).
- gradients `central`: one place computes them: the driver, between two updates (`sync`), or a
  process beside it, which does not wait for the update (`async`). `parallel`: several places do,
  and an update is made of the mean of all (`sync`) or of each as it comes (`async`).
- update `central`: the driver applies gradients, and sends weights. `decentralized`: gradients are
  all-reduced, and each place applies the same to its own weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polopt.common.config import ConfigError
from polopt.rollouts.config import RolloutConfig

COLLECTIONS = ("central sync", "central async", "parallel sync", "parallel async")
GRADIENTS = ("central sync", "central async", "parallel sync", "parallel async")
UPDATES = ("central", "decentralized")


class Scheme(NamedTuple):
    """One cell of the matrix.

    Attributes:
        collection: of `COLLECTIONS`.
        gradients: of `GRADIENTS`.
        update: of `UPDATES`.
    """

    collection: str
    gradients: str
    update: str


def scheme_config(
    collection: str,
    gradients: str = "central sync",
    update: str = "central",
    num_collection_workers: int = 2,
    num_gradient_workers: int = 2,
) -> dict[str, Any]:
    """The options of a trainer that make a cell of the matrix.

        polopt.PolicyOptimizerTrainer({
            "env": "CartPole-v1",
            **polopt.scheme_config("parallel async", "parallel sync", "decentralized"),
        })

    Args:
        collection: `central sync`, `central async`, `parallel sync` or `parallel async`.
        gradients: the same.
        update: `central` or `decentralized`.
        num_collection_workers: of each place that computes gradients, where collection is parallel.
        num_gradient_workers: where gradients are parallel.

    Raises:
        ConfigError: for a word that is none of these, or a combination without meaning.
    """
    _check_word("collection", collection, COLLECTIONS)
    _check_word("gradients", gradients, GRADIENTS)
    _check_word("update", update, UPDATES)
    if update == "decentralized" and gradients != "parallel sync":
        raise ConfigError(
            f"update 'decentralized' with gradients {gradients!r}: {_NO_PEERS[gradients]}; "
            "allowed: gradients 'parallel sync', or update 'central'"
        )
    counts = {"central sync": 0, "central async": 1}
    collectors = counts.get(collection, num_collection_workers)
    how = {"collection": _HOW[collection]}
    if gradients == "central sync":
        return {"optimizer": "sync_samples", "num_workers": collectors, **how}
    below = {"num_workers_below": collectors, **how}
    if update == "decentralized":
        optimizer: Any = "decentralized_allreduce"
    elif gradients == "parallel sync":
        optimizer = {"name": "async_gradients", "sync": True}
    elif gradients == "central async":
        optimizer = {"name": "async_gradients", "max_requests_in_flight_per_worker": 2}
    else:
        optimizer = "async_gradients"
    places = 1 if gradients == "central async" else num_gradient_workers
    return {"optimizer": optimizer, "num_workers": places, **below}


def collection_of(collectors: int, how: str) -> str:
    """The word for so many remote collectors of one place that computes gradients."""
    if collectors == 0:
        return "central sync"
    kind = "central" if collectors == 1 else "parallel"
    if kind == "central":
        return "central sync" if how == "sync" else "central async"
    return "parallel async" if how == "async" else "parallel sync"


#: Why gradients of this kind can not be all-reduced.
_NO_PEERS = {
    "central sync": "one place alone has nobody to share gradients with",
    "central async": "one place alone has nobody to share gradients with",
    "parallel async": "in an all-reduce each waits for all, so nobody can be ahead of the others",
}
#: The key `collection` for each kind of collection.
_HOW = {
    "central sync": "sync",
    "central async": "overlapped",
    "parallel sync": "sync",
    "parallel async": "async",
}


def _check_word(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{name}: got {given!r}; allowed: {', '.join(map(repr, allowed))}")


def check_remote_workers(optimizer: str, rollout: RolloutConfig) -> None:
    """For strategies where the driver computes no gradients.

    Raises:
        ConfigError: there is nobody else to.
    """
    if rollout.num_workers == 0:
        raise ConfigError(
            f"optimizer {optimizer!r} with num_workers=0: it needs remote workers; "
            "allowed: num_workers of 1 or more, or optimizer 'sync_samples'"
        )


def check_collection(owner: str, key: str, rollout: RolloutConfig) -> None:
    """Refuses collection beside who has nobody beside him, and options of it without effect.

    Args:
        owner: who computes gradients, in words.
        key: that says how many collectors he has.
        rollout: with that key.

    Raises:
        ConfigError: see there.
    """
    collectors, how = getattr(rollout, key), rollout.collection
    if collectors == 0:
        if how != "sync":
            raise ConfigError(
                f"key 'collection': got {how!r} with {key}=0: {owner} samples in its own process, "
                f"and can not do so while it learns; allowed: 'sync', or {key} of 1 or more"
            )
        why = f"with {key}=0 no batch travels"
        check_unused(why, compress_data=(rollout.compress_data, "none"))
    below = rollout.fraction_workers_below
    if how == "async" or rollout.num_workers_below == 0:
        why = "nobody below a worker is waited for"
        check_unused(why, fraction_workers_below=(below, 1.0))


def check_unused(why: str, **options: tuple[Any, Any]) -> None:
    """Refuses options that would change nothing.

    Args:
        why: they would not.
        options: by key `(given, without effect)`.

    Raises:
        ConfigError: for the first that differs from what has no effect.
    """
    for key, (given, idle) in options.items():
        if given != idle:
            raise ConfigError(f"key {key!r}: got {given!r}, but {why}; allowed: {idle!r}")
