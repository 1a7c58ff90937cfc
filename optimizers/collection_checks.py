"""Checks of options that several optimizers share. A check that fails raises a `ConfigError`."""

from __future__ import annotations

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
        check_unused(rollout, why, "compress_data")
    if how == "async" or rollout.num_workers_below == 0:
        why = "no process waits for all workers below it"
        check_unused(rollout, why, "fraction_workers_below", "fraction_samples_below")


def check_central_gradients(rollout: RolloutConfig) -> None:
    """Checks the options of a strategy whose driver computes all gradients from workers' samples.

    Raises:
        ConfigError: an option has no effect with such a strategy, or `collection` does not fit
            `num_workers`.
    """
    check_collection("the driver", "num_workers", rollout)
    why = (
        "the driver computes all gradients, so workers send no gradients and have no workers below"
    )
    check_unused(rollout, why, "num_workers_below", "compress_gradients", "topk_share")


def check_unused(rollout: RolloutConfig, why: str, *keys: str) -> None:
    """Checks that options without an effect have their default values.

    Args:
        rollout: options of sampling.
        why: the reason why the options have no effect.
        keys: the keys of these options.

    Raises:
        ConfigError: an option has another value than its default value.
    """
    for key in keys:
        given, default = getattr(rollout, key), RolloutConfig.model_fields[key].default
        if given != default:
            raise ConfigError(f"key {key!r}: got {given!r}, but {why}. Allowed: {default!r}")
