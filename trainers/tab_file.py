"""Writes what an optimizer's dashboard tab shows to the trial's directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pyarrow import fs

from polopt.metrics.tab import TAB_FILE, OptimizerTab
from polopt.optimizers.policy_optimizer import PolicyOptimizer

logger = logging.getLogger("polopt")


def tab_of(
    cls: type[PolicyOptimizer], extra_stats: Mapping[str, Any] | None = None
) -> OptimizerTab:
    """What an optimizer declares, with its phases.

    Args:
        cls: its class.
        extra_stats: what its method `extra_stats` returns. None: without the names of its numbers.
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


def write_tab(optimizer: PolicyOptimizer, filesystem: fs.FileSystem, folder: str) -> None:
    """Writes the file, or warns if that fails: results are the same without it.

    Args:
        optimizer: the trial's.
        filesystem: of the trial, which may be in a cloud.
        folder: directory of the trial's results there. The trainable's own `logdir` is another
            directory under Tune, which copies it only on request.
    """
    tab = tab_of(type(optimizer), optimizer.extra_stats())
    path = f"{folder}/{TAB_FILE}"
    try:
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(path) as file:
            file.write(tab.to_json().encode())
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
