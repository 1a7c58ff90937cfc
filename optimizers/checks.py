"""Checks of options that several optimizers share. A check that fails raises a `ConfigError`."""

from __future__ import annotations

from typing import Any

from polopt.common.config import ConfigError
from polopt.rollouts.rollout_config import RolloutConfig


def check_collection(owner: str, key: str, rollout: RolloutConfig) -> None:
    """Checks that `collection`, `compress_data`, `fraction_workers_below` and
    `fraction_samples_below` fit the number of collectors of a process that computes gradients.
    A collector is a worker that samples for this process.

    Args:
        owner: name of the process that computes gradients, for error messages.
        key: name of the option that sets the number of collectors of this process.
        rollout: options of sampling, which include `key`.

    Raises:
        ConfigError: the process cannot collect as `collection` says, or an option has no effect.
            The error names the option and the reason.
    """
    collectors, how = getattr(rollout, key), rollout.collection
    if collectors == 0:
        if how != "sync":
            raise ConfigError(
                f"key 'collection': got {how!r} with {key}=0: {owner} samples in its own process, "
                f"and cannot do so while it learns. Allowed: 'sync', or {key} of 1 or more"
            )
        why = f"with {key}=0, no process sends batches"
        check_unused(why, compress_data=(rollout.compress_data, "none"))
    workers, samples = rollout.fraction_workers_below, rollout.fraction_samples_below
    if how == "async" or rollout.num_workers_below == 0:
        why = "no process waits for all workers below it"
        check_unused(
            why, fraction_workers_below=(workers, 1.0), fraction_samples_below=(samples, 0.25)
        )


def check_central_gradients(rollout: RolloutConfig) -> None:
    """Checks the options of a strategy whose driver computes all gradients from workers' samples.

    Raises:
        ConfigError: an option has no effect with such a strategy, or `collection` does not fit
            `num_workers`.
    """
    check_collection("the driver", "num_workers", rollout)
    check_unused(
        "the driver computes all gradients, so workers send no gradients and have no workers below",
        num_workers_below=(rollout.num_workers_below, 0),
        compress_gradients=(rollout.compress_gradients, "none"),
        topk_share=(rollout.topk_share, 0.1),
    )


def check_unused(why: str, **options: tuple[Any, Any]) -> None:
    """Checks that options without an effect have their default values.

    Args:
        why: the reason why the options have no effect.
        options: maps the key of each option to its value and the only allowed value.

    Raises:
        ConfigError: an option has another value than the allowed value.
    """
    for key, (given, idle) in options.items():
        if given != idle:
            raise ConfigError(f"key {key!r}: got {given!r}, but {why}. Allowed: {idle!r}")
