"""Writes what an optimizer's dashboard tab shows to the trial's directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from polopt.metrics.tab import TAB_FILE, OptimizerTab
from polopt.optimizers.base import PolicyOptimizer

logger = logging.getLogger("polopt")


def tab_of(
    cls: type[PolicyOptimizer], extra_stats: Mapping[str, Any] | None = None
) -> OptimizerTab:
    """What an optimizer declares, with its phases.

    Args:
        cls: its class.
        extra_stats: what its method `extra_stats` returns; None: without the names of its numbers.
    """
    numbers = [
        key
        for key, value in (extra_stats or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return OptimizerTab(
        name=cls.name or cls.__name__,
        title=cls.__name__,
        phases=tuple(cls.phases),
        extra_stats=tuple(numbers),
        tab=cls.tab,
    )


def write_tab(optimizer: PolicyOptimizer, storage: Any) -> None:
    """Writes the file, or warns if that fails: results are the same without it.

    Args:
        optimizer: the trial's.
        storage: Tune's `StorageContext` of the trial, whose directory may be in a cloud. The
            trainable's own `logdir` is another directory, which Tune copies only on request.
    """
    tab = tab_of(type(optimizer), optimizer.extra_stats())
    path = f"{storage.trial_fs_path}/{TAB_FILE}"
    try:
        storage.storage_filesystem.create_dir(storage.trial_fs_path, recursive=True)
        with storage.storage_filesystem.open_output_stream(path) as file:
            file.write(tab.to_json().encode())
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
